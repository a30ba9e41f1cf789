"""Excel files: cells as a person would write them, faults by row."""

from __future__ import annotations

import contextlib
import datetime
import zipfile
from pathlib import Path
from typing import Any

import openpyxl
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from examples import examples
from whet.core.errors import WhetError
from whet.data.config import Source
from whet.data.conversation import BadRecord, Conversation
from whet.data.read.containers.number_format import format_number
from whet.data.read.sources import SourceReader, expected_records


def write(path: Path, rows: list[list[Any]], others: tuple[str, ...] = ()) -> Path:
    book = openpyxl.Workbook()
    sheet = book.active
    assert sheet is not None
    sheet.title = "Fragen"
    for row in rows:
        sheet.append(row)
    for name in others:
        book.create_sheet(name)
    book.save(path)
    return path


def read(path: Path) -> tuple[str, list[Any]]:
    reader = SourceReader(Source(path=str(path)))
    items = [reader.parse(record) for record in reader.records()]
    texts = [
        [message.content for message in item.messages] if isinstance(item, Conversation) else item for item in items
    ]
    return str(reader.description), texts


def test_cells_are_text_as_a_person_would_write_it(tmp_path: Path) -> None:
    rows: list[list[Any]] = [
        [None, None],
        [" prompt ", "completion", None],
        ["Wie viele?", 3.0],
        [None, None],
        ["Wie teuer?", 2.5],
        ["Wann?", datetime.datetime(2026, 1, 2)],
        ["Um wie viel Uhr?", datetime.datetime(2026, 1, 2, 3, 4)],
        ["Stimmt das?", True],
        ["Zwei\nZeilen?", "ja_x000D_\nnein"],
    ]
    description, found = read(write(tmp_path / "a.xlsx", rows, ("Notizen",)))
    assert found == [
        ["Wie viele?", "3"], ["Wie teuer?", "2.5"], ["Wann?", "2026-01-02"],
        ["Um wie viel Uhr?", "2026-01-02 03:04:00"], ["Stimmt das?", "true"], ["Zwei\nZeilen?", "ja\nnein"],
    ]  # fmt: skip
    assert "sheet 'Fragen' (not read: 'Notizen'" in description


@pytest.mark.parametrize(
    ("value", "code", "shown"),
    [
        (0.25, "0%", "25%"),
        (0.123, "0.0%", "12.3%"),
        (0.07, "0.00%;[Red]-0.00%", "7.00%"),
        (1234.5, "#,##0.00", "1,234.50"),
        (1234.5, '"$"#,##0.00', "$1,234.50"),
        (1234.5, r"#,##0.00\ [$€-407]", "1,234.50 €"),
        (-5.5, '_($* #,##0.00_);_($* (#,##0.00)_);_($* "-"??_);_(@_)', "$(5.50)"),
        (0, '_($* #,##0.00_);_($* (#,##0.00)_);_($* "-"??_);_(@_)', "$-"),
        (7, "00000", "00007"),
        (1234567, '0.0,,"M"', "1.2M"),
        (12, 'General" kg"', "12 kg"),
        (-12, "0.0", "-12.0"),
        (-0.001, "0.00", "0.00"),
        (1.005, "0.00", "1.01"),
        (0.5, "0.##", "0.5"),
        (2, "0.##", "2"),
        (0.1 + 0.2, "General", "0.3"),
        (0.5, "# ?/?", "0.5"),
        (45000, '[>=1000]0,"k";0', "45000"),
        (3, ";;;", "3"),
        (1e300, "0.00", str(int(1e300))),
    ],
)
def test_numbers_are_written_as_they_are_shown(tmp_path: Path, value: float, code: str, shown: str) -> None:
    assert format_number(value, code) == shown
    book = openpyxl.load_workbook(write(tmp_path / "a.xlsx", [["prompt", "completion"], ["a", value]]))
    book["Fragen"]["B2"].number_format = code
    book.save(tmp_path / "a.xlsx")
    assert read(tmp_path / "a.xlsx")[1] == [["a", shown]]


def test_a_duration_is_in_hours(tmp_path: Path) -> None:
    rows = [["prompt", "completion"], ["a", datetime.timedelta(hours=30)]]
    assert read(write(tmp_path / "a.xlsx", rows))[1] == [["a", "30:00:00"]]


def test_a_formula_without_a_saved_value_is_refused(tmp_path: Path) -> None:
    rows = [["system", "prompt", "completion"], ['="Be "&"nice"', "a", "b"], [None, "c", "d"]]
    refused, good = read(write(tmp_path / "a.xlsx", rows))[1]
    assert isinstance(refused, BadRecord)
    assert refused.origin.line == 2
    assert "cell A2 has a formula whose value is not in the file" in refused.explanation
    assert good == ["c", "d"]


def test_merged_cells_count_in_each_of_their_rows(tmp_path: Path) -> None:
    rows: list[list[Any]] = [
        ["system", "prompt", "completion"], ["Be nice.", "a", "b"], [None, "c", "d"], [None, None, None],
        ["Be short.", "e", "f"], [None, "g", None],
    ]  # fmt: skip
    book = openpyxl.load_workbook(write(tmp_path / "a.xlsx", rows))
    for cells in ("A2:A4", "B3:B4", "C3:C4", "A5:A6", "C5:C6"):
        book["Fragen"].merge_cells(cells)
    book.save(tmp_path / "a.xlsx")
    expected = [["Be nice.", "a", "b"], ["Be nice.", "c", "d"], ["Be short.", "e", "f"], ["Be short.", "g", "f"]]
    assert read(tmp_path / "a.xlsx")[1] == expected


def test_hidden_rows_are_read_and_named(tmp_path: Path) -> None:
    book = openpyxl.load_workbook(write(tmp_path / "a.xlsx", [["prompt", "completion"], ["a", "b"], ["c", "d"]]))
    book["Fragen"].row_dimensions[3].hidden = True
    book.save(tmp_path / "a.xlsx")
    description, found = read(tmp_path / "a.xlsx")
    assert found == [["a", "b"], ["c", "d"]]
    assert description.endswith("1 hidden row read, too")


def test_wrong_dimensions_do_not_cut_the_sheet(tmp_path: Path) -> None:
    write(tmp_path / "a.xlsx", [["prompt", "completion"], ["a", "b"], ["c", "d"]])
    with zipfile.ZipFile(tmp_path / "a.xlsx") as book, zipfile.ZipFile(tmp_path / "b.xlsx", "w") as other:
        for name in book.namelist():
            other.writestr(name, book.read(name).replace(b'<dimension ref="A1:B3"', b'<dimension ref="A1:B2"'))
    assert read(tmp_path / "b.xlsx")[1] == [["a", "b"], ["c", "d"]]
    assert expected_records(Source(path=str(tmp_path / "b.xlsx"))) == 2


def test_faults_are_named_by_row(tmp_path: Path) -> None:
    _, found = read(write(tmp_path / "a.xlsx", [["prompt", "completion"], ["a", "b"], ["c", "d", "e"], ["f", "#N/A"]]))
    assert found[0] == ["a", "b"]
    assert isinstance(found[1], BadRecord)
    assert found[1].origin.line == 3
    assert "column 3, which has no name" in found[1].explanation
    assert isinstance(found[2], BadRecord)
    _, [good, repeated] = read(
        write(tmp_path / "c.xlsx", [["prompt", "completion"], ["a", "b"], ["prompt", "completion"]])
    )
    assert good == ["a", "b"]
    assert "row repeats the names of the columns" in repeated.explanation
    with pytest.raises(WhetError, match="has 'prompt' twice"):
        read(write(tmp_path / "b.xlsx", [["prompt", "prompt"], ["a", "b"]]))


@settings(max_examples=examples(30), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_a_damaged_workbook_is_an_error_and_no_crash(tmp_path: Path, data: st.DataObject) -> None:
    book = tmp_path / "a.xlsx"
    if not book.exists():  # once: it holds the time, so its size differs from one to the next
        write(book, [["prompt", "completion"], ["a", "b"]])
    raw = bytearray(book.read_bytes())
    for _ in range(data.draw(st.integers(1, 8))):
        raw[data.draw(st.integers(4, len(raw) - 1))] = data.draw(st.integers(0, 255))
    (tmp_path / "b.xlsx").write_bytes(raw[: data.draw(st.integers(10, len(raw)))])
    with contextlib.suppress(WhetError):
        read(tmp_path / "b.xlsx")
