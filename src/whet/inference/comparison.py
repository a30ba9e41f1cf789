"""Task scores with bootstrap intervals, and significance tests between two models."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from whet.core.errors import WhetError
from whet.inference.tasks.task import AnsweredExample, TaskResult

# How sure a score is: intervals and tests from the scores of single examples. Pure: numbers in, numbers out.

if TYPE_CHECKING:
    from numpy.typing import NDArray

_RESAMPLES = 5000
_MAX_CHUNK_VALUES = 2_000_000  # numbers drawn at a time, which bounds memory
SIGNIFICANCE_LEVEL = 0.05


class PairedDifference(NamedTuple):
    """What one model does better than another on the same examples."""

    mean: float
    interval: tuple[float, float]
    p: float
    """How often chance alone would make a difference as large, were there none."""
    test: str


def bootstrap_interval(scores: Sequence[float], least: float = 0.0, seed: int = 0) -> tuple[float, float]:
    """In which the mean score lies in 95 of 100 draws of as many examples from these.

    If all are right, or all wrong, every draw is alike and says nothing of the examples that were not asked: then it is
    the exact interval of n successes in n trials, with any score from `least` to 1 for what may be otherwise.
    """
    values = np.asarray(scores, dtype=np.float64)
    first = float(values[0])
    if first in (-1, 0, 1) and (values == first).all():
        otherwise = 1 - 0.025 ** (1 / len(values))
        return first + otherwise * (least - first), first + otherwise * (1 - first)
    means = _bootstrap_means(values, np.random.default_rng(seed))
    low, high = np.percentile(means, [2.5, 97.5])
    return float(low), float(high)


def paired_difference(a: Sequence[float], b: Sequence[float], graded: bool, seed: int = 0) -> PairedDifference:
    """`a` − `b`, paired by example. Scores of 0 and 1 are tested exactly (McNemar), graded ones by swapping who is who
    at random."""
    apart = np.asarray(a, dtype=np.float64) - np.asarray(b, dtype=np.float64)
    p = (
        _permutation_p_value(apart, np.random.default_rng(seed + 1))
        if graded
        else mcnemar_p_value(int((apart > 0).sum()), int((apart < 0).sum()))
    )
    return PairedDifference(
        float(apart.mean()), bootstrap_interval(apart.tolist(), -1.0, seed), p, "permutation" if graded else "mcnemar"
    )


def mcnemar_p_value(better: int, worse: int) -> float:
    """Exact and two-sided: of the examples on which two models differ, how unlikely is it that so few fall to one side
    if each is a coin toss?"""
    tosses, few = better + worse, min(better, worse)
    tail = sum(math.comb(tosses, number) for number in range(few + 1))
    return min(1.0, 2 * tail / 2**tosses)


def above_baseline(score: float, baseline: float) -> float:
    """The part of what can be gained over the baseline that is gained; below it, negative."""
    return (score - baseline) / (1 - baseline) if baseline < 1 else 0.0


def _bootstrap_means(values: NDArray[np.float64], generator: np.random.Generator) -> NDArray[np.float64]:
    means, each = [], max(1, _MAX_CHUNK_VALUES // len(values))
    for start in range(0, _RESAMPLES, each):
        chosen = generator.integers(len(values), size=(min(each, _RESAMPLES - start), len(values)))
        means.append(values[chosen].mean(axis=1))
    return np.concatenate(means)


def _permutation_p_value(apart: NDArray[np.float64], generator: np.random.Generator) -> float:
    """The part of random swaps that leave a mean difference as large as the one seen, which counts too."""
    seen, at_least, each = abs(apart.mean()), 1, max(1, _MAX_CHUNK_VALUES // len(apart))
    for start in range(0, _RESAMPLES, each):
        signs = generator.integers(2, size=(min(each, _RESAMPLES - start), len(apart))) * 2 - 1
        at_least += int((np.abs((signs * apart).mean(axis=1)) >= seen - 1e-12).sum())
    return at_least / (_RESAMPLES + 1)


# What was measured, in numbers for programs and in lines for people: scores, how sure they are, who is better.


def summarize_scores(
    scored: Sequence[TaskResult], other: Sequence[TaskResult] | None = None, label: str = "base"
) -> dict[str, Any]:
    """For each task score, baseline and interval, those of another model, and the difference with its significance;
    and the mean over tasks of what was gained over the baseline (ChatCORE's way)."""
    others = {each.task: each for each in other or ()}
    tasks = {each.task: _summarize_task(each, others.get(each.task), label) for each in scored}
    mean = {"score": _mean_above_baseline(scored)}
    if scored and all(each.task in others for each in scored):
        mean[label] = _mean_above_baseline([others[each.task] for each in scored])
    return {"tasks": tasks, "mean_above_baseline": mean}


def _summarize_task(scored: TaskResult, other: TaskResult | None, label: str) -> dict[str, Any]:
    found: dict[str, Any] = {
        "scorer": scored.scorer, "examples": len(scored.samples), "baseline": scored.baseline, **_score_with_interval(scored),
    }  # fmt: skip
    if len(scored.samples) < scored.asked_for:
        found["asked_for"] = scored.asked_for
    if other is None:
        return found
    mine, theirs = paired_scores(scored, other)
    apart = paired_difference(mine, theirs, scored.graded)
    return found | {
        label: _score_with_interval(other) | ({"examples": len(other.samples)} if len(other.samples) != len(scored.samples) else {}),
        "difference": {
            "examples": len(mine), "mean": apart.mean, "interval": list(apart.interval), "p": apart.p,
            "test": apart.test, "significant": apart.p < SIGNIFICANCE_LEVEL,
        },
    }  # fmt: skip


def _score_with_interval(scored: TaskResult) -> dict[str, Any]:
    whole = {} if scored.whole is None else {"corpus": scored.whole}
    return {"score": scored.score, "interval": list(bootstrap_interval(scored.scores)), **whole}


def _mean_above_baseline(scored: Sequence[TaskResult]) -> float:
    return sum(above_baseline(each.score, each.baseline) for each in scored) / len(scored)


def paired_scores(a: TaskResult, b: TaskResult) -> tuple[list[float], list[float]]:
    """The scores of both on the examples that both were asked; time may have ended one of them earlier."""
    theirs = {_example_key(sample): sample.score for sample in b.samples}
    pairs = [(sample.score, theirs[_example_key(sample)]) for sample in a.samples if _example_key(sample) in theirs]
    if not pairs or a.scorer != b.scorer:
        what = "have no example in common" if not pairs else f"were judged by {a.scorer} and {b.scorer}"
        raise WhetError(f"task {a.task}: the two evaluations {what}, so they cannot be compared")
    return [mine for mine, _ in pairs], [their for _, their in pairs]


def _example_key(sample: AnsweredExample) -> tuple[int, str, str]:
    return sample.number, sample.prompt, sample.expected


def results_to_json(scored: Sequence[TaskResult]) -> list[dict[str, Any]]:
    """What a file keeps, so that another model can be compared later."""
    return [
        {
            "task": each.task, "scorer": each.scorer, "asked_for": each.asked_for, "baseline": each.baseline,
            "graded": each.graded, "corpus": each.whole, "samples": [sample.as_dict() for sample in each.samples],
        }
        for each in scored
    ]  # fmt: skip


def results_from_json(record: Any, place: str) -> list[TaskResult]:
    """What `as_record` gave; a WhetError if this is something else."""
    try:
        return [
            TaskResult(
                each["task"], each["scorer"], [AnsweredExample(**sample) for sample in each["samples"]], each["asked_for"],
                each["baseline"], each["graded"], each["corpus"],
            )
            for each in record["scored"]
        ]  # fmt: skip
    except (KeyError, TypeError):
        raise WhetError(f"{place}: this is no evaluation that `whet eval` wrote") from None


def format_results(result: Mapping[str, Any]) -> list[str]:
    """The result as a person reads it."""
    found = []
    for name, value in result.items():
        if name in ("tasks", "mean_above_baseline") or name.startswith("task/"):
            continue
        found.append(f"{name}: {value:.4f}" if isinstance(value, float) else f"{name}: {value}")
    label = "against" if "against" in result else "base"
    found += [_format_task(name, task, label) for name, task in result.get("tasks", {}).items()]
    mean = result.get("mean_above_baseline")
    if mean and len(result["tasks"]) > 1:
        other = f" · {label} {mean[label]:.3f}" if label in mean else ""
        found.append(f"mean above the baselines: {mean['score']:.3f}{other}")
    return found


def _format_task(name: str, task: Mapping[str, Any], label: str) -> str:
    of = f" of {task['asked_for']}, then the time was up" if "asked_for" in task else ""
    by = f"{task['examples']} examples{of}, {task['scorer']}"
    text = f"{name}: {_format_score(task)} · baseline {100 * task['baseline']:.1f} % · {by}"
    if label not in task:
        return text
    apart = task["difference"]
    low, high = (100 * end for end in apart["interval"])
    sure = "significant" if apart["significant"] else "not significant"
    return (
        f"{text}\n  {label} {_format_score(task[label])}\n  difference {100 * apart['mean']:+.1f} [{low:+.1f}, {high:+.1f}], "
        f"p = {apart['p']:.2g}: {sure}"
    )


def _format_score(score: Mapping[str, Any]) -> str:
    low, high = (100 * end for end in score["interval"])
    return f"{100 * score['score']:.1f} % [{low:.1f}, {high:.1f}]"
