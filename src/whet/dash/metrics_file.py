"""metrics.jsonl as columns of numbers, read as it grows: a line is parsed once, whoever looks at the run."""

from __future__ import annotations

import os
import threading
import time
from array import array
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from whet.core.files import parse_json_line
from whet.report.formatting import finite_number

_BLOCK = 2**22
_ANCHOR = 1024
_MAX_COLUMNS = 200


class Table:
    """Rows of numbers by key; NaN where a line does not have it."""

    def __init__(self) -> None:
        self.rows = 0
        self._columns: dict[str, array[float]] = {}

    def add(self, line: Mapping[str, Any]) -> None:
        for key, value in line.items():
            number = finite_number(value)
            if number is None:
                continue
            column = self._columns.get(key)
            if column is None:
                if len(self._columns) == _MAX_COLUMNS:  # a damaged file
                    continue
                column = self._columns[key] = array("d")
            missing = self.rows - len(column)
            if missing > 0:
                column.extend([float("nan")] * missing)
            column.append(number)
        self.rows += 1

    @property
    def keys(self) -> list[str]:
        return list(self._columns)

    def column(self, key: str) -> NDArray[np.float64]:
        """The values of a key in all rows."""
        values = np.full(self.rows, np.nan)
        if key in self._columns:
            known = np.array(self._columns[key], dtype=np.float64)[: self.rows]
            values[: len(known)] = known
        return values


class MetricsFile:
    """The lines of a run's metrics.jsonl: `steps` and `evaluations`.

    A resumed or rolled-back run truncates the file and writes on. The last line that was read is compared with the file
    each time: if it is another one, the file is read from its start.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.lock = threading.Lock()
        self._reset()

    def _reset(self) -> None:
        self.steps, self.evaluations = Table(), Table()
        self.evaluation_lines: list[dict[str, Any]] = []
        self.first_step: dict[str, Any] = {}
        self.last_step: dict[str, Any] = {}
        self.damaged = 0
        """Lines that cannot be read."""
        self.offset = 0
        self._anchor = b""
        self.generation = time.monotonic_ns()
        """Another number after the file was read from its start."""

    @property
    def version(self) -> tuple[int, int]:
        """Changes whenever the content does."""
        return self.generation, self.offset

    def refresh(self, seconds: float | None = None) -> bool:
        """Read what is new, for so long; False if some is left. The caller holds `lock`."""
        end = None if seconds is None else time.monotonic() + seconds
        try:
            with self.path.open("rb") as file:
                size = os.fstat(file.fileno()).st_size
                if not self._continues(file, size):
                    self._reset()
                file.seek(self.offset)
                rest = b""
                while block := file.read(_BLOCK):
                    content = rest + block
                    cut = content.rfind(b"\n") + 1
                    self._add(content[:cut].splitlines(keepends=True))
                    self._advance(content[:cut])
                    rest = content[cut:]
                    if end is not None and time.monotonic() > end:
                        return self.offset + len(rest) >= size
        except OSError:  # not there yet, or deleted
            if self.offset:
                self._reset()
        return True

    def _continues(self, file: Any, size: int) -> bool:
        if size < self.offset:
            return False
        file.seek(self.offset - len(self._anchor))
        return bool(file.read(len(self._anchor)) == self._anchor)

    def _advance(self, content: bytes) -> None:
        self.offset += len(content)
        self._anchor = (self._anchor + content[-_ANCHOR:])[-_ANCHOR:]

    def _add(self, lines: Iterable[bytes]) -> None:
        for text in lines:
            line = parse_json_line(text)
            step = None if line is None else line.get("step")
            if line is None or isinstance(step, bool) or not isinstance(step, int) or abs(step) >= 2**53:
                self.damaged += 1
            elif line.keys().isdisjoint(("loss", "lr", "step_s")):
                self.evaluations.add(line)
                self.evaluation_lines.append(line)
            else:
                self.steps.add(line)
                self.first_step = self.first_step or line
                self.last_step = line
