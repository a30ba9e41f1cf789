"""Records, messages and answers inside other objects: where they are, and the command that takes them out."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from whet.data.read.records.formats import FORMATS, is_record
from whet.data.read.records.messages import MESSAGES_EXAMPLE, is_turn_list

TURN_LISTS = (*FORMATS["messages"].required["messages"], "data", "utterances")
_NOT_ANSWERING = ("system", "developer", "user", "human")
_ANSWERING = ("assistant", "model", "gpt", "chatgpt", "bot", "ai")
_EACH = "jq -c '(arrays[], objects)"


def unwrap(key: str) -> str:
    """The command that writes what is inside `key` of each record, in JSON Lines or an array."""
    return f"{_EACH}{_step(key)}' FILE > NEW.jsonl"


def _step(key: str | int) -> str:
    if isinstance(key, int):
        return f"[{key}]"
    return f".{key}" if key.isidentifier() and key.isascii() else f".{json.dumps(key, ensure_ascii=False)}"


def last_speaker(turns: Sequence[Any]) -> Any:
    """The role of the last turn."""
    last = turns[-1] if turns and isinstance(turns[-1], dict) else {}
    return last.get("role", last.get("from"))


def name_swapped_roles(sample: Sequence[Any], turns: str) -> str | None:
    """Conversations that all begin with an answer and end with a question."""
    lists = [record.get(turns) if isinstance(record, dict) else record for record in sample]
    spoken = [[last_speaker([turn]) for turn in each] for each in lists if isinstance(each, list)]
    talks = [[role for role in roles if role not in ("system", "developer")] for roles in spoken]
    if talks and all(len(roles) > 1 and roles[0] in _ANSWERING and roles[-1] in ("user", "human") for roles in talks):
        first, last = talks[0][0], talks[0][-1]
        return (
            f"all conversations begin with {first!r} and end with {last!r}, as if the roles were swapped "
            "or the newest came first. Swap or sort them; if they are right, set format"
        )
    return None


def append_answer(record: Mapping[str, Any], turns: str, holder: str | None = None) -> str | None:
    """The command that appends the assistant's message, which is elsewhere in the record, to messages that end with a
    question; None if there is none. `holder`: the key of the object with the messages."""
    others = {key: value for key, value in record.items() if key != (holder or turns)}
    path = next(_paths_to_answers(others), None)
    if path is None:
        return None
    inside = f" | {_step(holder)}" if holder else ""
    return f"{_EACH} | {path} as $answer{inside} | {_step(turns)} += [$answer]' FILE > NEW.jsonl"


def _paths_to_answers(value: Any, path: str = "") -> Iterator[str]:
    """Where messages of the assistant are that are no part of a conversation."""
    if isinstance(value, dict):
        if value.get("role") in _ANSWERING and not {"content", "tool_calls"}.isdisjoint(value):
            yield path
        for key, inner in value.items():
            yield from _paths_to_answers(inner, path + _step(str(key)))
    elif isinstance(value, list) and not any(last_speaker([each]) in _NOT_ANSWERING for each in value):
        for number, inner in enumerate(value):
            yield from _paths_to_answers(inner, (path or ".") + _step(number))


def name_messages_inside(record: Mapping[str, Any]) -> str | None:
    """Messages inside an object, or inside each of several."""
    if len(record) > 1 and all(map(_is_conversation, record.values())):
        keys = ", ".join(map(repr, list(record)[:2]))
        return f"the records are inside {keys}, …. Write each on a line: jq -c '.[]' FILE > NEW.jsonl"
    for key, value in record.items():
        name = _find_turn_list(value)
        if name is None:
            continue
        turns = value[name]
        if isinstance(turns, list) and last_speaker(turns) in _NOT_ANSWERING:
            if (command := append_answer(record, name, key)) is not None:
                return f"the messages are inside {key!r}, without the answer. Write both as one record: {command}"
            if all(last_speaker([turn]) in _NOT_ANSWERING for turn in turns):
                return f"the messages are inside {key!r}, without an answer. Write both as {MESSAGES_EXAMPLE}"
        return f"the messages are inside {key!r}. Write what is inside as the record: {unwrap(key)}"
    return None


def _find_turn_list(value: Any) -> str | None:
    names = TURN_LISTS if isinstance(value, dict) else ()
    return next((name for name in names if _is_turn_list(value.get(name))), None)


def _is_turn_list(value: Any) -> bool:
    return is_turn_list(value, "role") or is_turn_list(value, "from")


def _is_conversation(value: Any) -> bool:
    """Whether it is a list of turns, or an object with one, that ends with an answer."""
    name = _find_turn_list(value)
    turns = value if name is None else value[name]
    return isinstance(turns, list) and _is_turn_list(turns) and last_speaker(turns) not in _NOT_ANSWERING


def name_split_record(record: Mapping[str, Any]) -> str | None:
    """A question in one object and its answer in another."""
    objects = {key: value for key, value in record.items() if isinstance(value, dict) and value}
    for (one, first), (other, second) in itertools.combinations(objects.items(), 2):
        if first.keys().isdisjoint(second) and is_record({**first, **second}):
            both = f"{_step(one)} + {_step(other)}"
            return (
                f"the question and its answer are inside {one!r} and {other!r}. Write them as one record: {_EACH} | "
                f"{both}' FILE > NEW.jsonl"
            )
    return None


def name_turns_with_text(record: Mapping[str, Any]) -> str | None:
    """A list of turns or of records beside a text: `text` would train on the words of the text and drop it."""
    for key, value in record.items():
        if not isinstance(value, list) or not value or not all(isinstance(each, dict) for each in value):
            continue
        if all("role" in each or "from" in each or "speaker" in each or is_record(each) for each in value):
            return (
                f"texts beside {key!r}, a list of turns or records. Write what is to be learned as {MESSAGES_EXAMPLE}; "
                "to train on every word of the texts, set format: text"
            )
    return None
