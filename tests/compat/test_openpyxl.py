"""The private API of openpyxl that whet uses."""

from __future__ import annotations

from pathlib import Path

import openpyxl

from whet.compat.openpyxl_private import open_sheet_xml


def test_the_xml_of_a_sheet(tmp_path: Path) -> None:
    book = openpyxl.Workbook()
    book.active["A1"] = 5
    book.save(tmp_path / "a.xlsx")
    book = openpyxl.load_workbook(tmp_path / "a.xlsx", read_only=True)
    with open_sheet_xml(book.active) as stream:
        assert b"<v>5</v>" in stream.read()
    book.close()
