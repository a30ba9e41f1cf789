"""A smoothed number for the eye; files keep the raw ones."""

from __future__ import annotations

import math


class Ema:
    """An exponential average that is not drawn towards its start at zero: divided by 1 − βⁿ after n values, so that
    the first is itself."""

    def __init__(self, beta: float = 0.9) -> None:
        self._beta, self._sum, self._count = beta, 0.0, 0

    def add(self, value: float | None) -> float:
        """Take in a value, unless there is none, and give the average; NaN before there is any."""
        if value is not None and math.isfinite(value):
            self._sum = self._beta * self._sum + (1 - self._beta) * value
            self._count += 1
        return self._sum / (1 - self._beta**self._count) if self._count else math.nan
