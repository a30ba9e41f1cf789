"""Confidence intervals and significance tests, against closed forms."""

from __future__ import annotations

import math

import numpy as np
import pytest

from whet.inference.comparison import above_baseline, bootstrap_interval, mcnemar_p_value, paired_difference


def test_a_large_sample_has_the_normal_interval() -> None:
    scores = [1.0] * 600 + [0.0] * 400
    low, high = bootstrap_interval(scores)
    width = 1.96 * math.sqrt(0.6 * 0.4 / 1000)
    assert low == pytest.approx(0.6 - width, abs=0.003)
    assert high == pytest.approx(0.6 + width, abs=0.003)
    assert bootstrap_interval(scores) == (low, high)
    assert bootstrap_interval(scores, seed=1) != (low, high)


def test_the_interval_has_its_nominal_coverage() -> None:
    generator = np.random.default_rng(3)
    drawn = (generator.random((200, 100)) < 0.7).astype(float)
    covered = [low <= 0.7 <= high for low, high in (bootstrap_interval(each.tolist()) for each in drawn)]
    assert 0.89 <= np.mean(covered) <= 0.99


@pytest.mark.parametrize("count", [1, 3, 8, 64, 1000])
def test_equal_scores_have_the_clopper_pearson_interval(count: int) -> None:
    low, high = bootstrap_interval([1.0] * count)
    assert (low**count, high) == (pytest.approx(0.025), 1)
    assert bootstrap_interval([0.0] * count) == pytest.approx((0, 1 - low))
    same = paired_difference([1.0] * count, [1.0] * count, graded=False)
    assert same.interval == pytest.approx((low - 1, 1 - low))


@pytest.mark.parametrize("count", range(1, 12))
def test_an_interval_excludes_zero_if_the_difference_is_significant(count: int) -> None:
    found = paired_difference([1.0] * count, [0.0] * count, graded=False)
    assert (found.interval[0] > 0) == (found.p < 0.05)
    assert found.interval[1] == 1


@pytest.mark.parametrize(
    ("better", "worse", "p"),
    [(0, 0, 1), (1, 0, 1), (5, 0, 2 / 32), (6, 0, 2 / 64), (8, 2, 2 * (1 + 10 + 45) / 1024), (3, 3, 1), (1000, 0, 0)],
)
def test_mcnemar_is_an_exact_binomial_test(better: int, worse: int, p: float) -> None:
    assert mcnemar_p_value(better, worse) == pytest.approx(p)
    assert mcnemar_p_value(worse, better) == pytest.approx(p)


def test_differences_are_paired() -> None:
    """A small constant difference under large noise, which an unpaired test could not detect."""
    noise = np.random.default_rng(0).random(200) * 0.9
    found = paired_difference((noise + 0.01).tolist(), noise.tolist(), graded=True)
    assert found.mean == pytest.approx(0.01)
    assert found.interval == pytest.approx((0.01, 0.01))
    assert found.p < 0.001
    assert paired_difference(noise.tolist(), noise[::-1].tolist(), graded=True).p > 0.05


def test_binary_scores_use_mcnemar() -> None:
    a, b = [1.0] * 8 + [0.0] * 2 + [1.0] * 90, [0.0] * 8 + [1.0] * 2 + [1.0] * 90
    found = paired_difference(a, b, graded=False)
    assert (found.mean, found.test) == (pytest.approx(0.06), "mcnemar")
    assert found.p == pytest.approx(112 / 1024)
    assert found.interval[0] < 0.06 < found.interval[1]


def test_equal_scores_are_not_significant() -> None:
    assert paired_difference([0.0, 0.0], [0.0, 0.0], graded=False).p == 1
    assert paired_difference([0.3, 0.4], [0.3, 0.4], graded=True).p == 1


def test_the_baseline_is_0_and_a_perfect_score_is_1() -> None:
    assert above_baseline(0.25, 0.25) == 0
    assert above_baseline(1, 0.25) == 1
    assert above_baseline(0.1, 0.25) == pytest.approx(-0.2)
    assert above_baseline(1, 1) == 0
