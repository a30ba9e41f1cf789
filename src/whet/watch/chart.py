"""Charts as HTML with inline SVG.

The SVG is stretched to the width of the page, so texts would be distorted in it: they are HTML, placed in per cent.
Dots are strokes without length and with round ends, which keep their shape for the same reason.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from itertools import groupby

from whet.watch.axis import Axis, step_axis, value_axis
from whet.watch.readable import number_text
from whet.watch.run import Series

_SIZE = 1000


@dataclass(frozen=True)
class Line:
    """One series of a chart. `look` is its CSS class; `joined` draws a line, otherwise dots."""

    name: str
    points: Series
    look: str
    joined: bool = True

    @property
    def known(self) -> list[tuple[int, float]]:
        """The points that were measured."""
        return [(step, value) for step, value in self.points if value is not None]


def chart(title: str, lines: Sequence[Line], small: bool = False) -> str:
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
        f'<svg viewBox="0 0 {_SIZE} {_SIZE}" preserveAspectRatio="none" role="img" aria-label="{_in_words(lines)}">'
        f"{_grid(up)}{''.join(_path(line, across, up) for line in lines)}</svg>"
        f'{_labels(across, up)}<i class="cursor" hidden></i><output></output></div>'
        f'<script type="application/json">{_data(lines, steps)}</script></figure>'
    )


def _path(line: Line, across: Axis, up: Axis) -> str:
    strokes, dots = [], []
    for stretch in _stretches(line.points):
        places = [f"{across.place(step) * _SIZE:.1f} {(1 - up.place(value)) * _SIZE:.1f}" for step, value in stretch]
        if line.joined and len(places) > 1:
            strokes.append(f"M{'L'.join(places)}")
        else:
            dots += [f"M{place}h.01" for place in places]
    drawn = f'<path class="{line.look}" d="{"".join(strokes)}"/>' if strokes else ""
    return drawn + (f'<path class="{line.look} dot" d="{"".join(dots)}"/>' if dots else "")


def _stretches(points: Series) -> Iterator[list[tuple[int, float]]]:
    """The points between gaps."""
    for missing, group in groupby(points, key=lambda point: point[1] is None):
        if not missing:
            yield [(step, value) for step, value in group if value is not None]


def _grid(up: Axis) -> str:
    heights = [f"{(1 - up.place(tick)) * _SIZE:.1f}" for tick in up.ticks]
    return f'<path class="grid" d="{"".join(f"M0 {height}H{_SIZE}" for height in heights)}"/>'


def _labels(across: Axis, up: Axis) -> str:
    return "".join(
        [f'<span class="y" style="top:{(1 - up.place(t)) * 100:.2f}%">{s}</span>' for t, s in _named(up)]
        + [f'<span class="x" style="left:{across.place(t) * 100:.2f}%">{s}</span>' for t, s in _named(across)]
    )


def _named(axis: Axis) -> list[tuple[float, str]]:
    return list(zip(axis.ticks, axis.texts(), strict=True))


def _in_words(lines: Sequence[Line]) -> str:
    """What a reader who cannot see the chart is told."""
    texts = []
    for line in lines:
        (first, start), (last, end) = (line.known[0], line.known[-1])
        texts.append(f"{line.name}: {number_text(start)} at step {first}, {number_text(end)} at step {last}")
    return escape("; ".join(texts))


def _data(lines: Sequence[Line], steps: Sequence[int]) -> str:
    series = []
    for line in lines:
        values = dict(line.points)
        series.append({"name": line.name, "values": [values.get(step) for step in steps]})
    # Within a script element only "<" could end it; JSON may write it as an escape.
    return json.dumps({"steps": steps, "series": series}, separators=(",", ":")).replace("<", "\\u003c")
