"""The `messages` format (OpenAI): messages with content parts, tool calls, reasoning and weights."""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from whet.core.display import is_valid_text
from whet.core.errors import BadRecordError
from whet.data.conversation import (
    CALCULATOR_SCHEMA,
    ROLES,
    CalculatorStep,
    Conversation,
    Message,
    Origin,
    ToolCall,
    calculator_messages,
)
from whet.data.read.records.record_fields import (
    EMPTY_VALUES,
    closest_key,
    decode_list,
    describe_keys,
    describe_type,
    find_optional,
    require_text,
    shorten,
)
from whet.data.read.records.tools import parse_tool_call, parse_tool_calls, parse_tools

# The record: {"messages": [{"role": "user", "content": "…"}, …]}, or only the list.

MESSAGES_FIELDS = {
    "messages": ("messages", "conversations", "conversation", "dialogue", "dialog", "chat", "turns"),
    "role": ("role",),
    "content": ("content",),
}
MESSAGES_EXAMPLE = '{"messages": [{"role": "user", "content": "…"}, {"role": "assistant", "content": "…"}]}'
_LIST_OF_OBJECTS = re.compile(r"\s*\[\s*\{")
_CHAT_ROLES = ("user", "assistant")
TEXT_KEYS = ("text", "content", "value", "message", "body")
"""The names that the text of a message has."""


def recognise_messages(record: Any, fields: Mapping[str, str]) -> list[dict[str, str]]:
    """Every set of field names under which the record matches; empty for records of other formats."""
    role, content = fields.get("role", "role"), fields.get("content", "content")
    if isinstance(record, list):
        return [{"messages": "messages", "role": role, "content": content}] if is_turn_list(record, role) else []
    if not isinstance(record, dict):
        return []
    names = [fields["messages"]] if "messages" in fields else MESSAGES_FIELDS["messages"]
    return [
        {"messages": name, "role": role, "content": content}
        for name in names
        if is_turn_list(record.get(name), role) and not has_other_content(record[name], content)
    ]


def is_turn_list(turns: Any, key: str) -> bool:
    """Whether this is a list of objects, or a string of one in JSON or Python, whose first object has `key`."""
    if isinstance(turns, str) and _LIST_OF_OBJECTS.match(turns):
        return f'"{key}"' in turns or f"'{key}'" in turns
    return isinstance(turns, list) and bool(turns) and isinstance(turns[0], dict) and key in turns[0]


def has_other_content(turns: Any, name: str) -> bool:
    """Whether the first turn has its text under another name."""
    first = turns[0] if isinstance(turns, list) else {}
    return name not in first and any(isinstance(first.get(key), str) for key in TEXT_KEYS)


def parse_messages(record: Any, names: Mapping[str, str], origin: Origin) -> Conversation:
    """Parse a record; raises BadRecordError."""
    if isinstance(record, dict):
        turns: Any = record.get(names["messages"])
    else:
        turns = record
    turns = _require_messages(turns, record, names["messages"])
    conversation = make_conversation(parse_message_list(turns, names["role"], names["content"]), record, names, origin)
    calculates = any(isinstance(turn, dict) and _has_python_parts(turn.get(names["content"])) for turn in turns)
    if not calculates or CALCULATOR_SCHEMA in conversation.tools:
        return conversation
    return replace(conversation, tools=(CALCULATOR_SCHEMA, *conversation.tools))


def parse_message_list(
    turns: Sequence[Any], role_name: str = "role", content_name: str = "content"
) -> tuple[Message, ...]:
    """Parse a list of messages. Messages with only a role and a string, nearly all of them, take a fast path."""
    messages, plain = [], True
    for number, turn in enumerate(turns, 1):
        if isinstance(turn, dict) and len(turn) == 2:
            role, content = turn.get(role_name), turn.get(content_name)
            if (
                role in _CHAT_ROLES
                and isinstance(content, str)
                and content
                and not content.isspace()
                and is_valid_text(content)
            ):
                messages.append(Message(role, content))
                continue
        plain = False
        if isinstance(turn, dict) and _has_python_parts(turn.get(content_name)):
            messages += _parse_calculating_turn(turn, number, role_name, content_name, _count_calls(messages))
        else:
            messages.append(parse_message(turn, number, role_name, content_name))
    if not plain:
        check_message_order(messages)
    return tuple(messages)


def _require_messages(turns: Any, record: Any, name: str) -> list[Any]:
    turns = decode_list(turns, f"'{name}'")
    if isinstance(turns, list) and turns:
        return turns
    if not isinstance(record, (dict, list)):
        raise BadRecordError(
            "not an object", f"the record must be an object with '{name}', not {describe_type(record)}"
        )
    if isinstance(record, dict) and name not in record:
        raise BadRecordError(
            "no messages", f"the record has no '{name}' ({describe_keys(record, name)}). Write {MESSAGES_EXAMPLE}"
        )
    raise BadRecordError("no messages", f"'{name}' must be a list of at least one message, not {describe_type(turns)}")


# Beside the turns, in every format of conversations: a system prompt, the reasoning before the answer, tools.

_REASONING_KEYS = (
    "reasoning", "reasoning_content", "thinking", "thought", "thoughts", "chain_of_thought", "cot", "rationale",
)  # fmt: skip
RECORD_FIELDS = {
    "system": ("system", "system_prompt", "system_message", "system_instruction", "sys", "sys_prompt"),
    "reasoning": _REASONING_KEYS,
    "tools": ("tools", "functions"),
    "label": ("label", "kto_tag", "desirable", "is_desirable"),
}
"""`label` is KTO's mark; `unsupported_records.py` rejects records whose answer it calls bad."""
_RECORD_KEYS = frozenset(name for known in RECORD_FIELDS.values() for name in known)
_SWITCHES = ("on", "off", "yes", "no", "true", "false")


def make_conversation(
    messages: Sequence[Message], record: Any, names: Mapping[str, str], origin: Origin
) -> Conversation:
    """The conversation of some messages and of what their record has beside them."""
    if not isinstance(record, dict) or (_RECORD_KEYS.isdisjoint(record) and RECORD_FIELDS.keys().isdisjoint(names)):
        return Conversation(tuple(messages), origin)
    name, tools = find_optional(record, "tools", RECORD_FIELDS["tools"], names)
    messages = _add_reasoning(messages, *find_optional(record, "reasoning", RECORD_FIELDS["reasoning"], names))
    return Conversation(tuple(add_system_prompt(messages, record, names)), origin, parse_tools(tools, name))


def add_system_prompt(
    messages: Sequence[Message], record: Mapping[str, Any], names: Mapping[str, str]
) -> Sequence[Message]:
    """With the system prompt that the record has beside them, if it has one."""
    name, system = find_optional(record, "system", RECORD_FIELDS["system"], names)
    text = _parse_content(system, f"'{name}'", optional=True)
    if not text.strip():
        return messages
    first = messages[0]
    if first.role not in ("system", "developer"):
        return [Message("system", text), *messages]
    if text.strip() != first.content.strip():
        raise BadRecordError(
            "two system messages",
            f"'{name}' is {shorten(system)} and message 1 is another system message ({shorten(first.content)}); "
            "keep one",
        )
    return messages


def _add_reasoning(messages: Sequence[Message], name: str, reasoning: Any) -> Sequence[Message]:
    """With the reasoning in the answer it belongs to, the only one that may be supervised."""
    if reasoning is None:
        return messages
    if isinstance(reasoning, (bool, int, float)) or (isinstance(reasoning, str) and reasoning.lower() in _SWITCHES):
        raise BadRecordError(
            "bad reasoning",
            f"'{name}' is {shorten(reasoning)}, a switch and not reasoning. Leave it out: fields: {{reasoning: \"\"}}",
        )
    text = require_text(reasoning, f"'{name}'")
    answers = [n for n, each in enumerate(messages) if each.role == "assistant" and each.train is not False]
    if len(answers) != 1:
        raise BadRecordError(
            "bad reasoning",
            f"the record has '{name}' and {len(answers) or 'no'} answers. Move it into the message it belongs to, or "
            'leave it out: fields: {reasoning: ""}',
        )
    answer = messages[answers[0]]
    if answer.reasoning not in ("", text):
        raise BadRecordError("bad reasoning", f"'{name}' differs from the reasoning of the answer; keep one")
    return [*messages[: answers[0]], replace(answer, reasoning=text), *messages[answers[0] + 1 :]]


# One message: content or content parts, tool calls, reasoning, weight.

MEDIA_KEYS = frozenset(
    f"{kind}{what}"
    for kind in ("image", "img", "picture", "video", "audio")
    for what in ("", "s", *(f"_{form}{end}" for form in ("path", "url", "file", "byte", "base64") for end in ("", "s")))
) | {"pixel_values", "jpg", "jpeg", "png", "webp", "mp4", "wav", "mp3", "flac"}


def parse_message(turn: Any, number: int, role_name: str = "role", content_name: str = "content") -> Message:
    """A message; BadRecordErrors name it by its number."""
    place = f"message {number}"
    if not isinstance(turn, dict):
        raise BadRecordError("bad message", f"{place} must be an object, not {describe_type(turn)}")
    role = _parse_role(turn.get(role_name), place, role_name, content_name)
    tool_calls, reasoning = _parse_message_calls(turn, role, place), _parse_reasoning(turn, role, place)
    if turn.get(content_name) is None and isinstance(turn.get("refusal"), str):
        raise BadRecordError(
            "bad content",
            f"{place} has 'refusal' in place of '{content_name}'. To train on it, write it as '{content_name}'",
        )
    if content_name not in turn and not (tool_calls or reasoning):
        raise BadRecordError("bad content", f"{place} has no '{content_name}' ({describe_keys(turn, content_name)})")
    content = _parse_content(turn.get(content_name), f"{place}: '{content_name}'", bool(tool_calls or reasoning))
    if role in ("user", "assistant") and not (tool_calls or reasoning) and not content.strip():
        raise BadRecordError("empty turn", f"{place} (role {role!r}) is empty; remove it")
    for key in sorted(MEDIA_KEYS & turn.keys()):
        if turn[key] not in EMPTY_VALUES:
            raise BadRecordError("unsupported key", f"{place} has '{key}', but whet trains on text only; remove it")
    if turn.get("tools") not in EMPTY_VALUES:
        raise BadRecordError("unsupported key", f"{place} has 'tools'; move them into the record, next to the messages")
    train = parse_train_flag(turn, role, place)
    parts = turn[content_name] if isinstance(turn.get(content_name), list) else []
    part_lengths = tuple(len(_part_text(part)) for part in parts) if len(parts) > 1 else ()
    if role != "tool":
        null_content = bool(tool_calls) and turn.get(content_name) is None
        return Message(
            role, content, reasoning, tool_calls, train, null_content=null_content, part_lengths=part_lengths
        )
    return Message(
        role, content, train=train, part_lengths=part_lengths,
        tool_call_id=_optional_text(turn.get("tool_call_id"), f"{place}: 'tool_call_id'"),
        name=_optional_text(turn.get("name"), f"{place}: 'name'"),
    )  # fmt: skip


_ROLE_ALIASES = {
    "human": "user", "prompter": "user", "gpt": "assistant", "chatgpt": "assistant", "bot": "assistant",
    "model": "assistant", "ai": "assistant", "ipython": "tool", "observation": "tool",
}  # fmt: skip


def _parse_role(role: Any, place: str, role_name: str, content_name: str) -> str:
    if role is None:
        raise BadRecordError("no role", f"{place} has no '{role_name}'; set it to one of {', '.join(ROLES)}")
    if role == "function":  # OpenAI's deprecated name
        return "tool"
    if role not in ROLES:
        near = _ROLE_ALIASES.get(role.strip().lower()) if isinstance(role, str) else None
        near = near or (closest_key([role.strip().lower()], ROLES) if isinstance(role, str) else None)
        hint = "" if near is None else f". Write {near!r}"
        if role in ("human", "gpt", "chatgpt", "bot", "model"):
            hint += f", or set format: sharegpt and fields: {{from: {role_name}, value: {content_name}}}"
        raise BadRecordError("unknown role", f"{place} has the role {shorten(role)}; known: {', '.join(ROLES)}{hint}")
    return str(role)


_TEXT_PARTS = ("text", "input_text", "output_text")
_CALL_PART = re.compile(r"tool|function|think|reason", re.IGNORECASE)


def _part_text(part: Any) -> Any:
    """The text of a content part; Bedrock's and Gemini's have no type."""
    if not isinstance(part, dict):
        return None
    is_text = part.get("type") in _TEXT_PARTS or [key for key, value in part.items() if value is not None] == ["text"]
    return part.get("text") if is_text else None


def _parse_content(content: Any, place: str, optional: bool) -> str:
    if content is None and optional:
        return ""
    if not isinstance(content, list):
        return require_text(content, place)
    texts = [_part_text(part) for part in content]
    if not texts or not all(isinstance(text, str) for text in texts):
        objects = [part for part in content if isinstance(part, dict) and not isinstance(_part_text(part), str)]
        kinds = {str(part["type"]) for part in objects if "type" in part} - {*_TEXT_PARTS}
        kinds |= {key for part in objects if "type" not in part for key in part if part[key] is not None}
        found = f", not {', '.join(sorted(kinds))[:60]}" if kinds else ""
        remedy = "remove the others"
        if any(map(_CALL_PART.search, kinds)):
            remedy = "write thinking as reasoning, tool_use as tool_calls and tool_result as a message of the role tool"
        raise BadRecordError("bad content", f"{place}: whet trains on content parts of type 'text'{found}; {remedy}")
    return require_text("".join(map(str, texts)), place)


# Parts of type `python` and `python_output` in an assistant's content, as nanochat has them: calculator calls and their
# results inside one turn. They become messages with calls, which the chat template writes in its own form.

_PYTHON_PARTS = ("python", "python_output")


def _has_python_parts(content: Any) -> bool:
    return isinstance(content, list) and any(
        isinstance(part, dict) and part.get("type") in _PYTHON_PARTS for part in content
    )


def _count_calls(messages: Sequence[Message]) -> int:
    return sum(len(message.tool_calls) for message in messages)


def _parse_calculating_turn(
    turn: Mapping[str, Any], number: int, role_name: str, content_name: str, calls_before: int
) -> list[Message]:
    """The messages of an assistant turn with parts of text, python and python_output."""
    place = f"message {number}: '{content_name}'"
    text, expression, steps = "", None, []
    for part in turn[content_name]:
        kind, value = (part.get("type"), part.get("text")) if isinstance(part, dict) else (None, None)
        if kind not in ("text", *_PYTHON_PARTS) or not isinstance(value, str):
            raise BadRecordError("bad content", f'{place}: a part must be {{"type": "text", "text": …}}, or of type '
                                 f"python or python_output, not {shorten(part)}")  # fmt: skip
        if (kind == "python_output") != (expression is not None) or (kind in _PYTHON_PARTS and not value.strip()):
            raise BadRecordError("bad sum", f"{place}: a python part needs an expression, and the part after it must "
                                 f"be the python_output with its value; found {shorten(part)}")  # fmt: skip
        if kind == "text":
            text += value
        elif kind == "python":
            expression = value
        else:
            assert expression is not None
            steps.append(CalculatorStep(text, expression, value))
            text, expression = "", None
    if expression is not None or not text.strip():
        raise BadRecordError("bad sum", f"{place}: the turn ends with a calculation; add a text part that answers")
    whole = parse_message(
        {**turn, content_name: "".join((*itertools.chain(*steps), text))}, number, role_name, content_name
    )
    if whole.role != "assistant" or whole.tool_calls:
        other = "tool_calls" if whole.tool_calls else f"the role {whole.role!r}"
        raise BadRecordError("bad content", f"{place}: only an assistant turn without tool_calls can have python "
                             f"parts; this one has {other}")  # fmt: skip
    first, *others = calculator_messages(steps, text, calls_before)
    return [
        replace(each, train=whole.train) if each.role == "assistant" else each
        for each in (replace(first, reasoning=whole.reasoning), *others)
    ]


def _parse_message_calls(turn: Mapping[str, Any], role: str, place: str) -> tuple[ToolCall, ...]:
    many, one = decode_list(turn.get("tool_calls"), f"{place}: 'tool_calls'"), turn.get("function_call")
    if many in EMPTY_VALUES and one in EMPTY_VALUES:
        return ()
    if role != "assistant":
        raise BadRecordError("bad tool call", f"{place} (role {role!r}) calls a tool; only the assistant can")
    calls = () if many in EMPTY_VALUES else parse_tool_calls(many, place)
    return calls if one in EMPTY_VALUES else (*calls, parse_tool_call(one, place))


def _parse_reasoning(turn: Mapping[str, Any], role: str, place: str) -> str:
    given = {key: turn[key] for key in _REASONING_KEYS if turn.get(key) not in EMPTY_VALUES}
    if not given:
        return ""
    if role != "assistant":
        key = next(iter(given))
        raise BadRecordError("bad reasoning", f"{place} (role {role!r}) has '{key}'; only the assistant can")
    texts = [require_text(text, f"{place}: '{key}'") for key, text in given.items()]
    if any(text != texts[0] for text in texts):
        raise BadRecordError("bad reasoning", f"{place} has {' and '.join(given)}, which differ; keep one")
    return texts[0]


OTHER_WEIGHTS = (
    "loss", "loss_mask", "loss_weight", "mask", "masked", "trainable", "training", "train_detail", "training_detail",
)  # fmt: skip
"""How other tools mark messages that are not to be learned."""


def parse_train_flag(turn: Mapping[str, Any], role: str, place: str) -> bool | None:
    """False for `weight: 0` or `train: false`, otherwise None."""
    for key in OTHER_WEIGHTS:
        if turn.get(key) is not None:
            raise BadRecordError(
                "bad weight",
                f"{place} has {key}: {shorten(turn[key])}, which whet does not read. To exclude a message from the "
                f"loss, write weight: 0 or train: false; remove {key!r}",
            )
    weight, train = turn.get("weight"), turn.get("train")
    if weight is None and train is None:
        return None
    if weight not in (None, 0, 1) or isinstance(weight, bool):
        raise BadRecordError("bad weight", f"{place} has weight: {shorten(weight)}; it must be 0 or 1")
    if train not in (None, True, False) or isinstance(train, (int, float)) != isinstance(train, bool):
        raise BadRecordError("bad weight", f"{place} has train: {shorten(train)}; it must be true or false")
    if weight is not None and train is not None and bool(weight) != train:
        raise BadRecordError("bad weight", f"{place} has weight: {weight} and train: {train}, which differ; keep one")
    supervised = bool(weight) if train is None else bool(train)
    if supervised and role != "assistant":
        raise BadRecordError(
            "bad weight",
            f"{place} (role {role!r}) is marked for training; only assistant turns can be. To train on every turn: "
            "data.train_on=all",
        )
    return None if supervised else False


def _optional_text(value: Any, place: str) -> str | None:
    return None if value is None else require_text(value, place)


def check_message_order(messages: Sequence[Message]) -> None:
    """Reject what chat templates render wrongly: a system message that is not first, a result without a call."""
    unanswered: list[ToolCall] = []
    for number, message in enumerate(messages, 1):
        if message.role in ("system", "developer"):
            if number > 1:
                _reject_system_message(messages[0], number)
        elif message.role == "assistant":
            unanswered.extend(message.tool_calls)
        elif message.role == "tool":
            unanswered.remove(_find_answered_call(unanswered, message, number))


def _reject_system_message(first: Message, number: int) -> None:
    if first.role in ("system", "developer"):
        raise BadRecordError("two system messages", f"message {number} is a second system message; join them")
    raise BadRecordError("system message not first", f"message {number} is a system message; it must be the first")


def _find_answered_call(unanswered: Sequence[ToolCall], message: Message, number: int) -> ToolCall:
    for call in unanswered:
        if message.tool_call_id is None or call.id == message.tool_call_id:
            return call
    call_id = "" if message.tool_call_id is None else f" with tool_call_id {shorten(message.tool_call_id)}"
    raise BadRecordError(
        "result without a call",
        f"message {number} is a tool result{call_id}, but no unanswered call precedes it. Write the call as tool_calls "
        "of the assistant's message and not in its text, or the result as a user's message",
    )
