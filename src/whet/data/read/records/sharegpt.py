"""The `sharegpt` format: {"conversations": [{"from": "human", "value": "…"}, {"from": "gpt", "value": "…"}]}."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from whet.core.errors import BadRecordError
from whet.data.conversation import Conversation, Message, Origin
from whet.data.read.records.messages import (
    check_message_order,
    has_other_content,
    is_turn_list,
    make_conversation,
    parse_message,
    parse_train_flag,
)
from whet.data.read.records.record_fields import (
    closest_key,
    decode_list,
    describe_type,
    parse_json,
    require_field,
    require_object,
    require_text,
    shorten,
)
from whet.data.read.records.tools import parse_tool_call

SHAREGPT_FIELDS = {
    "conversations": ("conversations", "conversation", "messages", "dialogue", "dialog", "chat", "turns"),
    "from": ("from",),
    "value": ("value",),
}
_SHAREGPT_EXAMPLE = '{"conversations": [{"from": "human", "value": "…"}, {"from": "gpt", "value": "…"}]}'
SHAREGPT_ROLES = {
    "human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "chatgpt": "assistant",
    "model": "assistant", "bot": "assistant", "ai": "assistant", "system": "system", "observation": "tool",
    "tool": "tool", "function_response": "tool", "tool_response": "tool",
}  # fmt: skip
SHAREGPT_CALLS = ("function_call", "tool_call")


def recognise_sharegpt(record: Any, fields: Mapping[str, str]) -> list[dict[str, str]]:
    """Every set of field names under which the record matches."""
    if not isinstance(record, dict):
        return []
    speaker, value = fields.get("from", "from"), fields.get("value", "value")
    names = [fields["conversations"]] if "conversations" in fields else SHAREGPT_FIELDS["conversations"]
    return [
        {"conversations": name, "from": speaker}
        for name in names
        if is_turn_list(record.get(name), speaker) and not has_other_content(record[name], value)
    ]


def parse_sharegpt(record: Any, names: Mapping[str, str], origin: Origin) -> Conversation:
    """Parse a record; raises BadRecordError."""
    record = require_object(record, _SHAREGPT_EXAMPLE)
    name = names["conversations"]
    turns = decode_list(require_field(record, name, "no messages"), f"'{name}'")
    if not isinstance(turns, list) or not turns:
        raise BadRecordError("no messages", f"'{name}' must be a list of at least one turn, not {describe_type(turns)}")
    messages = [_parse_sharegpt_turn(turn, number, names) for number, turn in enumerate(turns, 1)]
    check_message_order(messages)
    return make_conversation(messages, record, names, origin)


def _parse_sharegpt_turn(turn: Any, number: int, names: Mapping[str, str]) -> Message:
    place = f"message {number}"
    if not isinstance(turn, dict):
        raise BadRecordError("bad message", f"{place} must be an object, not {describe_type(turn)}")
    speaker, value = turn.get(names["from"]), turn.get(names["value"])
    if speaker is None:
        raise BadRecordError("no role", f"{place} has no '{names['from']}'; set it to human or gpt")
    if speaker in SHAREGPT_CALLS:
        calls = parse_json(require_text(value, f"{place}: '{names['value']}'"), place)
        parsed = tuple(parse_tool_call(call, place) for call in (calls if isinstance(calls, list) else [calls]))
        if not parsed:
            raise BadRecordError("bad tool call", f"{place} has no calls; remove it")
        train = parse_train_flag(turn, "assistant", place)
        return Message("assistant", "", tool_calls=parsed, train=train, null_content=True)
    role = SHAREGPT_ROLES.get(speaker) if isinstance(speaker, str) else None
    if role is None:
        known = ", ".join((*SHAREGPT_ROLES, *SHAREGPT_CALLS))
        near = closest_key([speaker.strip().lower()], SHAREGPT_ROLES) if isinstance(speaker, str) else None
        hint = "" if near is None else f". Write {near!r}"
        raise BadRecordError("unknown role", f"{place} is from {shorten(speaker)}; known: {known}{hint}")
    return parse_message({**turn, names["from"]: role}, number, names["from"], names["value"])
