"""The `messages` format: {"messages": [{"role": "user", "content": "…"}, …]}, or the list alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from whet.data.conversation import BadRecordError, Conversation, Message, Origin
from whet.data.formats.message import parse_message
from whet.data.formats.tools import check_turns, parse_tools
from whet.data.formats.values import as_list, is_good, kind

FIELDS = {"messages": ("messages", "conversations", "conversation", "dialogue", "dialog", "chat", "turns"),
          "role": ("role",), "content": ("content",), "tools": ("tools",)}  # fmt: skip
_EXAMPLE = '{"messages": [{"role": "user", "content": "…"}, {"role": "assistant", "content": "…"}]}'
_TALK = ("user", "assistant")

_REFUSED = {"images", "image", "videos", "video", "audio", "audios", "chat_template_kwargs"}
_TOLD = frozenset({"tools", "functions", "weight", "train", *_REFUSED})
"""Keys of a record that change what a model should learn."""


def recognise(record: Any, fields: Mapping[str, str]) -> list[dict[str, str]]:
    """The names under which a record holds such messages; none if it is of another format."""
    role, content = fields.get("role", "role"), fields.get("content", "content")
    if isinstance(record, list):
        return [{"messages": "messages", "role": role, "content": content}] if _looks(record, role) else []
    if not isinstance(record, dict):
        return []
    names = [fields["messages"]] if "messages" in fields else FIELDS["messages"]
    return [{"messages": name, "role": role, "content": content} for name in names if _looks(record.get(name), role)]


def _looks(turns: Any, role: str) -> bool:
    if isinstance(turns, str) and f'"{role}"' in turns[:200]:
        return True
    return isinstance(turns, list) and bool(turns) and isinstance(turns[0], dict) and role in turns[0]


def parse(record: Any, names: Mapping[str, str], origin: Origin) -> Conversation:
    """A conversation, or a BadRecordError with the reason."""
    if isinstance(record, dict):
        turns: Any = record.get(names["messages"])
        more = len(record) > 1 and (names["tools"] in record or not _TOLD.isdisjoint(record))
        tools = _parse_rest(record, names["tools"]) if more else ()
    else:
        turns, tools = record, ()
    messages = parse_turns(_turns(turns, record, names["messages"]), names["role"], names["content"])
    return Conversation(messages, origin, tools)


def parse_turns(turns: Sequence[Any], role_name: str = "role", content_name: str = "content") -> tuple[Message, ...]:
    """The messages of a list; plain ones by a short way, because they are nearly all there is."""
    messages, plain = [], True
    for number, turn in enumerate(turns, 1):
        if isinstance(turn, dict) and len(turn) == 2:
            role, content = turn.get(role_name), turn.get(content_name)
            if role in _TALK and isinstance(content, str) and content and not content.isspace() and is_good(content):
                messages.append(Message(role, content))
                continue
        plain = False
        messages.append(parse_message(turn, number, role_name, content_name))
    if not plain:
        check_turns(messages)
    return tuple(messages)


def _turns(turns: Any, record: Any, name: str) -> list[Any]:
    turns = as_list(turns, f"'{name}'")
    if isinstance(turns, list) and turns:
        return turns
    if not isinstance(record, (dict, list)):
        raise BadRecordError("not an object", f"a record is an object with '{name}', this is {kind(record)}")
    if isinstance(record, dict) and turns is None:
        keys = ", ".join(map(repr, list(record)[:20])) or "no keys"
        raise BadRecordError("no messages", f"the record has no '{name}' (it has {keys}); write {_EXAMPLE}")
    raise BadRecordError("no messages", f"'{name}' must be a list of at least one message, not {kind(turns)}")


def _parse_rest(record: Mapping[str, Any], tools_name: str) -> tuple[dict[str, Any], ...]:
    for key in _REFUSED & record.keys():
        if record[key] not in (None, [], {}, ""):
            raise BadRecordError("unsupported key", f"the record has '{key}', and whet trains on text alone; remove it")
    if record.get("weight") not in (None, 1) or record.get("train") not in (None, True):
        raise BadRecordError(
            "bad weight",
            "a record as a whole has no weight. Give its messages a weight of 0 or 1, or the source a weight",
        )
    return parse_tools(record.get(tools_name)) or parse_tools(record.get("functions"))
