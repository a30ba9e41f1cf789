"""Finding and validating the fields of a record, with errors that name the field."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from whet.core.errors import BadRecordError

# What formats ask of a record's values: text where text belongs, lists where lists belong, and clear words if not.

_TYPE_NAMES = {dict: "an object", list: "a list", str: "text", bool: "true or false", type(None): "nothing"}
_NUMBERS = (int, float)
_ESCAPED_NUL = re.compile(r"(?<!\\)(?:\\\\)*\\u0000")


def describe_type(value: Any) -> str:
    """What a value is, in words."""
    if value == [] and isinstance(value, list):
        return "an empty list"
    known = _TYPE_NAMES.get(type(value))
    return known or ("a number" if isinstance(value, _NUMBERS) else f"a value of type {type(value).__name__}")


def shorten(value: Any) -> str:
    """A value as it may stand in a message."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}…"


def is_valid_text(text: str) -> bool:
    """JSON can escape half a surrogate pair (`\\ud800`), which is no text and breaks every tokenizer, and NUL."""
    if "\0" in text:
        return False
    if text.isascii():
        return True
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def require_text(text: Any, place: str) -> str:
    """`text` if it is one that can be tokenised; `place` is the subject of the sentence that says otherwise."""
    if not isinstance(text, str):
        raise BadRecordError("bad content", f"{place} must be text, not {describe_type(text)}")
    if not is_valid_text(text):
        what = "the character NUL" if "\0" in text else "a lone surrogate, which is not valid Unicode"
        raise BadRecordError("bad text", f"{place} holds {what}; remove it")
    return text


def require_nonempty(text: Any, place: str) -> str:
    """Text that says something."""
    good = require_text(text, place)
    if not good or good.isspace():
        raise BadRecordError("empty text", f"{place} is empty")
    return good


def require_json_value(value: Any, place: str) -> None:
    """Refuse objects that hold bad text or numbers that JSON lacks, at any depth."""
    try:
        written = json.dumps(value, ensure_ascii=False, allow_nan=False)
        written.encode()
    except UnicodeEncodeError:
        raise BadRecordError("bad text", f"{place} hold a lone surrogate, which is not valid Unicode") from None
    except (ValueError, TypeError) as error:
        raise BadRecordError("bad value", f"{place} hold a value that JSON lacks: {error}") from None
    if _ESCAPED_NUL.search(written):
        raise BadRecordError("bad text", f"{place} hold the character NUL; remove it")


def parse_json(text: str, place: str) -> Any:
    """JSON inside a text."""
    try:
        return json.loads(text, parse_constant=_reject_constant)
    except ValueError as error:
        raise BadRecordError("broken JSON", f"{place} must be JSON, and it is not: {error}") from None


def _reject_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def decode_list(value: Any, place: str) -> Any:
    """A list as it is; a list that a table holds as JSON text, decoded. What is neither is left to the caller."""
    if isinstance(value, str) and value.lstrip().startswith("["):
        return parse_json(value, place)
    return value


def require_object(record: Any, example: str) -> Mapping[str, Any]:
    """The record, if it has fields at all."""
    if not isinstance(record, dict):
        raise BadRecordError(
            "not an object", f"a record is an object such as {example}, this is {describe_type(record)}"
        )
    return record


def require_field(record: Mapping[str, Any], name: str, reason: str = "missing field") -> Any:
    """The value of a field that must be there."""
    value = record.get(name)
    if value is None:
        keys = ", ".join(map(repr, list(record)[:20])) or "no keys"
        raise BadRecordError(
            reason, f"the record has no {name!r} (it has {keys}). Mend it, or name the field in the source's fields"
        )
    return value


# Finding fields under the names that people give them.


def present_names(record: Mapping[str, Any], field: str, names: Sequence[str], fields: Mapping[str, str]) -> list[str]:
    """Those of a field's usual names that a record has; if the user named the field, that name alone counts."""
    wanted = [fields[field]] if field in fields else names
    return [name for name in wanted if record.get(name) is not None]


def match_fields(
    record: Any, known: Mapping[str, Sequence[str]], needed: Sequence[str], fields: Mapping[str, str]
) -> list[dict[str, str]]:
    """Every way to find the `needed` fields in a record; more than one: the names do not tell what is meant."""
    if not isinstance(record, dict):
        return []
    options = [[(field, name) for name in present_names(record, field, known[field], fields)] for field in needed]
    return [dict(choice) for choice in itertools.product(*options)]
