"""Containers for CSV, TSV and plain .txt files."""

from __future__ import annotations

import codecs
import contextlib
import csv
import io
import itertools
import re
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import IO, NamedTuple

from whet.core.display import is_valid_text
from whet.core.errors import BadRecordError, WhetError
from whet.data.read.containers.container import (
    MAX_RECORD_BYTES,
    SAVE_AS_UTF8,
    Container,
    DecodedRecord,
    LazyRecord,
    RawRecord,
    UnreadableRecord,
    content_size,
    estimate_count,
    open_bytes,
    read_whole,
    record_too_long,
)
from whet.data.read.containers.json_files import count_lines
from whet.data.read.containers.text_encoding import UTF8, detect_encoding
from whet.data.read.records.question_formats import ANSWER_WORDS, PROMPT_COMPLETION_FIELDS, QUESTION_WORDS
from whet.data.read.records.record_fields import closest_key


class CsvFile(Container):
    """CSV or TSV with a header row. Values are strings; a list of messages is JSON inside its cell.

    Spreadsheets separate cells by `;` where the comma is the decimal sign, and write #N/A for a missing value."""

    def __init__(self, name: str, path: Path, delimiter: str, encoding: str | None = None) -> None:
        """`delimiter` is that of the suffix; the file may show that it has another. `encoding`: None detects it."""
        super().__init__(name, path)
        self._codec, encoding_note = (encoding, "") if encoding else detect_encoding(path, name)
        found, rows = _detect_delimiter(path, name, self._codec, delimiter)
        header = find_header([row for _, row in rows])
        self._header_line = rows[header][0] if rows else 1
        if found == "|" and any(_MARKDOWN_RULE.fullmatch("|".join(row)) for _, row in rows[header + 1 : header + 2]):
            raise WhetError(
                f"data.sources: {name}:{rows[header + 1][0]}: the file is a Markdown table. Save it as CSV: remove "
                "this line, and the bars and spaces at the edges of the cells"
            )
        self.kind = "csv" if delimiter == "," else "tsv"
        if found != delimiter:
            self.kind += found
        if self._codec != UTF8:
            self.kind += f" {codecs.lookup(self._codec).name}"
        self._skips_spaces = any(
            cell.startswith(" ") and cell.lstrip().startswith('"') for _, row in rows for cell in row
        )
        """Someone wrote `a, "b"`. In quoted cells spaces stay."""
        self.note = ", ".join(
            filter(
                None,
                [
                    f"{_DELIMITERS[found]}-separated" if found != delimiter else "",
                    encoding_note,
                    f"columns named in line {self._header_line}" if header else "",
                    "without the spaces before cells" if self._skips_spaces else "",
                ],
            )
        )
        self._delimiter = found

    def records(self) -> Iterator[RawRecord]:
        csv.field_size_limit(MAX_RECORD_BYTES)  # its default is 128 KiB, less than a long answer
        with _open_text(self.path, self.name, self._codec) as text:
            lines = _bounded_lines(text, self.name)
            reader = csv.reader(lines, delimiter=self._delimiter, strict=True, skipinitialspace=self._skips_spaces)
            header: list[str] | None = None
            self.blank = waiting = 0
            while True:
                line = reader.line_num + 1
                try:
                    row = next(reader, None)
                except csv.Error as error:
                    yield RawRecord(line, UnreadableRecord("broken CSV", _explain_csv(error)), self.name)
                    continue
                if row is None:
                    break
                if is_blank(row):
                    waiting += header is not None
                    continue
                if header is not None:
                    self.blank, waiting = self.blank + waiting, 0
                    record = repeats_header(header, row) or _csv_record(header, row, self._delimiter)
                    yield RawRecord(line, record, self.name)
                elif line >= self._header_line and not _is_separator_line(row, line):
                    header = check_header(row, f"data.sources: {self.name}:{line}")
                    self.note = describe_unnamed(self.note, header)

    def count(self) -> int:
        """Exact for small files: a cell may have several lines, and rows may be blank."""
        if content_size(self.path) <= _COUNTED_BYTES:
            return sum(1 for _ in self.records())
        return max(0, estimate_count(self.path, self.name, count_lines) - 1)


def is_blank(row: Sequence[str]) -> bool:
    """Whether a row has no text; DOS ends a file with \\x1a."""
    return not any(cell.strip("\x1a") for cell in row)


def find_header(rows: Sequence[Sequence[str]]) -> int:
    """The index of the row that names the columns: the first, unless it does not name a question and an answer and one
    of the next rows does, or both do: titles and groups of columns are written above them."""
    named = [number for number, row in enumerate(rows[:HEADER_ROWS]) if names_columns(row)]
    if not named:
        return 0
    first, second = named[0], named[0] + 1
    return second if second in named and rows[second] != rows[first] else first


def names_columns(row: Sequence[str]) -> bool:
    """Whether a row has the words for a question and for an answer."""
    names = [cell.strip() for cell in row if cell.strip()]
    question = closest_key(PROMPT_COMPLETION_FIELDS["prompt"], names, QUESTION_WORDS.split(), cutoff=1.0)
    answer = closest_key(PROMPT_COMPLETION_FIELDS["completion"], names, ANSWER_WORDS.split(), cutoff=1.0)
    return question is not None and answer is not None and question != answer


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


def repeats_header(header: list[str], row: Sequence[str]) -> UnreadableRecord | None:
    """The fault of a row that has the names of the columns once more."""
    if [cell.strip() for cell in row] != header:
        return None
    explanation = "this row repeats the names of the columns, as where files were joined. Remove it"
    return UnreadableRecord("broken table", explanation)


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
    if 1 < len(row) < len(header):
        row = row + [""] * (len(header) - len(row))  # its last cells are empty
    if len(row) != len(header):
        hint = f'. Write a cell that contains a {_DELIMITERS[delimiter]} between double quotes: "…"'
        found = f"this row has {len(row)} fields, the header has {len(header)}"
        return UnreadableRecord("broken CSV", found + (hint if len(row) > len(header) else ""))
    try:
        "".join(row).encode()
    except UnicodeEncodeError:
        return UnreadableRecord("not UTF-8", f"a field is not valid UTF-8; {SAVE_AS_UTF8}")
    return table_record(header, [cell.replace("\r\n", "\n") for cell in row])


_DELIMITERS = {",": "comma", ";": "semicolon", "\t": "tab", "|": "bar", ":": "colon", "^": "caret", "~": "tilde"}
_MISSING_VALUES = frozenset((
    "NaN", "nan", "<NA>", "NULL", r"\N",
    "#N/A", "#REF!", "#VALUE!", "#NAME?", "#DIV/0!", "#NULL!", "#NUM!", "#SPILL!", "#CALC!", "#BUSY!", "#FIELD!",
    "#BLOCKED!", "#CONNECT!", "#UNKNOWN!", "#GETTING_DATA", "#ERROR!",
    "#NV", "#BEZUG!", "#WERT!", "#ZAHL!", "#VALEUR!", "#NOM?", "#NOMBRE!", "#¡REF!", "#¡VALOR!", "#¡DIV/0!", "#N/D",
))  # fmt: skip
"""What pandas, databases and spreadsheets (also in German, French and Spanish) write for a missing value or a failed
formula; like null in JSON."""
_DETECTION_ROWS, _DETECTION_CHARACTERS = 100, 2**20


_MARKDOWN_RULE = re.compile(r"[\s|]*:?-{2,}[\s|:-]*")

_COUNTED_BYTES = 2**25
HEADER_ROWS = 10
_MOST = 0.9


def _detect_delimiter(path: Path, name: str, codec: str, expected: str) -> tuple[str, list[tuple[int, list[str]]]]:
    """The delimiter, and the first rows by it, each with its line. It is that of the suffix, unless not one row fits
    it, and one other fits more rows than any, and most: rows with as many cells as the header, at least two."""
    with _open_text(path, name, codec) as text:
        sample = text.read(_DETECTION_CHARACTERS)
    whole = len(sample) < _DETECTION_CHARACTERS
    lines = list(io.StringIO(sample, newline=""))[: None if whole else -1]  # the last one may be cut
    rows = {delimiter: _sample_rows(lines, delimiter) for delimiter in _DELIMITERS}
    head, *body = _table(rows[expected])
    if any(len(row) == len(head) > 1 for row in body) or (not body and len(head) > 1):
        return expected, rows[expected]
    fits = {delimiter: _share_of_rows(_table(found)) for delimiter, found in rows.items() if delimiter != expected}
    best = [delimiter for delimiter, share in fits.items() if share == max(fits.values()) > _MOST]
    found = best[0] if len(best) == 1 else expected
    return found, rows[found]


def _table(rows: list[tuple[int, list[str]]]) -> list[list[str]]:
    """The rows from the one that names the columns on."""
    cells = [row for _, row in rows]
    return cells[find_header(cells) :] or [[]]


def _share_of_rows(rows: list[list[str]]) -> float:
    """The share of rows with as many cells as the header; a row whose last cells are missing counts a
    little less."""
    head, *body = rows
    if len(head) < 2 or not body:
        return 0.0
    full = sum(len(row) == len(head) for row in body)
    short = sum(1 < len(row) < len(head) for row in body)
    return (full + (1 - 1e-3) * short) / len(body)


def _sample_rows(lines: list[str], delimiter: str) -> list[tuple[int, list[str]]]:
    """The first rows that are complete, each with its line; none if one cannot be read."""
    csv.field_size_limit(MAX_RECORD_BYTES)
    rows: list[tuple[int, list[str]]] = []
    reader = csv.reader(iter(lines), delimiter=delimiter, strict=True)
    try:
        line = 1
        for row in itertools.islice(reader, _DETECTION_ROWS + 1):
            if not is_blank(row) and not (not rows and _is_separator_line(row, reader.line_num)):
                rows.append((line, row))
            line = reader.line_num + 1
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


def is_table(path: Path, name: str) -> bool:
    """Whether a .txt file is a table: what spreadsheets save as "Unicode text". Its columns must be named by words for
    a question and an answer, so that no document is taken for one."""
    found, rows = _detect_delimiter(path, name, detect_encoding(path, name).codec, "\t")
    table = _table(rows)
    return names_columns(table[0]) and _share_of_rows(table) > _MOST and found in "\t;,|"


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
