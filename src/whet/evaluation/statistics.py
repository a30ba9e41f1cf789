"""Bootstrap intervals, and significance tests between two models on the same examples. numpy alone."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

_RESAMPLES = 5000
_MAX_CHUNK_VALUES = 2_000_000  # drawn at a time, to bound memory
SIGNIFICANCE_LEVEL = 0.05


class PairedDifference(NamedTuple):
    """The difference between two models on the same examples."""

    mean: float
    interval: tuple[float, float]
    p: float
    """The probability of a difference at least as large if the models were equally good."""
    test: str


def bootstrap_interval(scores: Sequence[float], least: float = 0.0, seed: int = 0) -> tuple[float, float]:
    """The 95 % bootstrap interval of the mean score.

    If all scores are equal to -1, 0 or 1, every resample is the same and would give an interval of width 0. Then it is
    the exact interval of n successes in n trials, with scores between `least` and 1 for the failures.
    """
    values = np.asarray(scores, dtype=np.float64)
    first = float(values[0])
    if first in (-1, 0, 1) and (values == first).all():
        failure_rate = 1 - 0.025 ** (1 / len(values))
        return first + failure_rate * (least - first), first + failure_rate * (1 - first)
    means = _bootstrap_means(values, np.random.default_rng(seed))
    low, high = np.percentile(means, [2.5, 97.5])
    return float(low), float(high)


def paired_difference(a: Sequence[float], b: Sequence[float], graded: bool) -> PairedDifference:
    """`a` − `b`, paired by example. Scores of 0 and 1 use McNemar's exact test, graded ones a permutation test."""
    differences = np.asarray(a, dtype=np.float64) - np.asarray(b, dtype=np.float64)
    p = (
        _permutation_p_value(differences, np.random.default_rng(1))
        if graded
        else mcnemar_p_value(int((differences > 0).sum()), int((differences < 0).sum()))
    )
    interval = bootstrap_interval(differences.tolist(), -1.0)
    return PairedDifference(float(differences.mean()), interval, p, "permutation" if graded else "mcnemar")


def paired_loss_difference(
    a: NDArray[np.float64], b: NDArray[np.float64], tokens: NDArray[np.integer]
) -> PairedDifference:
    """The difference of two losses per token, paired by conversation. `a`, `b`: the summed loss of each conversation's
    `tokens`. Conversations are drawn as a whole, because their tokens depend on each other."""
    differences, weights = np.asarray(a - b, dtype=np.float64), tokens.astype(np.float64)
    means = _bootstrap_means(differences, np.random.default_rng(0), weights)
    low, high = np.percentile(means, [2.5, 97.5])
    p = _permutation_p_value(differences / weights.mean(), np.random.default_rng(1))
    return PairedDifference(float(differences.sum() / weights.sum()), (float(low), float(high)), p, "permutation")


def mcnemar_p_value(better: int, worse: int) -> float:
    """Exact two-sided McNemar test: under the null hypothesis, examples that differ are coin tosses."""
    tosses = better + worse
    tail = sum(math.comb(tosses, k) for k in range(min(better, worse) + 1))
    return min(1.0, 2 * tail / 2**tosses)


def _bootstrap_means(
    values: NDArray[np.float64], generator: np.random.Generator, weights: NDArray[np.float64] | None = None
) -> NDArray[np.float64]:
    """The means of resamples; with weights, of the sum of the values ÷ that of the weights."""
    means, each = [], max(1, _MAX_CHUNK_VALUES // len(values))
    for start in range(0, _RESAMPLES, each):
        chosen = generator.integers(len(values), size=(min(each, _RESAMPLES - start), len(values)))
        means.append(
            values[chosen].mean(axis=1) if weights is None else values[chosen].sum(axis=1) / weights[chosen].sum(axis=1)
        )
    return np.concatenate(means)


def _permutation_p_value(differences: NDArray[np.float64], generator: np.random.Generator) -> float:
    """The share of random sign flips with a mean difference as large as the observed one, which is counted too."""
    observed, at_least, each = abs(differences.mean()), 1, max(1, _MAX_CHUNK_VALUES // len(differences))
    for start in range(0, _RESAMPLES, each):
        signs = generator.integers(2, size=(min(each, _RESAMPLES - start), len(differences))) * 2 - 1
        at_least += int((np.abs((signs * differences).mean(axis=1)) >= observed - 1e-12).sum())
    return at_least / (_RESAMPLES + 1)
