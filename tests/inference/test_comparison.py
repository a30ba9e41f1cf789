"""Comparison of results: paired examples, graded scores, and result files."""

from __future__ import annotations

import json

import pytest

from whet.core.errors import WhetError
from whet.inference.comparison import (
    format_results,
    paired_scores,
    results_from_json,
    results_to_json,
    summarize_scores,
)
from whet.inference.tasks.task import AnsweredExample, TaskResult


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
