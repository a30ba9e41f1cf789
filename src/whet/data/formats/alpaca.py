"""The `alpaca` format: {"instruction": "…", "input": "…", "output": "…"}.

The user's turn is the instruction and, if there is one, the input after a blank line. `history` is a list of earlier
[question, answer] pairs.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from whet.data.conversation import BadRecordError, Conversation, Message, Origin
from whet.data.formats.pick import readings
from whet.data.formats.values import as_list, checked, filled, kind, need_field, need_object

FIELDS = {"instruction": ("instruction",), "input": ("input", "context"), "output": ("output", "response"),
          "system": ("system",), "history": ("history",)}  # fmt: skip
_EXAMPLE = '{"instruction": "…", "input": "…", "output": "…"}'


def recognise(record: Any, fields: Mapping[str, str]) -> list[dict[str, str]]:
    """The names under which a record holds such fields; none if it is of another format."""
    return readings(record, FIELDS, ("instruction", "output"), fields)


def parse(record: Any, names: Mapping[str, str], origin: Origin) -> Conversation:
    """A conversation, or a BadRecordError with the reason."""
    record = need_object(record, _EXAMPLE)
    instruction = checked(need_field(record, names["instruction"]), f"'{names['instruction']}'")
    given = record.get(names["input"])
    addition = "" if given is None else checked(given, f"'{names['input']}'")
    prompt = "\n\n".join(text for text in (instruction, addition) if text.strip())
    messages = [
        *_system(record.get(names["system"]), names["system"]),
        *_history(record.get(names["history"]), names["history"]),
        Message("user", filled(prompt, f"'{names['instruction']}'")),
        Message("assistant", filled(need_field(record, names["output"]), f"'{names['output']}'")),
    ]
    return Conversation(tuple(messages), origin)


def _system(system: Any, name: str) -> list[Message]:
    return [Message("system", checked(system, f"'{name}'"))] if system else []


def _history(history: Any, name: str) -> list[Message]:
    pairs = as_list(history, f"'{name}'")
    if pairs in (None, "", []):
        return []
    if not isinstance(pairs, list) or not all(isinstance(pair, list) and len(pair) == 2 for pair in pairs):
        raise BadRecordError("bad history", f"'{name}' must be a list of [question, answer] pairs, not {kind(pairs)}")
    messages = []
    for number, (question, answer) in enumerate(pairs, 1):
        messages.append(Message("user", filled(question, f"question {number} of '{name}'")))
        messages.append(Message("assistant", filled(answer, f"answer {number} of '{name}'")))
    return messages
