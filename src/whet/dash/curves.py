"""The curves of a run for the page: which charts there are, and about a thousand points of each line.

Points are chosen so that every spike stays (`whet.report.charts.downsample`); averages are of all values.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from whet.dash.metrics_file import MetricsFile, Table
from whet.report.charts import downsample, smooth

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


def axis_values(file: MetricsFile, table: Table, axis: AxisName) -> NDArray[np.float64]:
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
    key: str, kind: str, places: NDArray[np.float64], table: Table, low: float | None, high: float | None,
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
