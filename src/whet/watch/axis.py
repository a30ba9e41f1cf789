"""The scale of a chart: which range it shows and where its round numbers stand."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise


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
    apart = _round_step((high - low) / ticks)
    if apart <= 0:  # The range is so small that a part of it rounds to nothing.
        return Axis(low, high, ())
    first, last = math.floor(low / apart + 1e-9), math.ceil(high / apart - 1e-9)
    marks = tuple(apart * i for i in range(first, last + 1))
    return Axis(min(low, marks[0]), max(high, marks[-1]), marks)


def step_axis(steps: Sequence[int], ticks: int = 6) -> Axis:
    """An axis from the first to the last step, with ticks at whole steps."""
    low, high = min(steps, default=0), max(steps, default=0)
    apart = max(1, round(_round_step((high - low) / ticks))) if high > low else 1
    marks = range(-(-low // apart) * apart, high + 1, apart)
    # The ends are what the reader looks for: they take the place of round steps that are too near.
    inner = [step for step in marks if min(step - low, high - step) >= 0.6 * apart]
    return Axis(low, high, tuple(map(float, sorted({low, *inner, high}))))


def _round_step(rough: float) -> float:
    """The smallest of 1, 2, 5 times a power of ten that is not below `rough`."""
    power = 10.0 ** math.floor(math.log10(rough)) if rough > 0 else 0.0
    return next((power * unit for unit in (1, 2, 5) if power * unit >= rough * (1 - 1e-9)), power * 10)
