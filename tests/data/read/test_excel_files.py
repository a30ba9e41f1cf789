"""Excel files: cells as a person would write them, faults by row."""

from __future__ import annotations

import contextlib
import datetime
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
from whet.data.read.sources import SourceReader


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


def test_faults_are_named_by_row(tmp_path: Path) -> None:
    _, found = read(write(tmp_path / "a.xlsx", [["prompt", "completion"], ["a", "b"], ["c", "d", "e"], ["f", "#N/A"]]))
    assert found[0] == ["a", "b"]
    assert isinstance(found[1], BadRecord)
    assert found[1].origin.line == 3
    assert "column 3, which has no name" in found[1].explanation
    assert isinstance(found[2], BadRecord)
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
