"""Containers for CSV, TSV and plain .txt files."""

from __future__ import annotations

import codecs
import contextlib
import csv
import io
import itertools
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import IO, NamedTuple

from whet.core.display import is_valid_text
from whet.core.errors import BadRecordError, WhetError
from whet.data.read.container import (
    MAX_RECORD_BYTES,
    SAVE_AS_UTF8,
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
from whet.data.read.text_encoding import UTF8, detect_encoding


class CsvFile(Container):
    """CSV or TSV with a header row. Values are strings; a list of messages is JSON inside its cell.

    Spreadsheets separate cells by `;` where the comma is the decimal sign, and write #N/A for a missing value."""

    def __init__(self, name: str, path: Path, delimiter: str, encoding: str | None = None) -> None:
        """`delimiter` is that of the suffix; the file may show that it has another. `encoding`: None detects it."""
        super().__init__(name, path)
        self._codec, encoding_note = (encoding, "") if encoding else detect_encoding(path, name)
        found = _detect_delimiter(path, name, self._codec, delimiter)
        self.kind = "csv" if delimiter == "," else "tsv"
        if found != delimiter:
            self.kind += found
        if self._codec != UTF8:
            self.kind += f" {codecs.lookup(self._codec).name}"
        self.note = ", ".join(
            filter(None, [f"{_DELIMITERS[found]}-separated" if found != delimiter else "", encoding_note])
        )
        self._delimiter = found

    def records(self) -> Iterator[RawRecord]:
        csv.field_size_limit(MAX_RECORD_BYTES)  # its default is 128 KiB, less than a long answer
        with _open_text(self.path, self.name, self._codec) as text:
            reader = csv.reader(_bounded_lines(text, self.name), delimiter=self._delimiter, strict=True)
            header: list[str] | None = None
            while True:
                line = reader.line_num + 1
                try:
                    row = next(reader, None)
                except csv.Error as error:
                    yield RawRecord(line, UnreadableRecord("broken CSV", _explain_csv(error)), self.name)
                    continue
                if row is None:
                    break
                if not row or not any(row):
                    continue
                if header is not None:
                    yield RawRecord(line, _csv_record(header, row, self._delimiter), self.name)
                elif not _is_separator_line(row, line):
                    header = check_header(row, f"data.sources: {self.name}:{line}")
                    self.note = describe_unnamed(self.note, header)

    def count(self) -> int:
        return max(0, estimate_count(self.path, self.name, count_lines) - 1)


def check_header(header: list[str], place: str) -> list[str]:
    """The names of the columns; "" for a column without one, such as the numbers that pandas writes."""
    header = [name.strip() for name in header]
    if not is_valid_text("".join(header).replace("\0", "")):
        raise WhetError(f"{place}: the name of a column is not valid UTF-8; {SAVE_AS_UTF8}")
    twice = sorted({name for name in header if name and header.count(name) > 1})
    if twice:
        raise WhetError(
            f"{place}: the first row must name the columns, but it has {twice[0]!r} twice "
            f"({', '.join(header)[:200]}). Rename one of them"
        )
    return header


def describe_unnamed(note: str, header: list[str]) -> str:
    """The note about a table, with its columns that have no name."""
    unnamed = ", ".join(str(number) for number, name in enumerate(header, 1) if not name)
    if not unnamed or "without a name" in note:
        return note
    return ", ".join(filter(None, [note, f"not used: columns without a name ({unnamed})"]))


def table_record(header: list[str], row: list[str]) -> DecodedRecord:
    """A row as an object: its named cells."""
    cells = zip(header, row, strict=True)
    return DecodedRecord({name: None if cell in _MISSING_VALUES else cell for name, cell in cells if name})


@contextlib.contextmanager
def _open_text(path: Path, name: str, codec: str) -> Iterator[IO[str]]:
    """The characters of a file. What is not valid in an encoding of bytes stays as surrogates, for its record."""
    with open_bytes(path, name) as stream:
        text = io.TextIOWrapper(stream, codec, "surrogateescape", newline="")
        try:
            yield text
        except UnicodeError as error:
            raise WhetError(
                f"data.sources: {name}: not valid {codec} ({error}). Set encoding to the file's own, or save it as "
                "UTF-8"
            ) from None
        finally:
            text.detach()


def _bounded_lines(text: IO[str], name: str) -> Iterator[str]:
    for number, line in enumerate(iter(partial(text.readline, MAX_RECORD_BYTES), ""), 1):
        if len(line) == MAX_RECORD_BYTES and not line.endswith(("\n", "\r")):
            raise record_too_long(f"{name}:{number}")
        yield line


def _csv_record(header: list[str], row: list[str], delimiter: str) -> LazyRecord:
    if len(row) != len(header):
        hint = f'. Write a cell that contains a {_DELIMITERS[delimiter]} between double quotes: "…"'
        found = f"this row has {len(row)} fields, the header has {len(header)}"
        return UnreadableRecord("broken CSV", found + (hint if len(row) > len(header) else ""))
    try:
        "".join(row).encode()
    except UnicodeEncodeError:
        return UnreadableRecord("not UTF-8", f"a field is not valid UTF-8; {SAVE_AS_UTF8}")
    return table_record(header, row)


_DELIMITERS = {",": "comma", ";": "semicolon", "\t": "tab", "|": "bar", ":": "colon", "^": "caret", "~": "tilde"}
_MISSING_VALUES = frozenset(("NaN", "nan", "<NA>", "#N/A", "#REF!", "#VALUE!", "#NAME?", "#DIV/0!", "#NULL!", "#NUM!"))
"""What pandas and spreadsheets write for a missing value or a failed formula; like null in JSON."""
_DETECTION_ROWS, _DETECTION_CHARACTERS = 100, 2**20


def _detect_delimiter(path: Path, name: str, codec: str, expected: str) -> str:
    """The delimiter of the suffix, unless not one row fits it, and exactly one other gives every row as many cells as
    the header, at least two."""
    with _open_text(path, name, codec) as text:
        sample = text.read(_DETECTION_CHARACTERS)
    whole = len(sample) < _DETECTION_CHARACTERS
    lines = list(io.StringIO(sample, newline=""))[: None if whole else -1]  # the last one may be cut
    rows = {delimiter: _sample_rows(lines, delimiter) for delimiter in _DELIMITERS}
    head, *body = rows[expected] or [[]]
    if any(len(row) == len(head) > 1 for row in body) or (not body and len(head) > 1):
        return expected
    others = [
        delimiter
        for delimiter, found in rows.items()
        if delimiter != expected and len(found) > 1 and len(found[0]) > 1 and len({len(row) for row in found}) == 1
    ]
    return others[0] if len(others) == 1 else expected


def _sample_rows(lines: list[str], delimiter: str) -> list[list[str]]:
    """The first rows that are complete; none if one cannot be read."""
    csv.field_size_limit(MAX_RECORD_BYTES)
    rows: list[list[str]] = []
    reader = csv.reader(iter(lines), delimiter=delimiter, strict=True)
    try:
        for row in itertools.islice(reader, _DETECTION_ROWS + 1):
            if any(row) and not (not rows and _is_separator_line(row, reader.line_num)):
                rows.append(row)
    except csv.Error as error:
        if "unexpected end of data" not in str(error):  # the sample ends inside a quoted cell
            return []
    return rows


def _is_separator_line(row: list[str], line: int) -> bool:
    """Excel's first line `sep=;`."""
    return line == 1 and row[0].startswith("sep=") and len("".join(row)) <= len("sep=;")


def _explain_csv(error: csv.Error) -> str:
    hint = ""
    if "expected after" in str(error):
        hint = '. Double a quote inside a quoted cell: ""'
    elif "unexpected end of data" in str(error):
        hint = ". A quote is opened here and never closed"
    return f"not valid CSV: {error}{hint}"


class TextFile(Container):
    """A .txt file is one document. For one document per line, use JSON Lines with `text`."""

    def __init__(self, name: str, path: Path, encoding: str | None = None) -> None:
        super().__init__(name, path)
        self.kind = "document" + (f" {codecs.lookup(encoding).name}" if encoding else "")
        self._codec = encoding or UTF8

    def records(self) -> Iterator[RawRecord]:
        yield RawRecord(1, _LazyText(self.path, self.name, self._codec), self.name)

    def count(self) -> int:
        return 1


class _LazyText(NamedTuple):
    path: Path
    name: str
    codec: str

    def decode(self) -> str:
        raw = read_whole(self.path, self.name, "Write one document per line instead (.jsonl, with `text`)")
        try:
            return raw.decode(self.codec)
        except UnicodeDecodeError as error:
            raise BadRecordError(
                "not UTF-8", f"byte {error.start} is not valid {error.encoding}; {SAVE_AS_UTF8}"
            ) from None
