"""The `messages` format: {"messages": [{"role": "user", "content": "…"}, …]}."""

from __future__ import annotations

from typing import Any

from whet.data.conversation import ROLES, BadRecordError, Conversation, Message, Origin

_MEANINGFUL = ("tool_calls", "function_call", "reasoning_content", "thinking", "weight", "train", "tools")
"""Keys that change what a model should learn. Ignoring them would train on something else than was meant."""


def parse_record(record: Any, origin: Origin) -> Conversation:
    """A record of the `messages` format: {"messages": [{"role": "user", "content": "…"}, …]}."""
    if not isinstance(record, dict):
        raise BadRecordError("not an object", f"a record is an object with 'messages', this is {_kind(record)}")
    for key, value in record.items():
        if key in _MEANINGFUL and value not in (None, [], {}, ""):
            raise BadRecordError("unsupported key", f"the record has '{key}', which whet cannot mask yet; remove it")
    turns = record.get("messages")
    if turns is None:
        keys = ", ".join(map(repr, record)) or "no keys"
        raise BadRecordError(
            "no messages",
            f"the record has no 'messages' (it has {keys}); write "
            '{"messages": [{"role": "user", "content": "…"}, {"role": "assistant", "content": "…"}]}',
        )
    if not isinstance(turns, list) or not turns:
        raise BadRecordError("no messages", f"'messages' must be a list of at least one message, not {_kind(turns)}")
    return Conversation(tuple(_parse_message(turn, i) for i, turn in enumerate(turns, 1)), origin)


def _parse_message(turn: Any, number: int) -> Message:
    if not isinstance(turn, dict):
        raise BadRecordError("bad message", f"message {number} must be an object, not {_kind(turn)}")
    role = turn.get("role")
    if role is None:
        raise BadRecordError("no role", f"message {number} has no 'role'; add one of {', '.join(ROLES)}")
    if role not in ROLES:
        raise BadRecordError("unknown role", f"message {number} has the role {role!r}; known are {', '.join(ROLES)}")
    for key, value in turn.items():
        if key in _MEANINGFUL and value not in (None, [], {}, ""):
            raise BadRecordError("unsupported key", f"message {number} has '{key}', which whet cannot mask yet")
    return Message(role, _parse_content(turn.get("content"), number))


def _parse_content(content: Any, number: int) -> str:
    if isinstance(content, str):
        return _checked(content, number)
    if isinstance(content, list):
        texts = [
            part.get("text") if isinstance(part, dict) and part.get("type") == "text" else None for part in content
        ]
        if texts and all(isinstance(text, str) for text in texts):
            return _checked("".join(texts), number)  # type: ignore[arg-type]
        raise BadRecordError("bad content", f"message {number}: only parts of type 'text' can be trained on")
    raise BadRecordError("bad content", f"message {number}: 'content' must be text, not {_kind(content)}")


def _checked(text: str, number: int) -> str:
    """JSON can escape half a surrogate pair (`\\ud800`), which is no text and breaks every tokenizer."""
    if any("\ud800" <= char <= "\udfff" for char in text):
        raise BadRecordError("bad text", f"message {number} holds a lone surrogate, which is not valid Unicode")
    return text


def _kind(value: Any) -> str:
    names = {dict: "an object", list: "a list", str: "text", bool: "true or false", type(None): "nothing"}
    return "an empty list" if value == [] else names.get(type(value), "a number")
