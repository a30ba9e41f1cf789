"""Curves made readable: a smoothed line, and fewer points where there are too many to draw."""

from __future__ import annotations

from collections.abc import Sequence


def fitting_beta(count: int) -> float:
    """How much to smooth `count` values: over a fifteenth of them, at most 50; more would lag behind the curve."""
    return 1 - 1 / max(1.0, min(50.0, count / 15))


def smoothed(values: Sequence[float | None], beta: float) -> list[float | None]:
    """An exponential moving average that is unbiased from the first value on; None stays a gap.

    The plain average starts at 0, so after n values only a share 1 - beta**n of it is data. Dividing by that share
    makes the first output the first value. n counts the measured values alone: a gap adds no data.
    """
    average, empty = 0.0, 1.0
    result: list[float | None] = []
    for value in values:
        if value is None:
            result.append(None)
            continue
        average = beta * average + (1 - beta) * value
        empty *= beta
        result.append(average / (1 - empty))
    return result


def thinned(values: Sequence[float | None], limit: int) -> list[int]:
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
