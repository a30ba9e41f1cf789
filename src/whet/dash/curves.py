"""metrics.jsonl as curves for the page: which charts there are, and about a thousand points of each line.

Points are chosen so that every spike stays (`whet.report.charts.downsample`); averages are of all values.
"""

from __future__ import annotations

import json
import os
import threading
import time
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from whet.core.json_lines import parse_json_line
from whet.report.charts import downsample, smooth
from whet.report.formatting import finite_number

AxisName = Literal["step", "tokens", "time"]


@dataclass(frozen=True, slots=True)
class Chart:
    """A chart with lines of the steps, and dots of the evaluations."""

    id: str
    title: str
    steps: tuple[str, ...]
    evaluations: tuple[str, ...] = ()
    """Keys, or the beginnings of keys, with a slash at the end."""
    unit: str = ""
    exact: bool = False
    """Values without noise, which an average would falsify."""


CHARTS = (
    Chart("loss", "loss", ("loss",), ("val_loss", "val_loss/")),
    Chart("scores", "scores of tasks", (), ("task/",), "share"),
    Chart("accuracy", "token accuracy", ("accuracy",), ("val_accuracy",), "share"),
    Chart("bpb", "bits per byte", (), ("val_bpb",)),
    Chart("grad_norm", "gradient norm", ("grad_norm",)),
    Chart("lr", "learning rate", ("lr",), exact=True),
    Chart("tokens_per_s", "tokens per second", ("tokens_per_s",)),
    Chart("mfu", "model FLOPs utilization", ("mfu",), (), "share"),
    Chart("peak_gib", "peak memory", ("peak_gib",), (), "GiB", exact=True),
    Chart("step_s", "time of a step", ("step_s",), (), "s"),
    Chart("data_s", "waiting for data", ("data_s",), (), "s"),
    Chart("expert_load_max", "load of the busiest expert", ("expert_load_max",), (), "× mean"),
    Chart("experts_idle", "experts without a token", ("experts_idle",)),
    Chart("router_aux_loss", "router auxiliary loss", ("router_aux_loss",)),
)


def names_of_series(chart: Chart, file: MetricsFile) -> tuple[list[str], list[str]]:
    """The keys of a chart that the run has: (of steps, of evaluations)."""
    evaluated = file.evaluations.keys
    found = [
        key for wanted in chart.evaluations for key in evaluated
        if key == wanted or (wanted.endswith("/") and key.startswith(wanted))
    ]  # fmt: skip
    return [key for key in chart.steps if key in file.steps.keys], found


def read_curves(
    file: MetricsFile, axis: AxisName, low: float | None, high: float | None, points: int, smoothing: float
) -> list[dict[str, Any]]:
    """The charts of a run between `low` and `high` on an axis, with about `points` points a line."""
    charts = []
    of_steps = axis_values(file, file.steps, axis)
    of_evaluations = axis_values(file, file.evaluations, axis)
    for chart in CHARTS:
        stepped, evaluated = names_of_series(chart, file)
        beta = 0.0 if chart.exact else smoothing
        series = [_series(key, "step", of_steps, file.steps, low, high, points, beta) for key in stepped] + [
            _series(key, "evaluation", of_evaluations, file.evaluations, low, high, points, 0.0) for key in evaluated
        ]
        series = [each for each in series if each["x"]]
        if series:
            charts.append({"id": chart.id, "title": chart.title, "unit": chart.unit, "series": series})
    return charts


def axis_values(file: MetricsFile, table: MetricsTable, axis: AxisName) -> NDArray[np.float64]:
    """Where the rows of a table are. Evaluations have the tokens of the step that they follow; time is in hours since
    the first line."""
    steps = table.column("step")
    if axis == "step":
        return steps
    if axis == "time":
        times = table.column("time")
        known = np.concatenate([file.steps.column("time")[:1], file.evaluations.column("time")[:1]])
        known = known[np.isfinite(known)]
        start = float(known.min()) if len(known) else 0.0
        return (times - start) / 3600
    if table is file.steps:
        return table.column("tokens")
    known_steps, tokens = file.steps.column("step"), file.steps.column("tokens")
    if not len(known_steps):
        return np.zeros(len(steps))
    return np.interp(steps, np.concatenate([known_steps[:1] - 1, known_steps]), np.concatenate([[0.0], tokens]))


def _series(
    key: str, kind: str, places: NDArray[np.float64], table: MetricsTable, low: float | None, high: float | None,
    points: int, smoothing: float,
) -> dict[str, Any]:  # fmt: skip
    values, steps = table.column(key), table.column("step")
    averages = smooth(values, smoothing) if smoothing > 0 and len(values) > 1 else None
    inside = np.isfinite(places)
    if low is not None:
        inside &= places >= low
    if high is not None:
        inside &= places <= high
    chosen = np.flatnonzero(inside)
    if kind == "evaluation":
        chosen = chosen[np.isfinite(values[chosen])]
    kept = chosen[downsample(values[chosen], points)] if len(chosen) else chosen
    return {
        "key": key, "kind": kind, "x": _json_values(places[kept], 9), "y": _json_values(values[kept]),
        "step": [int(step) for step in steps[kept]],
        **({"smooth": _json_values(averages[kept])} if averages is not None else {}),
    }  # fmt: skip


def _json_values(values: NDArray[np.float64], digits: int = 6) -> list[float | None]:
    """For JSON: short, and null for what is not a number."""
    return [None if value != value else float(f"{value:.{digits}g}") for value in values.tolist()]


def new_lines(file: MetricsFile, since: int) -> tuple[list[dict[str, float | None]], int]:
    """The rows of steps after the first `since` as objects, for charts that grow."""
    keys = ["step", "time", "tokens", *dict.fromkeys(key for chart in CHARTS for key in chart.steps)]
    keys = [key for key in keys if key in file.steps.keys]
    columns = {key: _json_values(file.steps.column(key)[since:], 9) for key in keys}
    count = file.steps.rows - since
    return [{key: columns[key][row] for key in keys} for row in range(count)], file.steps.rows


# metrics.jsonl as columns of numbers, read as it grows: a line is parsed once, whoever looks at the run.

_BLOCK = 2**22
_ANCHOR = 1024
_MAX_COLUMNS = 200
_NAN = float("nan")


def _as_number(value: Any) -> float:
    if type(value) is float and -1e100 < value < 1e100:
        return value
    number = finite_number(value)
    return _NAN if number is None else number


class MetricsTable:
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
        self.steps, self.evaluations = MetricsTable(), MetricsTable()
        self.evaluation_lines: list[dict[str, Any]] = []
        self.first_step: dict[str, Any] = {}
        self.last_step: dict[str, Any] = {}
        self.damaged = 0
        """Lines that cannot be read."""
        self.answers: dict[tuple[Any, ...], Any] = {}
        """What was made of the content so far, by request: several pages request the same."""
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
