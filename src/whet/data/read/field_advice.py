"""The line about a format: which fields of the records are used, and how to use the others."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from whet.core.errors import BadRecordError
from whet.data.conversation import Conversation, Origin
from whet.data.read.containers.container import SPLIT_WORDS
from whet.data.read.records.formats import FORMATS, TURN_LIST_FIELDS, begins_chat
from whet.data.read.records.messages import MEDIA_KEYS, RECORD_FIELDS
from whet.data.read.records.question_formats import ALPACA_OPTIONAL
from whet.data.read.records.record_fields import record_keys
from whet.data.read.records.record_shapes import Record
from whet.data.read.records.tools import parse_tools

MAX_SHOWN_KEYS = 12
_TURN_KEYS = frozenset(
    {"role", "content", "from", "value", "name", "id", "weight", "train", "tools", "tool_calls", "function_call"}
    | {"tool_call_id", *RECORD_FIELDS["reasoning"], *MEDIA_KEYS}
)
_SCORE = re.compile(r"(?:\w+_)?(?:score|rating|reward|quality|upvotes|pm_score)", re.IGNORECASE)
_MIN_TEXT = 40  # characters, on average
_MIN_SAME = 3  # questions
_REASONING_KEY = re.compile(
    r"(?:^|_)(?:reason\w*|think\w*|thoughts?|cot|rationale|explanation|scratchpad|trajectory)(?:_|$)", re.IGNORECASE
)
_BAD_MARKS = {
    "rejected", "reject", "declined", "discarded", "deleted", "ignore", "ignored", "incorrect", "wrong", "thumbs_down",
    "thumbs down", "thumbsdown", "downvote", "dislike",
}  # fmt: skip
_GOOD_KEY = re.compile(r"(?:is[ _])?(?:correct|accepted|approved|good|valid|helpful|reviewed|verified)", re.IGNORECASE)


def describe_format(form: str, names: Mapping[str, str], sample: Sequence[Any]) -> str:
    """For example: sharegpt (conversations: from, value); not used: id."""
    keys, inner, outer = record_keys(sample), FORMATS[form].turn_fields, _used_keys(form, names, sample)
    order = sorted(outer, key=lambda name: (outer[name] not in TURN_LIST_FIELDS, keys.index(name)))
    used = [name if outer[name] in (name, *TURN_LIST_FIELDS) else f"{name} as {outer[name]}" for name in order]
    if inner:
        turns = ", ".join(names[field] for field in inner)
        used[:1] = [f"{used[0]}: {turns}" if used else turns]
    unused = [key for key in keys if key not in outer] + _unused_turn_keys(
        sample, order, [names[field] for field in inner]
    )
    description = form + (f" ({', '.join(used)})" if used else "")
    if unused:
        more = len(unused) - MAX_SHOWN_KEYS
        description += f"; not used: {', '.join(unused[:MAX_SHOWN_KEYS])}" + (f" and {more} more" if more > 0 else "")
    return description + _advise(form, names, [record for record in sample if isinstance(record, dict)], outer)


def _used_keys(form: str, names: Mapping[str, str], sample: Sequence[Any]) -> dict[str, str]:
    """The keys of records that are read, each with its field."""
    keys, inner = record_keys(sample), FORMATS[form].turn_fields
    outer = {name: field for field, name in names.items() if field not in inner and name in keys}
    for field, known in FORMATS[form].optional.items():
        outer |= {name: field for name in known if field not in names and name in keys and name not in outer}
    return outer


def name_question_elsewhere(form: str, names: Mapping[str, str], sample: Sequence[Any]) -> str | None:
    """A text that is not read, if all questions are the same although the answers and this text differ."""
    records, questions, answers = [], set(), set()
    for record in sample if len(sample) >= _MIN_SAME else ():
        with contextlib.suppress(BadRecordError):
            parsed = FORMATS[form].parse(record, FORMATS[form].resolve_names(names), Origin("", 0))
            if isinstance(parsed, Conversation) and isinstance(record, dict):
                records.append(record)
                questions.add(tuple(message.content for message in parsed.messages[:-1]))
                answers.add(parsed.messages[-1].content)
    if len(records) < _MIN_SAME or len(questions) > 1 or len(answers) == 1:
        return None
    texts = _unused_texts(records, _used_keys(form, names, records))
    key = next((key for key in texts if len({str(record.get(key)) for record in records}) > 1), None)
    if key is None:
        return None
    asked, answer = names.get("instruction", names.get("prompt")), names.get("output", names.get("completion"))
    remedy = "Write it into the question"
    if asked and answer and not any(record.get(name) for record in records for name in ALPACA_OPTIONAL["input"]):
        remedy = f"Set fields: {{instruction: {asked}, input: {key}, output: {answer}}}"
    return (
        f"all questions are the same, but the answers differ, and so does {key!r}, which may belong to the question. "
        f"{remedy}; to train without it, set format: {form}"
    )


def _unused_turn_keys(sample: Sequence[Any], used: Sequence[str], inner: Sequence[str]) -> list[str]:
    """Keys of turns that no format reads, such as messages.emotion."""
    prefix = f"{used[0]}." if used else ""
    lists = [record.get(used[0]) if used and isinstance(record, dict) else record for record in sample if inner]
    turns = [turn for turns in lists if isinstance(turns, list) for turn in turns if isinstance(turn, dict)]
    found = [prefix + key for turn in turns for key in turn if key not in (*_TURN_KEYS, *inner)]
    return [*dict.fromkeys(found)]


def _is_denied(key: str, value: Any) -> bool:
    return _GOOD_KEY.fullmatch(key) is not None and str(value).strip().lower() in ("false", "no", "0")


def _advise(form: str, names: Mapping[str, str], records: Sequence[Any], used: Mapping[str, str]) -> str:
    """How to use fields that are not used although they hold text, scores, verdicts or splits."""
    texts = _unused_texts(records, used)
    scores = [
        key
        for key in record_keys(records)
        if _SCORE.fullmatch(key) and key not in used and not any(isinstance(r.get(key), str) for r in records)
    ]
    advice = ""
    thoughts = next((key for key in texts if _REASONING_KEY.search(key)), None)
    if thoughts and "reasoning" in FORMATS[form].optional:
        advice = f". To train on {thoughts} as reasoning before the answer, set fields: {{reasoning: {thoughts}}}"
    elif texts and form == "prompt-completion":
        advice = (
            f". {texts[0]} holds text; to add it to the question, set fields: {{instruction: {names['prompt']}, input: "
            f"{texts[0]}, output: {names['completion']}}}"
        )
    elif texts:
        free = ", ".join(field for field in FORMATS[form].optional if field not in used.values() and field != "label")
        advice = f". {', '.join(texts[:3])} hold{'s' * (len(texts) == 1)} text" + (
            f"; to use it, set it in fields ({free})" if free else ""
        )
    if form == "prompt-completion" and any(begins_chat(record.get(names["prompt"])) for record in records):
        advice += f". {names['prompt']} holds chats as text, each of which becomes one message of the user"
    for key in [key for key in record_keys(records) if key not in used and key.isidentifier()]:
        if "tools" in FORMATS[form].optional and any(_holds_tools(record.get(key)) for record in records):
            advice += f". {key} holds tools; to use them, set fields: {{tools: {key}}}"
        values = [record.get(key) for record in records]
        if bad := [value for value in values if str(value).strip().lower() in _BAD_MARKS or _is_denied(key, value)]:
            advice += f". {key} is {bad[0]!r} in some; to leave these out: where: {key} != {bad[0]!r}"
        elif {str(value).lower() for value in values} <= SPLIT_WORDS.keys():
            advice += f". {key} names splits; to read one: where: {key} == {values[0]!r}"
    if scores:
        advice += f". To keep the better answers by {scores[0]}: where: {scores[0]} >= NUMBER"
    return advice


def _holds_tools(value: Any) -> bool:
    try:
        tools = parse_tools(value)
    except BadRecordError:
        return False
    return bool(tools) and all("parameters" in tool["function"] for tool in tools)


def _unused_texts(records: Sequence[Record], used: Iterable[str]) -> list[str]:
    """The unused fields that hold text, unless they repeat what is used."""
    found: dict[str, list[str]] = {}
    known = {*used}
    for record in records:
        seen = [text for key in known & record.keys() for text in _strings(record[key])]
        for key, value in record.items():
            if key not in known and isinstance(value, str) and " " in value.strip():
                repeats = any(value in text or (len(text) >= _MIN_TEXT and text in value) for text in seen)
                found.setdefault(key, []).append("" if repeats else value)
    return [key for key, texts in found.items() if sum(map(len, texts)) >= _MIN_TEXT * len(texts)]


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, (list, dict)):
        for inner in value if isinstance(value, list) else value.values():
            yield from _strings(inner)
