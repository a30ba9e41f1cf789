"""How sure a score is: intervals and tests from the scores of single examples. Pure: numbers in, numbers out."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

_DRAWS = 5000
_AT_ONCE = 2_000_000  # numbers drawn at a time, which bounds memory
SIGNIFICANT = 0.05


class Difference(NamedTuple):
    """What one model does better than another on the same examples."""

    mean: float
    interval: tuple[float, float]
    p: float
    """How often chance alone would make a difference as large, were there none."""
    test: str


def interval(scores: Sequence[float], least: float = 0.0, seed: int = 0) -> tuple[float, float]:
    """In which the mean score lies in 95 of 100 draws of as many examples from these.

    If all are right, or all wrong, every draw is alike and says nothing of the examples that were not asked: then it is
    the exact interval of n successes in n trials, with any score from `least` to 1 for what may be otherwise.
    """
    values = np.asarray(scores, dtype=np.float64)
    first = float(values[0])
    if first in (-1, 0, 1) and (values == first).all():
        otherwise = 1 - 0.025 ** (1 / len(values))
        return first + otherwise * (least - first), first + otherwise * (1 - first)
    means = _means(values, np.random.default_rng(seed))
    low, high = np.percentile(means, [2.5, 97.5])
    return float(low), float(high)


def difference(a: Sequence[float], b: Sequence[float], graded: bool, seed: int = 0) -> Difference:
    """`a` − `b`, paired by example. Scores of 0 and 1 are tested exactly (McNemar), graded ones by swapping who is who
    at random."""
    apart = np.asarray(a, dtype=np.float64) - np.asarray(b, dtype=np.float64)
    p = (
        _swapped(apart, np.random.default_rng(seed + 1))
        if graded
        else mcnemar(int((apart > 0).sum()), int((apart < 0).sum()))
    )
    return Difference(
        float(apart.mean()), interval(apart.tolist(), -1.0, seed), p, "permutation" if graded else "mcnemar"
    )


def mcnemar(better: int, worse: int) -> float:
    """Exact and two-sided: of the examples on which two models differ, how unlikely is it that so few fall to one side
    if each is a coin toss?"""
    tosses, few = better + worse, min(better, worse)
    tail = sum(math.comb(tosses, number) for number in range(few + 1))
    return min(1.0, 2 * tail / 2**tosses)


def above_baseline(score: float, baseline: float) -> float:
    """The part of what can be gained over the baseline that is gained; below it, negative."""
    return (score - baseline) / (1 - baseline) if baseline < 1 else 0.0


def _means(values: NDArray[np.float64], generator: np.random.Generator) -> NDArray[np.float64]:
    means, each = [], max(1, _AT_ONCE // len(values))
    for start in range(0, _DRAWS, each):
        chosen = generator.integers(len(values), size=(min(each, _DRAWS - start), len(values)))
        means.append(values[chosen].mean(axis=1))
    return np.concatenate(means)


def _swapped(apart: NDArray[np.float64], generator: np.random.Generator) -> float:
    """The part of random swaps that leave a mean difference as large as the one seen, which counts too."""
    seen, at_least, each = abs(apart.mean()), 1, max(1, _AT_ONCE // len(apart))
    for start in range(0, _DRAWS, each):
        signs = generator.integers(2, size=(min(each, _DRAWS - start), len(apart))) * 2 - 1
        at_least += int((np.abs((signs * apart).mean(axis=1)) >= seen - 1e-12).sum())
    return at_least / (_DRAWS + 1)
