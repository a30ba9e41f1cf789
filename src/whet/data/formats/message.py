"""One message of OpenAI's form, with all that it may carry: parts, tool calls, reasoning, a weight."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from whet.data.conversation import ROLES, BadRecordError, Message, ToolCall
from whet.data.formats.tools import parse_call, parse_calls
from whet.data.formats.values import as_list, checked, kind, short

_REASONING = ("reasoning_content", "reasoning", "thinking")
_NOTHING: tuple[Any, ...] = (None, [], {}, "")


def parse_message(turn: Any, number: int, role_name: str = "role", content_name: str = "content") -> Message:
    """A message, or a BadRecordError that names it by its number."""
    place = f"message {number}"
    if not isinstance(turn, dict):
        raise BadRecordError("bad message", f"{place} must be an object, not {kind(turn)}")
    role = _parse_role(turn.get(role_name), place, role_name)
    calls, reasoning = _parse_calls(turn, role, place), _parse_reasoning(turn, role, place)
    content = _parse_content(turn.get(content_name), place, bool(calls or reasoning))
    if role in ("user", "assistant") and not (calls or reasoning) and not content.strip():
        raise BadRecordError("empty turn", f"{place} of the {role} is empty; fill it or remove it")
    if turn.get("tools") not in _NOTHING:
        raise BadRecordError("unsupported key", f"{place} has 'tools'; they belong beside the messages, in the record")
    learn = parse_learn(turn, role, place)
    if role != "tool":
        return Message(role, content, reasoning, calls, learn)
    return Message(
        role, content, learn=learn, call_id=_optional(turn.get("tool_call_id"), f"{place}: 'tool_call_id'"),
        name=_optional(turn.get("name"), f"{place}: 'name'"),
    )  # fmt: skip


def _parse_role(role: Any, place: str, role_name: str) -> str:
    if role is None:
        raise BadRecordError("no role", f"{place} has no '{role_name}'; add one of {', '.join(ROLES)}")
    if role == "function":  # OpenAI's older word
        return "tool"
    if role not in ROLES:
        raise BadRecordError("unknown role", f"{place} has the role {short(role)}; known are {', '.join(ROLES)}")
    return str(role)


def _parse_content(content: Any, place: str, may_lack: bool) -> str:
    if content is None and may_lack:
        return ""
    if not isinstance(content, list):
        return checked(content, f"{place}: 'content'")
    texts = [part.get("text") if isinstance(part, dict) and part.get("type") == "text" else None for part in content]
    if not texts or not all(isinstance(text, str) for text in texts):
        raise BadRecordError("bad content", f"{place}: only parts of type 'text' can be trained on")
    return checked("".join(map(str, texts)), f"{place}: 'content'")


def _parse_calls(turn: Mapping[str, Any], role: str, place: str) -> tuple[ToolCall, ...]:
    many, one = as_list(turn.get("tool_calls"), f"{place}: 'tool_calls'"), turn.get("function_call")
    if many in _NOTHING and one in _NOTHING:
        return ()
    if role != "assistant":
        raise BadRecordError("bad tool call", f"{place} of the {role} calls a tool; only the assistant can")
    calls = () if many in _NOTHING else parse_calls(many, place)
    return calls if one in _NOTHING else (*calls, parse_call(one, place))


def _parse_reasoning(turn: Mapping[str, Any], role: str, place: str) -> str:
    given = {key: turn[key] for key in _REASONING if turn.get(key) not in _NOTHING}
    if not given:
        return ""
    if role != "assistant":
        key = next(iter(given))
        raise BadRecordError("bad reasoning", f"{place} of the {role} has '{key}'; only the assistant's may")
    texts = [checked(text, f"{place}: '{key}'") for key, text in given.items()]
    if any(text != texts[0] for text in texts):
        raise BadRecordError("bad reasoning", f"{place} has {' and '.join(given)}, which differ; keep one")
    return texts[0]


def parse_learn(turn: Mapping[str, Any], role: str, place: str) -> bool | None:
    """False where the message says that it is not learned: `weight: 0` or `train: false`."""
    weight, train = turn.get("weight"), turn.get("train")
    if weight is None and train is None:
        return None
    if weight not in (None, 0, 1) or isinstance(weight, bool):
        raise BadRecordError("bad weight", f"{place} has the weight {short(weight)}; only 0 and 1 are possible")
    if train not in (None, True, False) or isinstance(train, (int, float)) != isinstance(train, bool):
        raise BadRecordError("bad weight", f"{place} has train: {short(train)}; only true and false are possible")
    if weight is not None and train is not None and bool(weight) != train:
        raise BadRecordError("bad weight", f"{place} has weight: {weight} and train: {train}, which differ; keep one")
    learned = bool(weight) if train is None else bool(train)
    if learned and role != "assistant":
        raise BadRecordError(
            "bad weight",
            f"{place} of the {role} asks to be learned; only assistant turns can be. To learn everything: "
            "data.train_on=all",
        )
    return None if learned else False


def _optional(value: Any, place: str) -> str | None:
    return None if value is None else checked(value, place)
