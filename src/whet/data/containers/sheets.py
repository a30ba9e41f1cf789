"""CSV and TSV: a row of names, then a record a row."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator
from pathlib import Path

from whet.core.errors import WhetError
from whet.data.containers.base import Container, Lazy, Raw, Ready, Unreadable
from whet.data.containers.lines import count_lines
from whet.data.containers.streams import content_size, estimate_count, open_bytes

_LONGEST_FIELD = 2**31 - 1  # the csv module's own limit is 128 KiB, less than a long answer


class Sheet(Container):
    """Values are text; a list of messages stands in its cell as JSON."""

    def __init__(self, name: str, path: Path, delimiter: str) -> None:
        super().__init__(name, path)
        self.kind = "csv" if delimiter == "," else "tsv"
        self._delimiter = delimiter

    def records(self) -> Iterator[Raw]:
        csv.field_size_limit(_LONGEST_FIELD)
        with open_bytes(self.path, self.name) as stream:
            text = io.TextIOWrapper(stream, "utf-8-sig", "surrogateescape", newline="")
            reader = csv.reader(text, delimiter=self._delimiter, strict=True)
            header: list[str] | None = None
            while True:
                line = reader.line_num + 1
                try:
                    row = next(reader, None)
                except csv.Error as error:
                    yield Raw(line, Unreadable("broken CSV", f"not valid CSV: {error}"), self.name)
                    continue
                if row is None:
                    break
                if not row or not any(row):
                    continue
                if header is None:
                    header = self._checked(row)
                else:
                    yield Raw(line, _record(header, row), self.name)
            text.detach()

    def count(self) -> int:
        return max(0, estimate_count(self.path, self.name, count_lines) - 1)

    def size(self) -> int:
        return content_size(self.path)

    def _checked(self, header: list[str]) -> list[str]:
        twice = {name for name in header if header.count(name) > 1}
        if twice or not all(header):
            fault = f"{sorted(twice)[0]!r} twice" if twice else "a column without a name"
            raise WhetError(
                f"data.sources: {self.name}: the first row must name the columns, and it has {fault} "
                f"({', '.join(header)[:200]})"
            )
        return header


def _record(header: list[str], row: list[str]) -> Lazy:
    if len(row) != len(header):
        return Unreadable("broken CSV", f"this row has {len(row)} fields, the first row names {len(header)}")
    try:
        "".join(row).encode()
    except UnicodeEncodeError:
        return Unreadable("not UTF-8", "a field is not valid UTF-8; save the file as UTF-8")
    return Ready(dict(zip(header, row, strict=True)))
