"""Records that whet cannot train on, although their format is known: images, bad answers, weights."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from whet.core.errors import BadRecordError
from whet.data.conversation import Conversation, ParsedRecord
from whet.data.read.records.formats import TURN_LIST_FIELDS
from whet.data.read.records.messages import MEDIA_KEYS, OTHER_WEIGHTS, RECORD_FIELDS
from whet.data.read.records.question_formats import PROMPT_COMPLETION_FIELDS, decode_messages
from whet.data.read.records.record_fields import EMPTY_VALUES, as_number, decode_list, find_optional, shorten

_UNSUPPORTED_KEYS = MEDIA_KEYS | {"chat_template_kwargs"}
_CHECKED_KEYS = _UNSUPPORTED_KEYS | {"weight", "train", *OTHER_WEIGHTS, *RECORD_FIELDS["label"]}
_NEGATIVE_LABELS = (False, -1, "undesirable", "bad", "rejected", "dispreferred")  # False equals 0
_MEDIA_TAG = re.compile(
    r"<\|?(?:image|img|video|audio)(?:_?\d+|_pad)?\|?>|<\|(?:vision|audio)_(?:start|bos)\|>|<start_of_image>",
    re.IGNORECASE,
)
_MEDIA_MARK = re.compile(
    rf"\A\s*{_MEDIA_TAG.pattern}|^(?:\w+[ -]?\d*: ?)?(?:{_MEDIA_TAG.pattern}[ ,]*)+$", re.IGNORECASE | re.MULTILINE
)
"""LLaVA's `<image>` at the start of a turn, or alone on a line; inside a sentence it is a word like any other."""
_DATA_URI = re.compile(r"\s*data:(?:image|video|audio)/[\w.+-]+;base64,", re.IGNORECASE)


_PARENT = re.compile(r"parent(?:_?message)?_?(?:uu)?id", re.IGNORECASE)
_OWN_ID = re.compile(r"(?:message_?)?(?:uu)?id", re.IGNORECASE)
_PLACE = re.compile(
    r"timestamp(?:_ms)?|time|ts|date|create(?:d|_time|d_?at)|turn(?:_id(?:entifier)?|_index|_number)?|index|order|position"
    r"|seq(?:uence)?",
    re.IGNORECASE,
)
_MASK = re.compile(r"\s*\[\s*(?:\d|true|false|\{)", re.IGNORECASE)
"""A list of numbers, flags or spans, also as text."""
_CALLS = ("tool_calls", "function_call")
_OTHER_CALLS = re.compile(r"(?:tool|function)_?(?:calls?|uses?|invocations?|results?|outputs?)", re.IGNORECASE)
_ISO_DATE = re.compile(r"\d{4}-\d\d-\d\d")


def reject_unsupported(record: Any, parsed: ParsedRecord, names: Mapping[str, str]) -> None:
    """Raise a BadRecordError if the record has what whet cannot train on, such as images."""
    if turns := _list_turns(record, names):
        _reject_order(turns)
        _reject_other_calls(turns)
    if isinstance(record, dict) and ("label" in names or not _CHECKED_KEYS.isdisjoint(record)):
        _reject_keys(record, parsed, names)
    if isinstance(parsed, Conversation):
        for number, message in enumerate(parsed.messages, 1):
            if message.role != "user":
                continue
            has_tag = "<" in message.content and _MEDIA_TAG.search(message.content)
            mark = (has_tag and _MEDIA_MARK.search(message.content)) or _DATA_URI.match(message.content)
            if mark:
                raise BadRecordError(
                    "image mark",
                    f"message {number} has the mark {mark.group().strip()}, but whet trains on text only; remove the "
                    "record, or reword it",
                )


def _list_turns(record: Any, names: Mapping[str, str]) -> list[Any]:
    """The turns of a record, of its prompt and its completion, also where they are JSON in a text."""
    if not isinstance(record, dict):
        return record if isinstance(record, list) else []
    found = [decode_list(record.get(names[field]), "") for field in TURN_LIST_FIELDS if field in names]
    found += [decode_messages(record.get(names[field])) for field in PROMPT_COMPLETION_FIELDS if field in names]
    lists = [[turns] if isinstance(turns, dict) else turns for turns in found]
    return [turn for turns in lists if isinstance(turns, list) for turn in turns]


def _reject_order(turns: Sequence[Any]) -> None:
    """Reject turns that do not follow each other: branches of a tree, or an export with the newest first."""
    before: Mapping[str, Any] = {}
    for number, turn in enumerate(turns, 1):
        if not isinstance(turn, dict) or len(turn) < 3:
            before = {}
            continue
        for key in turn.keys() & before.keys():
            if _PARENT.fullmatch(key):
                own = _own_ids(before)
                if own and turn[key] not in (None, *own) and _is_tree(turns, key):
                    raise BadRecordError(
                        "branches",
                        f"message {number} is no reply to message {number - 1} ({key!r} is {shorten(turn[key])}): the "
                        "messages are a tree. Write each path from its root to a leaf as a conversation",
                    )
            elif _PLACE.fullmatch(key) and _comes_before(turn[key], before[key]):
                raise BadRecordError(
                    "out of order",
                    f"message {number} comes before message {number - 1} by {key!r}: {shorten(turn[key])} is before "
                    f"{shorten(before[key])}. Sort the messages, or remove {key!r} if it is not their order",
                )
        before = turn


def _own_ids(turn: Mapping[str, Any]) -> list[Any]:
    return [value for name, value in turn.items() if _OWN_ID.fullmatch(name)]


def _is_tree(turns: Sequence[Any], key: str) -> bool:
    """Whether `key` names messages of the conversation: what all of them share may be its own id."""
    objects = [turn for turn in turns if isinstance(turn, dict)]
    ids = [own for turn in objects for own in _own_ids(turn)]
    return any(turn.get(key) in ids for turn in objects)


def _reject_other_calls(turns: Sequence[Any]) -> None:
    """Reject calls of tools, and their results, under a name that no format reads: the answer would lack them."""
    for number, turn in enumerate(turns, 1):
        for key, value in turn.items() if isinstance(turn, dict) and len(turn) > 2 else ():
            if value in EMPTY_VALUES or key in _CALLS or not isinstance(value, (str, list, dict)):
                continue  # numbers and flags count calls
            inside = isinstance(value, dict) and any(value.get(name) not in EMPTY_VALUES for name in _CALLS)
            if inside or _OTHER_CALLS.fullmatch(key):
                raise BadRecordError(
                    "unsupported key",
                    f"message {number} has {key!r}, which whet does not read. Write calls as 'tool_calls' of the "
                    "message, and each result as a message of the role tool",
                )


def _comes_before(one: Any, other: Any) -> bool:
    if all(isinstance(each, str) and _ISO_DATE.match(each) for each in (one, other)):
        try:
            return datetime.fromisoformat(one) < datetime.fromisoformat(other)
        except TypeError:  # only one has a time zone
            return False
        except ValueError:
            return bool(one < other)
    are_numbers = all(isinstance(each, (int, float)) and not isinstance(each, bool) for each in (one, other))
    return bool(are_numbers and one < other)


def _reject_keys(record: Mapping[str, Any], parsed: ParsedRecord, names: Mapping[str, str]) -> None:
    for key in sorted(_UNSUPPORTED_KEYS & record.keys()):
        if record[key] not in EMPTY_VALUES and key not in names.values():
            why = "trains on text only" if key in MEDIA_KEYS else "gives chat templates no options"
            raise BadRecordError("unsupported key", f"the record has '{key}', but whet {why}; remove it")
    if not isinstance(parsed, Conversation):
        return
    if as_number(record.get("weight")) not in (None, 1) or as_number(record.get("train")) not in (None, True):
        raise BadRecordError(
            "bad weight",
            "weight and train do not apply to a whole record. Set them for its messages, or weight for the source",
        )
    for key in OTHER_WEIGHTS:
        if isinstance(record.get(key), (str, list)) and _MASK.match(str(record[key])):
            raise BadRecordError(
                "bad weight",
                f"the record has {key!r}, a mask of its own, which whet does not read. To exclude a message from the "
                f"loss, write weight: 0 in it; remove {key!r}",
            )
    name, label = find_optional(record, "label", RECORD_FIELDS["label"], names)
    if any(name == used for field, used in names.items() if field != "label"):
        return
    if as_number(label) in _NEGATIVE_LABELS:
        raise BadRecordError(
            "negative label",
            f"'{name}' is {shorten(label)}, which marks a bad answer (KTO). Keep the good ones with where: "
            f'{name} != {label!r}; if it means something else, ignore it with fields: {{label: ""}}',
        )
