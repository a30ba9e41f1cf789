"""Charts as HTML with inline SVG: axes, smoothing, downsampling and drawing."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from itertools import groupby, pairwise

from whet.core.smoothing import ExponentialAverage
from whet.report.formatting import format_number
from whet.report.run_view import Series

# The scale of a chart: which range it shows and where its round numbers stand.


@dataclass(frozen=True, slots=True)
class Axis:
    """A range from `low` to `high` with ticks in it."""

    low: float
    high: float
    ticks: tuple[float, ...]

    def place(self, value: float) -> float:
        """Where `value` lies, from 0 at `low` to 1 at `high`."""
        span = self.high - self.low
        return (value - self.low) / span if span else 0.5

    def texts(self) -> list[str]:
        """The ticks as text, all with the same number of digits behind the point."""
        largest = max((abs(tick) for tick in self.ticks), default=0.0)
        if largest and not 1e-3 <= largest < 1e6:
            return [f"{tick:.3g}".replace("e-0", "e-").replace("e+0", "e+") for tick in self.ticks]
        apart = min((b - a for a, b in pairwise(self.ticks)), default=1.0)
        digits = min(12, max(0, math.ceil(-math.log10(apart) - 1e-9)))
        return [f"{tick:,.{digits}f}" for tick in self.ticks]


def value_axis(values: Sequence[float], ticks: int = 5) -> Axis:
    """An axis with round ends for measured values; it starts at 0 unless that would flatten the curve."""
    low, high = min(values, default=0.0), max(values, default=0.0)
    if 0 < low < 0.6 * high:
        low = 0.0
    if high - low <= 1e-9 * max(abs(low), abs(high)):
        # A constant: as much room above as below, so that the line lies in the middle.
        low, high = min(0.0, 2 * low), max(0.0, 2 * high) or (0.0 if low else 1.0)
    apart = _nice_step((high - low) / ticks)
    if apart <= 0:  # The range is so small that a part of it rounds to nothing.
        return Axis(low, high, ())
    first, last = math.floor(low / apart + 1e-9), math.ceil(high / apart - 1e-9)
    marks = tuple(apart * i for i in range(first, last + 1))
    return Axis(min(low, marks[0]), max(high, marks[-1]), marks)


def step_axis(steps: Sequence[int], ticks: int = 6) -> Axis:
    """An axis from the first to the last step, with ticks at whole steps."""
    low, high = min(steps, default=0), max(steps, default=0)
    apart = max(1, round(_nice_step((high - low) / ticks))) if high > low else 1
    marks = range(-(-low // apart) * apart, high + 1, apart)
    # The ends are what the reader looks for: they take the place of round steps that are too near.
    inner = [step for step in marks if min(step - low, high - step) >= 0.6 * apart]
    return Axis(low, high, tuple(map(float, sorted({low, *inner, high}))))


def _nice_step(rough: float) -> float:
    """The smallest of 1, 2, 5 times a power of ten that is not below `rough`."""
    power = 10.0 ** math.floor(math.log10(rough)) if rough > 0 else 0.0
    return next((power * unit for unit in (1, 2, 5) if power * unit >= rough * (1 - 1e-9)), power * 10)


# Curves made readable: a smoothed line, and fewer points where there are too many to draw.


def smoothing_beta(count: int) -> float:
    """How much to smooth `count` values: over a fifteenth of them, at most 50; more would lag behind the curve."""
    return 1 - 1 / max(1.0, min(50.0, count / 15))


def exponential_average(values: Sequence[float | None], beta: float) -> list[float | None]:
    """The exponential moving average after each value; None stays a gap."""
    average = ExponentialAverage(beta)
    return [None if value is None else average.add(value) for value in values]


def downsample(values: Sequence[float | None], limit: int) -> list[int]:
    """Indices of about `limit` values to draw: the first, the lowest, the highest and the first gap of every stretch.

    No spike and no gap is lost, as they would be by taking every n-th value.
    """
    if len(values) <= limit:
        return list(range(len(values)))
    stretch = -(-4 * len(values) // limit)
    kept: set[int] = {len(values) - 1}
    for start in range(0, len(values), stretch):
        indices = range(start, min(start + stretch, len(values)))
        known = [(value, index) for index in indices if (value := values[index]) is not None]
        gaps = [index for index in indices if values[index] is None]
        kept.update([start, *gaps[:1]])
        if known:
            kept.update((min(known)[1], max(known)[1]))
    return sorted(kept)


# Charts as HTML with inline SVG.
#
# The SVG is stretched to the width of the page, so texts would be distorted in it: they are HTML, placed in per cent.
# Dots are strokes without length and with round ends, which keep their shape for the same reason.

_VIEW_BOX = 1000


@dataclass(frozen=True)
class ChartLine:
    """One series of a chart. `look` is its CSS class; `joined` draws a line, otherwise dots."""

    name: str
    points: Series
    look: str
    joined: bool = True

    @property
    def known(self) -> list[tuple[int, float]]:
        """The points that were measured."""
        return [(step, value) for step, value in self.points if value is not None]


def render_chart(title: str, lines: Sequence[ChartLine], small: bool = False) -> str:
    """A figure with axes, a legend unless it is `small` and, for report.js, the data to read out.

    If nothing was measured, it says so.
    """
    lines = [line for line in lines if line.known]
    if not lines:
        return f'<figure class="chart"><figcaption><b>{escape(title)}</b></figcaption><p>not measured</p></figure>'
    steps = sorted({step for line in lines for step, _ in line.points})
    across = step_axis(steps, 3 if small else 6)
    up = value_axis([value for line in lines for _, value in line.known], 3 if small else 5)
    legend = "".join(f'<span class="key {line.look}">{escape(line.name)}</span>' for line in lines)
    return (
        f'<figure class="chart{" small" if small else ""}" tabindex="0">'
        f"<figcaption><b>{escape(title)}</b>{'' if small else legend}</figcaption>"
        f'<div class="plot">'
        f'<svg viewBox="0 0 {_VIEW_BOX} {_VIEW_BOX}" preserveAspectRatio="none" role="img" aria-label="{_aria_label(lines)}">'
        f"{_grid(up)}{''.join(_path(line, across, up) for line in lines)}</svg>"
        f'{_axis_labels(across, up)}<i class="cursor" hidden></i><output></output></div>'
        f'<script type="application/json">{_chart_json(lines, steps)}</script></figure>'
    )


def _path(line: ChartLine, across: Axis, up: Axis) -> str:
    strokes, dots = [], []
    for stretch in _segments(line.points):
        places = [
            f"{across.place(step) * _VIEW_BOX:.1f} {(1 - up.place(value)) * _VIEW_BOX:.1f}" for step, value in stretch
        ]
        if line.joined and len(places) > 1:
            strokes.append(f"M{'L'.join(places)}")
        else:
            dots += [f"M{place}h.01" for place in places]
    drawn = f'<path class="{line.look}" d="{"".join(strokes)}"/>' if strokes else ""
    return drawn + (f'<path class="{line.look} dot" d="{"".join(dots)}"/>' if dots else "")


def _segments(points: Series) -> Iterator[list[tuple[int, float]]]:
    """The points between gaps."""
    for missing, group in groupby(points, key=lambda point: point[1] is None):
        if not missing:
            yield [(step, value) for step, value in group if value is not None]


def _grid(up: Axis) -> str:
    heights = [f"{(1 - up.place(tick)) * _VIEW_BOX:.1f}" for tick in up.ticks]
    return f'<path class="grid" d="{"".join(f"M0 {height}H{_VIEW_BOX}" for height in heights)}"/>'


def _axis_labels(across: Axis, up: Axis) -> str:
    return "".join(
        [f'<span class="y" style="top:{(1 - up.place(t)) * 100:.2f}%">{s}</span>' for t, s in _tick_labels(up)]
        + [f'<span class="x" style="left:{across.place(t) * 100:.2f}%">{s}</span>' for t, s in _tick_labels(across)]
    )


def _tick_labels(axis: Axis) -> list[tuple[float, str]]:
    return list(zip(axis.ticks, axis.texts(), strict=True))


def _aria_label(lines: Sequence[ChartLine]) -> str:
    """What a reader who cannot see the chart is told."""
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
    # Within a script element only "<" could end it; JSON may write it as an escape.
    return json.dumps({"steps": steps, "series": series}, separators=(",", ":")).replace("<", "\\u003c")
