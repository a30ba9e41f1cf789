"""metrics.jsonl as columns of numbers, read as it grows: a line is parsed once, whoever looks at the run."""

from __future__ import annotations

import json
import os
import threading
import time
from array import array
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from whet.core.files import parse_json_line
from whet.report.formatting import finite_number

_BLOCK = 2**22
_ANCHOR = 1024
_MAX_COLUMNS = 200
_NAN = float("nan")


def _as_number(value: Any) -> float:
    if type(value) is float and -1e100 < value < 1e100:
        return value
    number = finite_number(value)
    return _NAN if number is None else number


class Table:
    """Rows of numbers by key; NaN where a line does not have it."""

    def __init__(self) -> None:
        self.rows = 0
        self._columns: dict[str, array[float]] = {}

    def add(self, lines: Sequence[Mapping[str, Any]]) -> None:
        """Append rows, column by column."""
        for key in dict.fromkeys(key for line in lines for key in line):
            if key not in self._columns and len(self._columns) == _MAX_COLUMNS:  # a damaged file
                continue
            values = array("d", [_as_number(line.get(key)) for line in lines])
            if key not in self._columns and all(value != value for value in values):
                continue  # texts, or not measured so far
            column = self._columns.setdefault(key, array("d"))
            column.extend([_NAN] * (self.rows - len(column)))
            column.extend(values)
        self.rows += len(lines)

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
        self.answers: dict[tuple[Any, ...], Any] = {}
        """What was made of the content so far, by request: several pages ask for the same."""
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
            if self.path.exists() and not self.path.is_file():  # a pipe would block
                return True
            with self.path.open("rb") as file:
                size = os.fstat(file.fileno()).st_size
                if not self._continues(file, size):
                    self._reset()
                file.seek(self.offset)
                rest = b""
                while block := file.read(_BLOCK):
                    content = rest + block
                    cut = content.rfind(b"\n") + 1
                    self._add(content[:cut])
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
        if content:
            self.answers.clear()
        self.offset += len(content)
        self._anchor = (self._anchor + content[-_ANCHOR:])[-_ANCHOR:]

    def _add(self, content: bytes) -> None:
        steps, evaluations = list[dict[str, Any]](), list[dict[str, Any]]()
        for line in _parse_lines(content):
            step = None if line is None else line.get("step")
            if line is None or isinstance(step, bool) or not isinstance(step, int) or abs(step) >= 2**53:
                self.damaged += 1
            elif line.keys().isdisjoint(("loss", "lr", "step_s")):
                evaluations.append(line)
            else:
                steps.append(line)
        self.steps.add(steps)
        self.evaluations.add(evaluations)
        self.evaluation_lines += evaluations
        if steps:
            self.first_step = self.first_step or steps[0]
            self.last_step = steps[-1]


def _parse_lines(content: bytes) -> list[dict[str, Any] | None]:
    """The objects of complete lines; None for a damaged one. Intact lines are parsed as one array, in half the time."""
    count = content.count(b"\n")
    try:
        found = json.loads(b"[" + content.replace(b"\n", b",")[:-1] + b"]", parse_constant=_refuse)
        if len(found) == count and all(type(each) is dict for each in found):
            return list(found)
    except (ValueError, RecursionError):
        pass
    return [parse_json_line(line + b"\n") for line in content.split(b"\n")[:count]]


def _refuse(name: str) -> None:
    raise ValueError(f"{name} is not JSON")
