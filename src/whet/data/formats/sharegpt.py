"""The `sharegpt` format: {"conversations": [{"from": "human", "value": "…"}, {"from": "gpt", "value": "…"}]}."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from whet.data.conversation import BadRecordError, Conversation, Message, Origin
from whet.data.formats.message import parse_learn
from whet.data.formats.tools import check_turns, parse_call, parse_tools
from whet.data.formats.values import as_list, checked, filled, kind, need_field, need_object, parse_json, short

FIELDS = {"conversations": ("conversations", "conversation", "messages", "dialogue", "dialog", "chat", "turns"),
          "from": ("from",), "value": ("value",), "system": ("system",), "tools": ("tools",)}  # fmt: skip
_EXAMPLE = '{"conversations": [{"from": "human", "value": "…"}, {"from": "gpt", "value": "…"}]}'
_ROLES = {
    "human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "chatgpt": "assistant",
    "model": "assistant", "bot": "assistant", "system": "system", "observation": "tool", "tool": "tool",
    "function_response": "tool",
}  # fmt: skip
_CALL = "function_call"


def recognise(record: Any, fields: Mapping[str, str]) -> list[dict[str, str]]:
    """The names under which a record holds such turns; none if it is of another format."""
    if not isinstance(record, dict):
        return []
    speaker = fields.get("from", "from")
    names = [fields["conversations"]] if "conversations" in fields else FIELDS["conversations"]
    return [{"conversations": name, "from": speaker} for name in names if _looks(record.get(name), speaker)]


def _looks(turns: Any, speaker: str) -> bool:
    if isinstance(turns, str) and f'"{speaker}"' in turns[:200]:
        return True
    return isinstance(turns, list) and bool(turns) and isinstance(turns[0], dict) and speaker in turns[0]


def parse(record: Any, names: Mapping[str, str], origin: Origin) -> Conversation:
    """A conversation, or a BadRecordError with the reason."""
    record = need_object(record, _EXAMPLE)
    name = names["conversations"]
    turns = as_list(need_field(record, name, "no messages"), f"'{name}'")
    if not isinstance(turns, list) or not turns:
        raise BadRecordError("no messages", f"'{name}' must be a list of at least one turn, not {kind(turns)}")
    messages = [_parse_turn(turn, number, names) for number, turn in enumerate(turns, 1)]
    if system := record.get(names["system"]):
        messages.insert(0, Message("system", checked(system, f"'{names['system']}'")))
    check_turns(messages)
    return Conversation(tuple(messages), origin, parse_tools(record.get(names["tools"])))


def _parse_turn(turn: Any, number: int, names: Mapping[str, str]) -> Message:
    place = f"message {number}"
    if not isinstance(turn, dict):
        raise BadRecordError("bad message", f"{place} must be an object, not {kind(turn)}")
    speaker, value = turn.get(names["from"]), turn.get(names["value"])
    if speaker is None:
        raise BadRecordError("no role", f"{place} has no '{names['from']}'; add human or gpt")
    if speaker == _CALL:
        calls = parse_json(checked(value, f"{place}: '{names['value']}'"), place)
        parsed = tuple(parse_call(call, place) for call in (calls if isinstance(calls, list) else [calls]))
        if not parsed:
            raise BadRecordError("bad tool call", f"{place} calls nothing; remove it")
        return Message("assistant", "", calls=parsed, learn=parse_learn(turn, "assistant", place))
    role = _ROLES.get(speaker) if isinstance(speaker, str) else None
    if role is None:
        known = ", ".join((*_ROLES, _CALL))
        raise BadRecordError("unknown role", f"{place} is from {short(speaker)}; known are {known}")
    where = f"{place}: '{names['value']}'"
    text = filled(value, where) if role in ("user", "assistant") else checked(value, where)
    return Message(role, text, learn=parse_learn(turn, role, place))
