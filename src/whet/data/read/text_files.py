"""Containers for CSV, TSV and plain .txt files."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import IO, NamedTuple

from whet.core.errors import BadRecordError, WhetError
from whet.data.read.container import (
    MAX_RECORD_BYTES,
    Container,
    DecodedRecord,
    LazyRecord,
    RawRecord,
    UnreadableRecord,
    estimate_count,
    open_bytes,
    read_whole,
    record_too_long,
)
from whet.data.read.json_files import count_lines


class CsvFile(Container):
    """CSV or TSV with a header row. Values are strings; a list of messages is JSON inside its cell."""

    def __init__(self, name: str, path: Path, delimiter: str) -> None:
        super().__init__(name, path)
        self.kind = "csv" if delimiter == "," else "tsv"
        self._delimiter = delimiter

    def records(self) -> Iterator[RawRecord]:
        csv.field_size_limit(MAX_RECORD_BYTES)  # its default is 128 KiB, less than a long answer
        with open_bytes(self.path, self.name) as stream:
            text = io.TextIOWrapper(stream, "utf-8-sig", "surrogateescape", newline="")
            reader = csv.reader(_bounded_lines(text, self.name), delimiter=self._delimiter, strict=True)
            header: list[str] | None = None
            while True:
                line = reader.line_num + 1
                try:
                    row = next(reader, None)
                except csv.Error as error:
                    yield RawRecord(line, UnreadableRecord("broken CSV", f"not valid CSV: {error}"), self.name)
                    continue
                if row is None:
                    break
                if not row or not any(row):
                    continue
                if header is None:
                    header = self._check_header(row)
                else:
                    yield RawRecord(line, _csv_record(header, row), self.name)
            text.detach()

    def count(self) -> int:
        return max(0, estimate_count(self.path, self.name, count_lines) - 1)

    def _check_header(self, header: list[str]) -> list[str]:
        twice = {name for name in header if header.count(name) > 1}
        if twice or not all(header):
            fault = f"{sorted(twice)[0]!r} twice" if twice else "a column without a name"
            raise WhetError(
                f"data.sources: {self.name}: the first row must name the columns, but it has {fault} "
                f"({', '.join(header)[:200]})"
            )
        return header


def _bounded_lines(text: IO[str], name: str) -> Iterator[str]:
    for number, line in enumerate(iter(partial(text.readline, MAX_RECORD_BYTES), ""), 1):
        if len(line) == MAX_RECORD_BYTES and not line.endswith(("\n", "\r")):
            raise record_too_long(f"{name}:{number}")
        yield line


def _csv_record(header: list[str], row: list[str]) -> LazyRecord:
    if len(row) != len(header):
        return UnreadableRecord("broken CSV", f"this row has {len(row)} fields, the header has {len(header)}")
    try:
        "".join(row).encode()
    except UnicodeEncodeError:
        return UnreadableRecord("not UTF-8", "a field is not valid UTF-8; save the file as UTF-8")
    return DecodedRecord(dict(zip(header, row, strict=True)))


class TextFile(Container):
    """A .txt file is one document. For one document per line, use JSON Lines with `text`."""

    kind = "document"

    def records(self) -> Iterator[RawRecord]:
        yield RawRecord(1, _LazyText(self.path, self.name), self.name)

    def count(self) -> int:
        return 1


class _LazyText(NamedTuple):
    path: Path
    name: str

    def decode(self) -> str:
        raw = read_whole(self.path, self.name, "Write one document per line instead (.jsonl, with `text`)")
        try:
            return raw.decode("utf-8-sig")
        except UnicodeDecodeError as error:
            raise BadRecordError(
                "not UTF-8", f"byte {error.start} is not valid UTF-8; save the file as UTF-8"
            ) from None
