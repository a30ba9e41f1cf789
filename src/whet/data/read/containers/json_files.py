"""Containers for JSON Lines, JSON arrays and JSON objects."""

from __future__ import annotations

import codecs
import io
import json
import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import IO, Any

from whet.core.errors import BadRecordError, WhetError
from whet.data.read.containers.container import (
    MAX_RECORD_BYTES,
    SAVE_AS_UTF8,
    Container,
    DecodedRecord,
    RawRecord,
    SeveralSplitsError,
    detect_compression,
    estimate_count,
    json_hint,
    open_bytes,
    read_whole,
    record_too_long,
    unique_keys,
)
from whet.data.read.records.formats import MESSAGE_KEYS, is_list_of_records, is_record
from whet.data.read.records.messages import RECORD_FIELDS
from whet.data.read.records.question_formats import MORE_THAN_A_PROMPT
from whet.data.read.records.question_shapes import find_names
from whet.data.read.records.record_fields import EMPTY_VALUES

_COUNT_CHUNK_BYTES = 2**20


class JsonLinesFile(Container):
    """One record per line. Only b"\\n" ends a line: JSON strings may contain every other line separator."""

    kind = "lines"

    def records(self) -> Iterator[RawRecord]:
        name, waiting = self.name, 0
        self.blank = 0
        with open_bytes(self.path, name) as stream:
            for number, line in enumerate(iter(partial(stream.readline, MAX_RECORD_BYTES), b""), 1):
                if len(line) == MAX_RECORD_BYTES and not line.endswith(b"\n"):
                    raise record_too_long(f"{name}:{number}")
                if line.isspace():
                    waiting += 1
                else:
                    if waiting:  # those at the end of a file do not count
                        self.blank, waiting = self.blank + waiting, 0
                    yield RawRecord(number, line, name)

    def count(self) -> int:
        if detect_compression(self.path):
            return estimate_count(self.path, self.name, count_lines)
        lines, last = 0, b""
        with self.path.open("rb") as file:
            while chunk := file.read(_COUNT_CHUNK_BYTES):
                lines, last = lines + chunk.count(b"\n"), chunk
        return lines + (not last.endswith(b"\n"))


def count_lines(text: bytes) -> int:
    """The number of lines, including an unterminated last one."""
    return text.count(b"\n") + (not text.endswith(b"\n"))


# A JSON array is split into its elements by a scan for brackets: nothing is parsed, and only one element is in memory.

_ARRAY_CHUNK_BYTES = 2**18
_STRING = rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"'
_SKIP_INSIDE_ELEMENT = re.compile(rb'(?:[^"\[\]{}]++|' + _STRING + rb")*+", re.DOTALL)
_SKIP_BETWEEN_ELEMENTS = re.compile(rb'(?:[^"\[\]{},]++|' + _STRING + rb")*+", re.DOTALL)
"""Matches up to the next bracket or, between elements, the next comma. Strings match as a whole, so brackets inside
them do not count; the match stops before a string that does not end within the buffer."""
_QUOTE, _COMMA = b'",'


class JsonArrayFile(Container):
    """A file `[…, …]`: one record per element."""

    kind = "array"

    def records(self) -> Iterator[RawRecord]:
        with open_bytes(self.path, self.name) as stream:
            for number, element in enumerate(split_array(stream, self.name), 1):
                yield RawRecord(number, element, self.name)

    def count(self) -> int:
        return estimate_count(self.path, self.name, _count_elements)


def _count_elements(head: bytes) -> int:
    number = 0
    try:
        for _ in split_array(io.BytesIO(head), ""):
            number += 1
    except WhetError:  # a sample has no closing bracket
        pass
    return number


def split_array(stream: IO[bytes], name: str) -> Iterator[bytes]:
    """The bytes of each element; errors inside an element surface when it is decoded."""
    buffer = stream.read(_ARRAY_CHUNK_BYTES).removeprefix(codecs.BOM_UTF8).lstrip()
    assert buffer.startswith(b"[")
    place, start, depth, number = 1, 1, 1, 0
    while depth:
        skipped = (_SKIP_BETWEEN_ELEMENTS if depth == 1 else _SKIP_INSIDE_ELEMENT).match(buffer, place)
        place = skipped.end() if skipped else place
        is_inside_string = place < len(buffer) and buffer[place] == _QUOTE
        if (len(buffer) if is_inside_string else place) - start > MAX_RECORD_BYTES:
            raise record_too_long(f"{name}:{number + 1}")
        if place == len(buffer) or is_inside_string:
            more = stream.read(max(_ARRAY_CHUNK_BYTES, len(buffer)))  # doubling keeps rescans of a huge string linear
            if not more:
                raise WhetError(
                    f"data.sources: {name}: the JSON array has no end: the file is truncated after {number} complete "
                    "elements. Copy or download it again"
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
                f"data.sources: {name}: found {rest.strip()[:20]!r} after the end of the JSON array. "
                "If each line is a record, name the file .jsonl"
            )
        rest = stream.read(_ARRAY_CHUNK_BYTES)


_SHARED = {*RECORD_FIELDS["system"], *RECORD_FIELDS["tools"], *MORE_THAN_A_PROMPT, "text"}
"""What an object may have once for all of its records."""


class JsonObjectFile(Container):
    """A file that is one JSON object: a single record, or a list of records under one of its keys.

    It is read as a whole, so its size is limited; JSON Lines and arrays are streamed."""

    kind = "object"

    def __init__(self, name: str, path: Path, split: str | None = None) -> None:
        super().__init__(name, path)
        self._split = split
        self._records()  # errors, and the note, come before any work

    def records(self) -> Iterator[RawRecord]:
        for number, record in enumerate(self._records(), 1):
            yield RawRecord(number, DecodedRecord(record), self.name)

    def count(self) -> int:
        return len(self._records())

    def _records(self) -> list[Any]:
        whole = self._read()
        if rows := _rows_of_columns(whole):
            self.note = "a column under each key"
            return rows
        if _is_messenger_export(whole):
            raise WhetError(
                f"data.sources: {self.name}: a chat between people, as Telegram, Facebook and Instagram export it. "
                "docs/data.md has a script that writes it as messages"
            )
        is_one = is_record(whole) or not MESSAGE_KEYS.isdisjoint(whole)
        lists = {} if is_one else {key: value for key, value in whole.items() if is_list_of_records(value)}
        if self._split is not None:
            if self._split not in lists:
                known = ", ".join(lists) or "none"
                raise WhetError(
                    f"data.sources: {self.name}: split: no list of records has the key {self._split!r}; known: {known}"
                )
            lists = {self._split: lists[self._split]}
        if not lists:
            return [whole]
        if len(lists) > 1:
            raise SeveralSplitsError(
                f"data.sources: {self.name}: several keys hold lists of records ({', '.join(lists)}). "
                "Set split to one of them",
                lists,
            )
        [(key, records)] = lists.items()
        if shared := [name for name in whole if name in _SHARED - {key} and whole[name] not in EMPTY_VALUES]:
            raise WhetError(
                f"data.sources: {self.name}: {shared[0]!r} is beside the records under {key!r}, which need it. Write "
                f"it into each: jq -c 'del(.{key}) + .{key}[]' FILE > NEW.jsonl"
            )
        self.note = f"records under {key!r}"
        return list(records)

    def _read(self) -> dict[str, Any]:
        raw = read_whole(self.path, self.name, "Write one record per line instead (.jsonl)")
        try:
            whole = json.loads(raw.decode("utf-8-sig"), object_pairs_hook=unique_keys)
        except UnicodeDecodeError as error:
            raise WhetError(
                f"data.sources: {self.name}: byte {error.start} is not valid UTF-8; {SAVE_AS_UTF8}"
            ) from None
        except BadRecordError as error:
            raise WhetError(f"data.sources: {self.name}: {error}") from None
        except (ValueError, RecursionError) as error:
            hint = json_hint(error) if isinstance(error, json.JSONDecodeError) else ""
            raise WhetError(
                f"data.sources: {self.name}:{getattr(error, 'lineno', 1)}: not valid JSON: {error}"
                f"{hint or '. If each line is a record, name the file .jsonl'}"
            ) from None
        if not isinstance(whole, dict):
            raise WhetError(f"data.sources: {self.name}: the file is neither a JSON object nor an array of records")
        return whole


def _rows_of_columns(whole: dict[str, Any]) -> list[dict[str, Any]]:
    """The records of an object of columns, {"question": {"0": …, "1": …}, "answer": {…}} or {"question": […],
    "answer": […]}, as to_json of pandas and to_dict of datasets write it; none of any other object."""
    columns = list(whole.values())
    if columns and all(isinstance(column, dict) and "0" in column for column in columns):
        rows = list(columns[0])
        if not all(row.isdigit() for row in rows) or any(list(column) != rows for column in columns):
            return []
        records = [{name: column[row] for name, column in whole.items()} for row in rows]
        return records if len(columns) > 1 or is_record(records[0]) else []
    if not all(isinstance(column, list) and column and not isinstance(column[0], dict) for column in columns):
        return []
    if len({len(column) for column in columns}) != 1:
        return []
    records = [dict(zip(whole, row, strict=True)) for row in zip(*columns, strict=True)]
    return records if is_record(records[0]) or None not in find_names(records[0]) else []


def _is_messenger_export(whole: dict[str, Any]) -> bool:
    chats = whole["chats"].get("list") if isinstance(whole.get("chats"), dict) else [whole]
    for chat in chats if isinstance(chats, list) else []:
        messages = chat.get("messages") if isinstance(chat, dict) else None
        for each in messages if isinstance(messages, list) else []:
            if isinstance(each, dict) and not {"from_id", "sender_name"}.isdisjoint(each):
                return True
    return False
