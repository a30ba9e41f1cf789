"""Bootstrap intervals and significance tests against closed forms; summaries and result files."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest

from whet.core.errors import WhetError
from whet.evaluation.statistics import bootstrap_interval, mcnemar_p_value, paired_difference
from whet.inference.comparison import (
    above_baseline,
    format_results,
    paired_scores,
    results_from_json,
    results_to_json,
    summarize_scores,
)
from whet.inference.tasks.task import AnsweredExample, TaskResult


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


def scored(
    *points: float, graded: bool = True, scorer: str = "chrf", name: str = "t", baseline: float = 0.0
) -> TaskResult:
    right = [None if graded else value == 1 for value in points]
    samples = [AnsweredExample(name, f"p{i}", "e", "a", right[i], value, i) for i, value in enumerate(points)]
    return TaskResult(name, scorer, samples, len(points), baseline, graded)


def test_only_common_examples_are_compared() -> None:
    long, short = scored(0.5, 0.6, 0.7, 0.8), scored(0.1, 0.2)
    assert paired_scores(long, short) == ([0.5, 0.6], [0.1, 0.2])
    found = summarize_scores([long], [short])["tasks"]["t"]
    assert found["difference"]["examples"] == 2
    assert found["difference"]["mean"] == pytest.approx(0.4)
    assert found["difference"]["test"] == "permutation"
    assert (found["examples"], found["base"]["examples"]) == (4, 2)


def test_results_that_cannot_be_compared_are_an_error() -> None:
    with pytest.raises(
        WhetError, match="task t: the two evaluations cannot be compared: they used different scorers, chrf and exact"
    ):
        paired_scores(scored(0.5), scored(0.5, scorer="exact"))
    other = scored(0.5)
    other.samples[0] = AnsweredExample("t", "another question", "e", "a", None, 0.5, 0)
    with pytest.raises(WhetError, match="have no example in common"):
        paired_scores(scored(0.5), other)


def test_a_task_without_counterpart_has_no_difference() -> None:
    found = summarize_scores([scored(0.5), scored(0.5, name="u")], [scored(0.5)])
    assert "difference" in found["tasks"]["t"]
    assert "difference" not in found["tasks"]["u"]
    assert any(line.startswith("u: 50.0 %") for line in format_results(found))


def test_the_mean_is_relative_to_the_baselines() -> None:
    both = [scored(1.0, 0.0, baseline=0.25), scored(1.0, name="u", baseline=0.5)]
    other = [scored(0.5, name="more"), scored(0.5, name="u", baseline=0.5), scored(0.0, baseline=0.25)]
    means = summarize_scores(both, other)["mean_above_baseline"]
    assert means == {"score": pytest.approx((1 / 3 + 1) / 2), "base": pytest.approx((-1 / 3 + 0) / 2)}
    assert "base" not in summarize_scores(both, other[:2])["mean_above_baseline"]  # different tasks


def test_results_survive_a_round_trip_through_json() -> None:
    before = [scored(1, 0, 1, graded=False), scored(0.25, name="u")]
    kept = json.loads(json.dumps({"scored": results_to_json(before)}))
    assert results_from_json(kept, "x.json") == before
    for broken in ({}, [], {"scored": [{"task": "t"}]}, {"scored": 3}):
        with pytest.raises(WhetError, match=r"x\.json: not a result file"):
            results_from_json(broken, "x.json")
