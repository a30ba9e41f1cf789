"""Find and validate the fields of a record; errors name the field."""

from __future__ import annotations

import ast
import contextlib
import difflib
import itertools
import json
import re
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from whet.core.display import is_valid_text
from whet.core.errors import BadRecordError

_TYPE_NAMES = {dict: "an object", list: "a list", str: "text", bool: "true or false", type(None): "null"}
_NUMBERS = (int, float)
EMPTY_VALUES: tuple[Any, ...] = (None, [], {}, "")
"""Values that mean the same as an absent field."""
_PYTHON_OBJECTS, _MAX_PYTHON = re.compile(r"\s*\[\s*\{\s*'"), 2**20
"""Python's syntax tree of a text takes hundreds of times its memory."""
_ESCAPED_NUL = re.compile(r"(?<!\\)(?:\\\\)*\\u0000")


def as_number(value: Any) -> Any:
    """A number, true or false where a table has it as text, None for an empty cell; other texts in small letters."""
    if not isinstance(value, str):
        return value
    text = value.strip().lower()
    if text in ("", "true", "false"):
        return text == "true" if text else None
    for number in (int, float):
        with contextlib.suppress(ValueError):
            return number(text)
    return text


def describe_type(value: Any) -> str:
    """The JSON type of a value, in words, for error messages."""
    if value == [] and isinstance(value, list):
        return "an empty list"
    known = _TYPE_NAMES.get(type(value))
    return known or ("a number" if isinstance(value, _NUMBERS) else f"a value of type {type(value).__name__}")


def shorten(value: Any) -> str:
    """The repr of a value, shortened for error messages."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}…"


def require_text(text: Any, place: str) -> str:
    """`text`, if it is a string that can be tokenized; `place` is the subject of the error message."""
    if not isinstance(text, str):
        raise BadRecordError("bad content", f"{place} must be text, not {describe_type(text)}")
    if not is_valid_text(text):
        what = "the character NUL" if "\0" in text else "a lone surrogate, which is not valid Unicode"
        raise BadRecordError("bad text", f"{place} contains {what}; remove it")
    return text


def require_nonempty(text: Any, place: str) -> str:
    """Text that is not blank."""
    good = require_text(text, place)
    if not good or good.isspace():
        raise BadRecordError("empty text", f"{place} is empty")
    return good


def require_json_value(value: Any, place: str) -> None:
    """Reject invalid text and numbers that JSON lacks, at any depth."""
    try:
        written = json.dumps(value, ensure_ascii=False, allow_nan=False)
        written.encode()
    except UnicodeEncodeError:
        raise BadRecordError(
            "bad text", f"{place} contain a lone surrogate, which is not valid Unicode; remove it"
        ) from None
    except (ValueError, TypeError) as error:
        raise BadRecordError("bad value", f"{place} contain a value that JSON lacks: {error}") from None
    if _ESCAPED_NUL.search(written):
        raise BadRecordError("bad text", f"{place} contain the character NUL; remove it")


def parse_json(text: str, place: str) -> Any:
    """Decode JSON that is a string inside a record."""
    try:
        return json.loads(text, parse_constant=_reject_constant)
    except ValueError as error:
        raise BadRecordError("broken JSON", f"{place} must be JSON: {error}") from None


def _reject_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def decode_list(value: Any, place: str) -> Any:
    """Decode a list given as a string, as tables have it: JSON, or Python, which pandas writes into CSV files. Return
    any other value unchanged."""
    if not isinstance(value, str) or not value.lstrip().startswith("["):
        return value
    try:
        return parse_json(value, place)
    except BadRecordError as error:
        if not _PYTHON_OBJECTS.match(value):
            raise
        if len(value) < _MAX_PYTHON:
            with contextlib.suppress(ValueError, SyntaxError, MemoryError, RecursionError):
                return ast.literal_eval(value.strip())
        hint = "It is printed by Python; write JSON Lines: to_json(FILE, orient='records', lines=True)"
        raise BadRecordError(error.reason, f"{error}. {hint}") from None


def require_object(record: Any, example: str) -> Mapping[str, Any]:
    """The record, if it is an object."""
    if not isinstance(record, dict):
        raise BadRecordError(
            "not an object", f"the record must be an object such as {example}, not {describe_type(record)}"
        )
    return record


def require_field(record: Mapping[str, Any], name: str, reason: str = "missing field") -> Any:
    """The value of a required field."""
    value = record.get(name)
    if value is None and name in record:
        raise BadRecordError(
            reason, f"{name!r} is null (in a table: NaN, NULL or #N/A). Fill it in, or remove the record"
        )
    if value is None:
        raise BadRecordError(
            reason, f"the record has no {name!r} ({describe_keys(record, name)}). Add it, or set fields of the source"
        )
    return value


def describe_keys(record: Mapping[str, Any], wanted: str) -> str:
    """The keys of a record that lacks one: `it has 'role', 'contnet'; did you mean 'content' for 'contnet'?`."""
    keys = ", ".join(map(repr, list(record)[:20])) or "no keys"
    near = closest_key([wanted], record)
    return f"it has {keys}" + ("" if near is None else f"; did you mean {wanted!r} for {near!r}?")


def closest_key(
    wanted: Sequence[str], keys: Iterable[Any], exact: Sequence[str] = (), cutoff: float = 0.8
) -> str | None:
    """The key that is one of these names but for case and white space; else one of `exact` but for case, white space
    and accents; else one of these names but for a typing error (`cutoff` 1: without one)."""
    texts = [key for key in keys if isinstance(key, str) and len(key) < 100]
    plain = {re.sub(r"[\s-]+", "_", key.strip().lower()): key for key in texts}
    bare = {_without_accents(name): key for name, key in plain.items()}
    for name in wanted:
        if name in plain:
            return plain[name]
    for name in map(_without_accents, exact):
        if name in bare:
            return bare[name]
    for name in wanted:
        if found := difflib.get_close_matches(name, plain, n=1, cutoff=cutoff):
            return plain[found[0]]
    return None


def _without_accents(name: str) -> str:
    return "".join(each for each in unicodedata.normalize("NFKD", name) if not unicodedata.combining(each))


# Fields under the names that datasets give them.


def find_optional(
    record: Mapping[str, Any], field: str, known: Sequence[str], names: Mapping[str, str]
) -> tuple[str, Any]:
    """(name, value) of an optional field, under the user's name for it (`names`) or any known one; the value is None if
    the record has none or an empty one."""
    candidates = (names[field],) if field in names else known
    found = {name: record[name] for name in candidates if record.get(name) not in EMPTY_VALUES}
    first = next(iter(found.items()), ("", None))
    if any(value != first[1] for value in found.values()):
        raise BadRecordError(
            "ambiguous field",
            f"{' and '.join(sorted(found))} may each be the field {field}. Choose one: fields: {{{field}: NAME}}",
        )
    return first


def present_names(record: Mapping[str, Any], field: str, names: Sequence[str], fields: Mapping[str, str]) -> list[str]:
    """Which of a field's known names a record has; a name set by the user (`fields`) replaces them."""
    candidates = [fields[field]] if field in fields else names
    return [name for name in candidates if record.get(name) is not None]


def match_fields(
    record: Any, known: Mapping[str, Sequence[str]], required: Sequence[str], fields: Mapping[str, str]
) -> list[dict[str, str]]:
    """Every assignment of names to the `required` fields; more than one means that the record is ambiguous."""
    if not isinstance(record, dict):
        return []
    options = [[(field, name) for name in present_names(record, field, known[field], fields)] for field in required]
    return [dict(choice) for choice in itertools.product(*options)]


def record_keys(sample: Sequence[Any]) -> list[str]:
    """The keys of all records, each once, in their order."""
    return list(dict.fromkeys(str(key) for record in sample if isinstance(record, dict) for key in record))
