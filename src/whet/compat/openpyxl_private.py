"""Private API of openpyxl."""

from __future__ import annotations

from typing import IO, Any


def open_sheet_xml(sheet: Any) -> IO[bytes]:
    """`ReadOnlyWorksheet._get_source`: the XML of a sheet. Read-only sheets know neither merged cells nor hidden rows,
    and give None for a formula without a saved value."""
    stream: IO[bytes] = sheet._get_source()
    return stream
