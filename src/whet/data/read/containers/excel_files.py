"""Excel workbooks: the rows of their first sheet."""

from __future__ import annotations

import contextlib
import datetime
import itertools
import re
import warnings
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple
from xml.etree import ElementTree

from whet.compat.openpyxl_private import open_sheet_xml
from whet.core.errors import WhetError
from whet.data.read.containers.container import Container, RawRecord, UnreadableRecord
from whet.data.read.containers.number_format import format_number
from whet.data.read.containers.text_files import (
    HEADER_ROWS,
    check_header,
    describe_unnamed,
    find_header,
    is_blank,
    names_columns,
    repeats_header,
    table_record,
)

_MAX_BYTES = 2**30
"""Of a workbook, decompressed."""
_CARRIAGE_RETURN = re.compile(r"_x000D_\n?")


class ExcelFile(Container):
    """An .xlsx workbook: the first visible sheet with columns named as a question and an answer, else the first with
    several columns. Its first row names them. Formulas count by the value that Excel saved, merged cells in each of
    their rows."""

    kind = "xlsx"

    def __init__(self, name: str, path: Path) -> None:
        super().__init__(name, path)
        with self._sheet() as (sheet, others):
            first = list(itertools.islice(_rows(sheet), HEADER_ROWS))
            header = find_header([row for _, row in first])
            self._header_row = first[header][0] if first else 1
            self._layout = _read_layout(sheet)
            hidden = len(self._layout.hidden_rows)
            notes = [
                f"sheet {sheet.title!r}",
                f"columns named in row {self._header_row}" if header else "",
                f"{hidden} hidden row{'s' if hidden > 1 else ''} read, too" if hidden else "",
            ]
            if others:
                notes[0] += f" (not read: {', '.join(map(repr, others))}; to read another, save it as CSV UTF-8)"
            self.note = ", ".join(filter(None, notes))

    def records(self) -> Iterator[RawRecord]:
        header: list[str] | None = None
        self.blank, before = 0, 0
        with self._sheet() as (sheet, _):
            merged = dict[int, str]()
            for number, row in _rows(sheet):
                if number < self._header_row:
                    continue
                if header is None:
                    while row and not row[-1].strip():
                        del row[-1]  # formatted, but empty
                    header = check_header(row, f"data.sources: {self.name}:{number}")
                    self.note = describe_unnamed(self.note, header)
                    before = number
                    continue
                self.blank, before = self.blank + number - before - 1, number
                self._fill_merged(number, row, merged)
                explanation = self._layout.formulas_without_value.get(number)
                if explanation is None and any(row[len(header) :]):
                    explanation = f"this row has a cell in column {len(header) + 1}, which has no name in the first row"
                if explanation is not None:
                    yield RawRecord(number, UnreadableRecord("broken table", explanation), self.name)
                else:
                    row = row[: len(header)] + [""] * (len(header) - len(row))
                    yield RawRecord(number, repeats_header(header, row) or table_record(header, row), self.name)

    def count(self) -> int:
        return max(0, self._layout.last_row - self._header_row)

    def _fill_merged(self, number: int, row: list[str], above: dict[int, str]) -> None:
        """Write the text of cells that are merged with those above into a row; `above` has them by column."""
        row += [""] * (max(self._layout.merged.get(number, ()), default=-1) + 1 - len(row))
        for column in self._layout.merged.get(number, ()):
            row[column] = above.get(column, "")
        above.update(enumerate(row))

    @contextlib.contextmanager
    def _sheet(self) -> Iterator[tuple[Any, list[str]]]:
        """The first visible sheet, and the names of the others."""
        try:
            import openpyxl
        except ImportError:
            raise WhetError(
                f"data.sources: {self.name}: reading an Excel file needs openpyxl: pip install 'whet[xlsx]'. Or save "
                "the file as CSV UTF-8"
            ) from None
        try:
            with self.path.open("rb") as file, warnings.catch_warnings():
                if sum(entry.file_size for entry in zipfile.ZipFile(file).infolist()) > _MAX_BYTES:
                    raise WhetError(
                        f"data.sources: {self.name}: it has more than {_MAX_BYTES >> 20:,} MiB, decompressed. Save it "
                        "as CSV UTF-8"
                    )
                warnings.simplefilter("ignore")  # of styles and validations, which no record needs
                book = openpyxl.load_workbook(file, read_only=True, data_only=True)
                with contextlib.closing(book):
                    visible = [sheet for sheet in book.worksheets if sheet.sheet_state == "visible"]
                    if not visible:
                        raise WhetError(f"data.sources: {self.name}: the workbook has no visible sheet with cells")
                    tables = [sheet for sheet in visible if _has_table(sheet)]
                    best = max(map(_rank_table, tables), default=0)  # the first may be a cover page
                    chosen = next((sheet for sheet in tables if _rank_table(sheet) == best), None)
                    if chosen is None:
                        raise WhetError(
                            f"data.sources: {self.name}: sheet {visible[0].title!r} has fewer than two rows. The first "
                            "has the names of the columns, such as prompt and completion; each row below is a record"
                        )
                    yield chosen, [sheet.title for sheet in visible if sheet is not chosen]
        except (WhetError, OSError):
            raise
        except Exception as error:  # whatever the parsers of a damaged file raise
            raise WhetError(
                f"data.sources: {self.name}: the workbook cannot be read ({type(error).__name__}: {error}). Save it "
                "again, or as CSV UTF-8"
            ) from None


def _has_table(sheet: Any) -> bool:
    """Whether a sheet has at least two rows, the names of the columns being one. A chart has none."""
    return hasattr(sheet, "iter_rows") and len(list(itertools.islice(_rows(sheet), 2))) == 2


def _rank_table(sheet: Any) -> int:
    """2: its columns are named as a question and an answer. 1: its first rows have several cells. 0: neither."""
    rows = [row for _, row in itertools.islice(_rows(sheet), HEADER_ROWS)]
    if names_columns(rows[find_header(rows)]):
        return 2
    return int(all(sum(1 for cell in row if cell.strip()) > 1 for row in rows[:2]))


class _Layout(NamedTuple):
    """What openpyxl does not give for the sheets of a file that it reads row by row."""

    last_row: int
    """The last with a value: the dimensions that a program wrote may be wrong."""
    merged: dict[int, list[int]]
    """By row, the columns (from 0) whose cells are merged with those above."""
    hidden_rows: list[int]
    formulas_without_value: dict[int, str]
    """By row, the explanation."""


def _read_layout(sheet: Any) -> _Layout:
    from openpyxl.utils import range_boundaries

    layout = _Layout(0, {}, [], {})
    row = last_row = 0
    with open_sheet_xml(sheet) as stream:
        for _, element in ElementTree.iterparse(stream):
            match _local_name(element):
                case "row":
                    row = int(float(element.get("r", row + 1)))
                    found = _find_values(element)
                    if found.has_values:
                        last_row = row
                        if element.get("hidden") in ("1", "true"):
                            layout.hidden_rows.append(row)
                    if found.unsaved:
                        layout.formulas_without_value[row] = (
                            f"cell {found.unsaved} has a formula whose value is not in the file. Open it in Excel or "
                            "LibreOffice, and save it"
                        )
                    element.clear()
                case "mergeCell":
                    left, top, _, bottom = range_boundaries(element.get("ref", ""))
                    for each in range(top + 1, min(bottom, last_row) + 1):
                        layout.merged.setdefault(each, []).append(left - 1)
    return layout._replace(last_row=last_row)


class _Values(NamedTuple):
    has_values: bool
    unsaved: str


def _find_values(row: ElementTree.Element) -> _Values:
    """Whether a row has any value, and its first cell with a formula but none: Excel writes t="str" beside an empty
    text, programs that do not calculate write neither."""
    has_values, unsaved = False, ""
    for cell in row:
        parts = {_local_name(part): part for part in cell}
        has_value = "is" in parts or ("v" in parts and bool(parts["v"].text))
        has_values |= has_value or "f" in parts
        if "f" in parts and not has_value and cell.get("t") != "str":
            unsaved = unsaved or cell.get("r", "of this row")
    return _Values(has_values, unsaved)


def _local_name(element: ElementTree.Element) -> str:
    return str(element.tag).rpartition("}")[2]


def _rows(sheet: Any) -> Iterator[tuple[int, list[str]]]:
    """The rows that are not blank, each with its number."""
    sheet.reset_dimensions()  # those in the file may be wrong, and would cut the sheet
    for number, cells in enumerate(sheet.iter_rows(), 1):
        row = [_cell_text(cell) for cell in cells]
        if not is_blank(row):
            yield number, row


def _cell_text(cell: Any) -> str:
    """A cell as a person would write it."""
    match cell.value:
        case None:
            return ""
        case str() as text:
            return _CARRIAGE_RETURN.sub("\n", text)
        case bool() as flag:
            return "true" if flag else "false"
        case int() | float() as number:
            return format_number(number, cell.number_format)
        case datetime.datetime() as date if date.time() == datetime.time():
            return date.date().isoformat()
        case datetime.datetime() as date:
            return date.isoformat(sep=" ")
        case datetime.timedelta() as time:
            seconds = round(abs(time).total_seconds())
            sign = "-" if time < datetime.timedelta() else ""
            return f"{sign}{seconds // 3600}:{seconds // 60 % 60:02}:{seconds % 60:02}"
    return str(cell.value)
