"""Charts as HTML with inline SVG: axes, smoothing, downsampling and drawing.

The SVG is stretched to the width of the page, which would distort text, so labels are HTML, positioned in percent. Dots
are strokes of zero length with round caps, which keep their shape.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from itertools import groupby, pairwise

import numpy as np
from numpy.typing import NDArray

from whet.core.display import escape_controls
from whet.report.formatting import format_number
from whet.report.run_view import Series

_BLOCK = 128


@dataclass(frozen=True, slots=True)
class Axis:
    """A range from `low` to `high` with ticks."""

    low: float
    high: float
    ticks: tuple[float, ...]

    def place(self, value: float) -> float:
        """The position of `value`: 0 at `low`, 1 at `high`."""
        span = self.high - self.low
        return (value - self.low) / span if span else 0.5

    def texts(self) -> list[str]:
        """The ticks as text, with the same number of decimals."""
        largest = max((abs(tick) for tick in self.ticks), default=0.0)
        if largest and not 1e-3 <= largest < 1e6:
            return [f"{tick:.3g}".replace("e-0", "e-").replace("e+0", "e+") for tick in self.ticks]
        spacing = min((b - a for a, b in pairwise(self.ticks)), default=1.0)
        digits = min(12, max(0, math.ceil(-math.log10(spacing) - 1e-9)))
        return [f"{tick:,.{digits}f}" for tick in self.ticks]


def value_axis(values: Sequence[float], ticks: int = 5) -> Axis:
    """An axis with round ends; it starts at 0 unless that would flatten the curve."""
    low, high = min(values, default=0.0), max(values, default=0.0)
    if 0 < low < 0.6 * high:
        low = 0.0
    if high - low <= 1e-9 * max(abs(low), abs(high)):
        # a constant: the line is in the middle
        low, high = min(0.0, 2 * low), max(0.0, 2 * high) or (0.0 if low else 1.0)
    spacing = _nice_step((high - low) / ticks)
    if spacing <= 0:  # the range is too small for floating point
        return Axis(low, high, ())
    first, last = math.floor(low / spacing + 1e-9), math.ceil(high / spacing - 1e-9)
    positions = tuple(spacing * i for i in range(first, last + 1))
    return Axis(min(low, positions[0]), max(high, positions[-1]), positions)


def step_axis(steps: Sequence[int], ticks: int = 6) -> Axis:
    """An axis from the first to the last step, with ticks at whole steps."""
    low, high = min(steps, default=0), max(steps, default=0)
    spacing = max(1, round(_nice_step((high - low) / ticks))) if high > low else 1
    round_steps = range(-(-low // spacing) * spacing, high + 1, spacing)
    # the first and last step replace round ticks that are too close to them
    inner = [step for step in round_steps if min(step - low, high - step) >= 0.6 * spacing]
    return Axis(low, high, tuple(map(float, sorted({low, *inner, high}))))


def _nice_step(rough: float) -> float:
    """The smallest 1, 2 or 5 times a power of ten that is at least `rough`."""
    power = 10.0 ** math.floor(math.log10(rough)) if rough > 0 else 0.0
    return next((power * unit for unit in (1, 2, 5) if power * unit >= rough * (1 - 1e-9)), power * 10)


def smoothing_beta(count: int) -> float:
    """The smoothing factor for `count` values: a twentieth of them to either side, at most 50."""
    return 1 - 1 / max(1.0, min(50.0, count / 20))


def smooth(values: Sequence[float | None] | NDArray[np.float64], beta: float) -> NDArray[np.float64]:
    """The mean of the values around each, weighted by `beta` to the power of their distance; near the start, of as many
    after it as there are before. A moving average of the values before alone would lag behind, and a falling loss look
    higher than it is. None and NaN are gaps, as NaN."""
    found = np.asarray(values, dtype=np.float64)
    known = np.flatnonzero(np.isfinite(found))
    result = np.full(len(found), np.nan)
    result[known] = each = found[known]
    if beta and len(known):
        both = np.stack([each, np.ones(len(each))])  # their sums, and those of their weights
        before, after = (np.stack([_decaying_sums(row, beta) for row in rows]) for rows in (both, both[:, ::-1]))
        after = after[:, ::-1].copy()
        near = np.arange(len(each) // 2)  # more would be after these than before
        beyond = after[:, 2 * near + 1]
        after[:, near] -= beta ** (near + 1.0) * beyond
        sums, weights = before + after - both
        result[known] = sums / weights
    return result


def _decaying_sums(values: NDArray[np.float64], beta: float) -> NDArray[np.float64]:
    """The sum of all values up to each, weighted by `beta` to the power of their age. In blocks: a million values take
    50 ms."""
    blocks = np.zeros((-(-len(values) // _BLOCK), _BLOCK))
    blocks.ravel()[: len(values)] = values
    places = np.arange(_BLOCK)
    blocks = blocks @ np.triu(beta ** np.maximum(places - places[:, None], 0))
    decay, carried = beta ** (places + 1), 0.0
    for block in blocks:
        block += carried * decay
        carried = float(block[-1])
    return blocks.ravel()[: len(values)]


def downsample(values: Sequence[float | None] | NDArray[np.float64], limit: int) -> list[int]:
    """Indices of about `limit` values to draw: the first, lowest and highest value and the first gap of every bucket.
    NaN is a gap, too.

    Unlike taking every n-th value, this keeps spikes and gaps. A million values take 20 ms.
    """
    if len(values) <= limit:
        return list(range(len(values)))
    found = np.asarray(values, dtype=np.float64)  # None becomes NaN
    bucket = -(-4 * len(found) // limit)
    rows = -(-len(found) // bucket)
    padded = np.full(rows * bucket, np.nan)
    padded[: len(found)] = found
    table = padded.reshape(rows, bucket)
    starts, is_gap = np.arange(rows) * bucket, np.isnan(table)
    lowest = np.where(is_gap, np.inf, table).argmin(axis=1) + starts
    highest = np.where(is_gap, -np.inf, table).argmax(axis=1) + starts
    first_gap = (is_gap.argmax(axis=1) + starts)[is_gap.any(axis=1)]
    kept = np.unique(np.concatenate([starts, lowest, highest, first_gap, [len(found) - 1]]))
    return kept[kept < len(found)].tolist()


_VIEW_BOX = 1000


@dataclass(frozen=True)
class ChartLine:
    """A series of a chart, drawn as a line if `joined`, else as dots."""

    name: str
    points: Series
    css_class: str
    joined: bool = True

    @property
    def known(self) -> list[tuple[int, float]]:
        """The points that have a value."""
        return [(step, value) for step, value in self.points if value is not None]


def render_chart(title: str, lines: Sequence[ChartLine], small: bool = False) -> str:
    """A figure with axes, a legend unless it is `small`, and the data as JSON for report.js."""
    lines, caption = [line for line in lines if line.known], escape(escape_controls(title))
    if not lines:
        return f'<figure class="chart"><figcaption><b>{caption}</b></figcaption><p>not measured</p></figure>'
    steps = sorted({step for line in lines for step, _ in line.points})
    x_axis = step_axis(steps, 3 if small else 6)
    y_axis = value_axis([value for line in lines for _, value in line.known], 3 if small else 5)
    legend = "".join(f'<span class="key {line.css_class}">{escape(line.name)}</span>' for line in lines)
    return (
        f'<figure class="chart{" small" if small else ""}" tabindex="0">'
        f"<figcaption><b>{caption}</b>{'' if small else legend}</figcaption>"
        f'<div class="plot">'
        f'<svg viewBox="0 0 {_VIEW_BOX} {_VIEW_BOX}" preserveAspectRatio="none" role="img" '
        f'aria-label="{_aria_label(lines)}">'
        f"{_grid(y_axis)}{''.join(_path(line, x_axis, y_axis) for line in lines)}</svg>"
        f'{_axis_labels(x_axis, y_axis)}<i class="cursor" hidden></i><output></output></div>'
        f'<script type="application/json">{_chart_json(lines, steps)}</script></figure>'
    )


def _path(line: ChartLine, x_axis: Axis, y_axis: Axis) -> str:
    strokes, dots = [], []
    for stretch in _segments(line.points):
        places = [
            f"{x_axis.place(step) * _VIEW_BOX:.1f} {(1 - y_axis.place(value)) * _VIEW_BOX:.1f}"
            for step, value in stretch
        ]
        if line.joined and len(places) > 1:
            strokes.append(f"M{'L'.join(places)}")
        else:
            dots += [f"M{place}h.01" for place in places]
    drawn = f'<path class="{line.css_class}" d="{"".join(strokes)}"/>' if strokes else ""
    return drawn + (f'<path class="{line.css_class} dot" d="{"".join(dots)}"/>' if dots else "")


def _segments(points: Series) -> Iterator[list[tuple[int, float]]]:
    """The points between gaps."""
    for missing, group in groupby(points, key=lambda point: point[1] is None):
        if not missing:
            yield [(step, value) for step, value in group if value is not None]


def _grid(y_axis: Axis) -> str:
    heights = [f"{(1 - y_axis.place(tick)) * _VIEW_BOX:.1f}" for tick in y_axis.ticks]
    return f'<path class="grid" d="{"".join(f"M0 {height}H{_VIEW_BOX}" for height in heights)}"/>'


def _axis_labels(x_axis: Axis, y_axis: Axis) -> str:
    return "".join(
        [f'<span class="y" style="top:{(1 - y_axis.place(t)) * 100:.2f}%">{s}</span>' for t, s in _tick_labels(y_axis)]
        + [f'<span class="x" style="left:{x_axis.place(t) * 100:.2f}%">{s}</span>' for t, s in _tick_labels(x_axis)]
    )


def _tick_labels(axis: Axis) -> list[tuple[float, str]]:
    return list(zip(axis.ticks, axis.texts(), strict=True))


def _aria_label(lines: Sequence[ChartLine]) -> str:
    """The text of the chart for screen readers."""
    texts = []
    for line in lines:
        (first, start), (last, end) = (line.known[0], line.known[-1])
        texts.append(f"{line.name}: {format_number(start)} at step {first}, {format_number(end)} at step {last}")
    return escape("; ".join(texts))


def _chart_json(lines: Sequence[ChartLine], steps: Sequence[int]) -> str:
    series = []
    for line in lines:
        values = dict(line.points)
        series.append({"name": line.name, "values": [values.get(step) for step in steps]})
    # "<" could end the script element; JSON allows an escape
    return json.dumps({"steps": steps, "series": series}, separators=(",", ":")).replace("<", "\\u003c")
