"""A loss curve drawn with characters, for a terminal."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from itertools import pairwise
from statistics import fmean

from whet.watch.readable import number_text

_DOTS = ((0x01, 0x02, 0x04, 0x40), (0x08, 0x10, 0x20, 0x80))
"""The bits of a braille character: two columns of four dots, from the top."""
_BLANK = 0x2800
_LEAST_WIDTH, _LEAST_HEIGHT = 24, 4


def loss_curve(points: Sequence[tuple[int, float]], width: int = 72, height: int = 14) -> str:
    """The points joined by a line, as `height` lines of `width` characters each, axes included.

    A character holds 2 × 4 dots. Where several points fall on one column of dots, their mean is drawn. Values that
    are not finite are left out.
    """
    width, height = max(width, _LEAST_WIDTH), max(height, _LEAST_HEIGHT)
    points = sorted((step, loss) for step, loss in points if math.isfinite(loss))
    if not points:
        return "no loss was measured".ljust(width)
    low, high = min(loss for _, loss in points), max(loss for _, loss in points)
    rows = height - 2
    labels = _labels(low, high, rows)
    margin = max(map(len, labels))
    columns = width - margin - 2
    canvas = _draw(_dots(points, low, high, 2 * columns, 4 * rows), columns, rows)
    lines = [f"{label:>{margin}} {'┤' if label else '│'}{row}" for label, row in zip(labels, canvas, strict=True)]
    lines.append(" " * (margin + 1) + "└" + "─" * columns)
    lines.append(_steps(points[0][0], points[-1][0], width, margin + 2))
    return "\n".join(lines)


def _labels(low: float, high: float, rows: int) -> list[str]:
    """The number beside each row: highest on top, lowest at the bottom, every third row between them."""
    labels = [""] * rows
    if _same(low, high):
        labels[rows // 2] = number_text(low)
        return labels
    gaps = max(1, (rows - 1) // 3)
    places = [round(gap * (rows - 1) / gaps) for gap in range(gaps + 1)]
    shares = [place / (rows - 1) for place in places]
    values = [high * (1 - share) + low * share for share in shares]
    for place, text in zip(places, _distinct(values), strict=True):
        labels[place] = text
    return labels


def _distinct(values: Sequence[float]) -> list[str]:
    """The values with as many digits as it takes to tell them apart, within what a margin can hold."""
    for digits in range(3, 7):
        texts = [f"{value:.{digits}g}" for value in values]
        if len(set(texts)) == len(texts):
            break
    return texts


def _dots(
    points: Sequence[tuple[int, float]], low: float, high: float, across: int, down: int
) -> list[tuple[int, int]]:
    """The (column, row) of each dot of the curve, with row 0 on top."""
    first, last = points[0][0], points[-1][0]
    by_column = defaultdict(list)
    for step, loss in points:
        column = (step - first) * (across - 1) // (last - first) if last > first else across // 2
        by_column[column].append(_share(loss, low, high))
    corners = [(column, round((1 - fmean(shares)) * (down - 1))) for column, shares in by_column.items()]
    dots = corners[:1]
    for (column, row), (next_column, next_row) in pairwise(corners):
        stretch = max(next_column - column, abs(next_row - row))
        for i in range(1, stretch + 1):
            dots.append(
                (column + round(i * (next_column - column) / stretch), row + round(i * (next_row - row) / stretch))
            )
    return dots


def _draw(dots: Sequence[tuple[int, int]], columns: int, rows: int) -> list[str]:
    cells = [[_BLANK] * columns for _ in range(rows)]
    for column, row in dots:
        cells[row // 4][column // 2] |= _DOTS[column % 2][row % 4]
    return ["".join(map(chr, row)) for row in cells]


def _steps(first: int, last: int, width: int, margin: int) -> str:
    """The line under the axis: the first and the last step at their places; only the last if they do not fit."""
    if first == last:
        return f"{' ' * margin}{f'step {last}':^{width - margin}}"[:width]
    left, right = f"step {first}", str(last)
    room = width - margin - len(left) - len(right)
    return f"{' ' * margin}{left}{' ' * room}{right}" if room > 0 else right[:width].rjust(width)


def _same(low: float, high: float) -> bool:
    return high / 2 - low / 2 == 0


def _share(value: float, low: float, high: float) -> float:
    """Where `value` lies between `low` (0) and `high` (1); by halves, because their difference may overflow."""
    return 0.5 if _same(low, high) else (value / 2 - low / 2) / (high / 2 - low / 2)
