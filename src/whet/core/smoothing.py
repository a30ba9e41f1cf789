"""The exponential moving average of the progress line and the report."""

from __future__ import annotations

import math


class ExponentialAverage:
    """An exponential moving average, unbiased from the first value on.

    The plain average starts at 0, so after n values only a share 1 − βⁿ of it is data. Dividing by that share makes
    the first output the first value. A missing or non-finite value adds no data and does not count.
    """

    def __init__(self, beta: float = 0.9) -> None:
        self._beta, self._sum, self._count = beta, 0.0, 0

    def add(self, value: float | None) -> float:
        """Add a value and return the average; NaN before the first finite value."""
        if value is not None and math.isfinite(value):
            self._sum = self._beta * self._sum + (1 - self._beta) * value
            self._count += 1
        return self._sum / (1 - self._beta**self._count) if self._count else math.nan
