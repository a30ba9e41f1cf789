"""JSON: decoding of records, and the containers JSON Lines, JSON array and JSON object."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from whet.core.errors import BadRecordError, WhetError
from whet.data.read.container import (
    Container,
    DecodedRecord,
    RawRecord,
    content_size,
    detect_compression,
    estimate_count,
    open_bytes,
)

# From the bytes of a JSON value to Python values, quickly where all is well and with a precise reason where not.


def _reject_constant(name: str) -> Any:
    raise BadRecordError("broken JSON", f"{name} is not JSON; write null or a number")


_DECODER = json.JSONDecoder(parse_constant=_reject_constant)
_scan_once = _DECODER.scan_once  # type: ignore[attr-defined]  # what decode() calls, without its search for white space


def decode_json(raw: bytes) -> Any:
    """The value, or a BadRecordError with the place within the line."""
    try:
        text = raw.decode().strip()
        value, end = _scan_once(text, 0)
        if end == len(text):
            return value
    except (ValueError, StopIteration, RecursionError):
        pass
    return _decode_or_explain(raw)


def _decode_or_explain(raw: bytes) -> Any:
    try:
        return _DECODER.decode(raw.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise BadRecordError("not UTF-8", f"byte {error.start} is not valid UTF-8; save the file as UTF-8") from None
    except json.JSONDecodeError as error:
        raise BadRecordError(
            "broken JSON", f"not valid JSON: {error.msg} at column {error.colno}{_array_hint(raw)}"
        ) from None
    except RecursionError:
        raise BadRecordError("broken JSON", "JSON that is nested too deeply to be read") from None
    except ValueError as error:
        raise BadRecordError("broken JSON", f"JSON that cannot be read: {error}") from None


def _array_hint(raw: bytes) -> str:
    """The first line of an array that goes over many lines."""
    first = raw.removeprefix(b"\xef\xbb\xbf").strip()
    return ". If the file is one JSON array, name it .json" if first in (b"[", b"[{") else ""


# JSON lines: one record a line.

_COUNT_CHUNK_BYTES = 2**20


class JsonLinesFile(Container):
    """Lines end at a newline byte alone: JSON text may hold every other line separator."""

    kind = "lines"

    def records(self) -> Iterator[RawRecord]:
        name = self.name
        with open_bytes(self.path, name) as stream:
            for number, line in enumerate(stream, 1):
                if not line.isspace():
                    yield RawRecord(number, line, name)

    def count(self) -> int:
        if detect_compression(self.path):
            return estimate_count(self.path, self.name, count_lines)
        lines, last = 0, b""
        with self.path.open("rb") as file:
            while chunk := file.read(_COUNT_CHUNK_BYTES):
                lines, last = lines + chunk.count(b"\n"), chunk
        return lines + (not last.endswith(b"\n"))

    def size(self) -> int:
        return content_size(self.path)


def count_lines(text: bytes) -> int:
    """Lines, whether or not the last one ends."""
    return text.count(b"\n") + (not text.endswith(b"\n"))


# A JSON array, split into its elements without parsing them and without holding more than one.

_ARRAY_CHUNK_BYTES = 2**18
_UTF8_BOM = b"\xef\xbb\xbf"
_STRING = rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"'
_SKIP_INSIDE_ELEMENT = re.compile(rb'(?:[^"\[\]{}]++|' + _STRING + rb")*+", re.DOTALL)
_SKIP_BETWEEN_ELEMENTS = re.compile(rb'(?:[^"\[\]{},]++|' + _STRING + rb")*+", re.DOTALL)
"""What can be passed over: up to the next bracket or, between elements, comma. Strings are passed as a whole, so that
brackets in texts are never seen; one whose end is not in the buffer yet is stopped at."""
_QUOTE, _COMMA = b'",'


class JsonArrayFile(Container):
    """A file `[…, …]`; each element is a record."""

    kind = "array"

    def records(self) -> Iterator[RawRecord]:
        with open_bytes(self.path, self.name) as stream:
            for number, element in enumerate(split_array(stream, self.name), 1):
                yield RawRecord(number, element, self.name)

    def count(self) -> int:
        return estimate_count(self.path, self.name, _count_elements)

    def size(self) -> int:
        return content_size(self.path)


def _count_elements(head: bytes) -> int:
    number = 0
    try:
        for _ in split_array(io.BytesIO(head), ""):
            number += 1
    except WhetError:  # of a piece the end is missing
        pass
    return number


def split_array(stream: IO[bytes], name: str) -> Iterator[bytes]:
    """The bytes of each element. What is wrong inside an element is found when that is parsed."""
    buffer = stream.read(_ARRAY_CHUNK_BYTES).removeprefix(_UTF8_BOM).lstrip()
    assert buffer.startswith(b"["), "only arrays come here"
    place, start, depth, number = 1, 1, 1, 0
    while depth:
        passed = (_SKIP_BETWEEN_ELEMENTS if depth == 1 else _SKIP_INSIDE_ELEMENT).match(buffer, place)
        place = passed.end() if passed else place
        if place == len(buffer) or buffer[place] == _QUOTE:
            more = stream.read(
                max(_ARRAY_CHUNK_BYTES, len(buffer))
            )  # doubling: a huge text is not passed again and again
            if not more:
                raise WhetError(
                    f"data.sources: {name}: the JSON array ends in the middle, after {number} whole elements: the file "
                    "is cut off. Copy or download it again"
                )
            buffer, place, start = buffer[start:] + more, place - start, 0
            continue
        char = buffer[place]
        depth += (char in b"[{") - (char in b"]}")
        if depth == 0 or (depth == 1 and char == _COMMA):
            element = buffer[start:place].strip()
            start = place + 1
            if element or number or depth:
                number += 1
                yield element
        place += 1
    _require_end_of_file(buffer[place:], stream, name)


def _require_end_of_file(rest: bytes, stream: IO[bytes], name: str) -> None:
    while rest:
        if rest.strip():
            raise WhetError(
                f"data.sources: {name}: there is more after the end of the JSON array ({rest.strip()[:20]!r}). "
                "If each line is a record of its own, name the file .jsonl"
            )
        rest = stream.read(_ARRAY_CHUNK_BYTES)


# A file that is one JSON object: a single record, or a list of records under one of its keys.

_MAX_OBJECT_BYTES = 2**30
_MESSAGE_KEYS = {"role", "from"}


class JsonObjectFile(Container):
    """It is read whole, so it may not be huge; lines and arrays stream."""

    kind = "object"

    def __init__(self, name: str, path: Path, split: str | None = None) -> None:
        super().__init__(name, path)
        self._split = split
        self._records()  # so that a fault, and the decision, come before any work

    def records(self) -> Iterator[RawRecord]:
        for number, record in enumerate(self._records(), 1):
            yield RawRecord(number, DecodedRecord(record), self.name)

    def count(self) -> int:
        return len(self._records())

    def size(self) -> int:
        return content_size(self.path)

    def _records(self) -> list[Any]:
        whole = self._read()
        lists = {key: value for key, value in whole.items() if _is_list_of_records(value)}
        if self._split is not None:
            if self._split not in lists:
                known = ", ".join(lists) or "none"
                raise WhetError(f"data.sources: {self.name}: no list of records is called {self._split!r} ({known})")
            lists = {self._split: lists[self._split]}
        if not lists:
            return [whole]
        if len(lists) > 1:
            raise WhetError(
                f"data.sources: {self.name}: several of its keys hold lists of records ({', '.join(lists)}): "
                "name one of them by split"
            )
        [(key, records)] = lists.items()
        self.note = f"records under {key!r}"
        return list(records)

    def _read(self) -> dict[str, Any]:
        with open_bytes(self.path, self.name) as stream:
            raw = stream.read(_MAX_OBJECT_BYTES + 1)
        if len(raw) > _MAX_OBJECT_BYTES:
            raise WhetError(
                f"data.sources: {self.name}: a single JSON object of more than {_MAX_OBJECT_BYTES >> 30} GiB cannot be read. "
                "Write one record on each line instead (.jsonl)"
            )
        try:
            whole = json.loads(raw.decode("utf-8-sig"))
        except (ValueError, RecursionError) as error:
            raise WhetError(
                f"data.sources: {self.name}: not valid JSON: {error}. If each line is a record of its own, name the "
                "file .jsonl"
            ) from None
        if not isinstance(whole, dict):
            raise WhetError(f"data.sources: {self.name}: this is neither a JSON object nor an array of records")
        return whole


def _is_list_of_records(value: Any) -> bool:
    """Not the messages of one conversation, which are objects in a list too."""
    return (
        isinstance(value, list)
        and bool(value)
        and all(isinstance(item, dict) for item in value)
        and _MESSAGE_KEYS.isdisjoint(value[0])
    )
