"""Task scores with bootstrap intervals, and significance tests between two models."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from whet.core.errors import WhetError
from whet.inference.tasks.task import AnsweredExample, TaskResult

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


def paired_difference(a: Sequence[float], b: Sequence[float], graded: bool, seed: int = 0) -> PairedDifference:
    """`a` − `b`, paired by example. Scores of 0 and 1 use McNemar's exact test, graded ones a permutation test."""
    differences = np.asarray(a, dtype=np.float64) - np.asarray(b, dtype=np.float64)
    p = (
        _permutation_p_value(differences, np.random.default_rng(seed + 1))
        if graded
        else mcnemar_p_value(int((differences > 0).sum()), int((differences < 0).sum()))
    )
    interval = bootstrap_interval(differences.tolist(), -1.0, seed)
    return PairedDifference(float(differences.mean()), interval, p, "permutation" if graded else "mcnemar")


def mcnemar_p_value(better: int, worse: int) -> float:
    """Exact two-sided McNemar test: under the null hypothesis, examples that differ are coin tosses."""
    tosses = better + worse
    tail = sum(math.comb(tosses, k) for k in range(min(better, worse) + 1))
    return min(1.0, 2 * tail / 2**tosses)


def above_baseline(score: float, baseline: float) -> float:
    """The score rescaled so that the baseline is 0 and a perfect score is 1."""
    return (score - baseline) / (1 - baseline) if baseline < 1 else 0.0


def _bootstrap_means(values: NDArray[np.float64], generator: np.random.Generator) -> NDArray[np.float64]:
    means, each = [], max(1, _MAX_CHUNK_VALUES // len(values))
    for start in range(0, _RESAMPLES, each):
        chosen = generator.integers(len(values), size=(min(each, _RESAMPLES - start), len(values)))
        means.append(values[chosen].mean(axis=1))
    return np.concatenate(means)


def _permutation_p_value(differences: NDArray[np.float64], generator: np.random.Generator) -> float:
    """The share of random sign flips with a mean difference as large as the observed one, which is counted too."""
    observed, at_least, each = abs(differences.mean()), 1, max(1, _MAX_CHUNK_VALUES // len(differences))
    for start in range(0, _RESAMPLES, each):
        signs = generator.integers(2, size=(min(each, _RESAMPLES - start), len(differences))) * 2 - 1
        at_least += int((np.abs((signs * differences).mean(axis=1)) >= observed - 1e-12).sum())
    return at_least / (_RESAMPLES + 1)


# The results of `whet eval` as JSON and as text.


def summarize_scores(
    results: Sequence[TaskResult], other: Sequence[TaskResult] | None = None, label: str = "base"
) -> dict[str, Any]:
    """For each task the score, baseline and interval, those of another model, and the difference with its significance;
    also the mean over tasks of the score above the baseline, as nanochat's ChatCORE. `label`: base or against."""
    others = {each.task: each for each in other or ()}
    tasks = {each.task: _summarize_task(each, others.get(each.task), label) for each in results}
    mean = {"score": _mean_above_baseline(results)}
    if results and all(each.task in others for each in results):
        mean[label] = _mean_above_baseline([others[each.task] for each in results])
    return {"tasks": tasks, "mean_above_baseline": mean}


def _summarize_task(result: TaskResult, other: TaskResult | None, label: str) -> dict[str, Any]:
    summary: dict[str, Any] = {
        "scorer": result.scorer, "examples": len(result.samples), "baseline": result.baseline,
        **_score_with_interval(result),
    }  # fmt: skip
    if len(result.samples) < result.requested:
        summary["asked_for"] = result.requested
    if other is None:
        return summary
    own_scores, other_scores = paired_scores(result, other)
    difference = paired_difference(own_scores, other_scores, result.graded)
    summary[label] = _score_with_interval(other)
    if len(other.samples) != len(result.samples):
        summary[label]["examples"] = len(other.samples)
    summary["difference"] = {
        "examples": len(own_scores), "mean": difference.mean, "interval": list(difference.interval), "p": difference.p,
        "test": difference.test, "significant": difference.p < SIGNIFICANCE_LEVEL,
    }  # fmt: skip
    return summary


def _score_with_interval(result: TaskResult) -> dict[str, Any]:
    corpus = {} if result.corpus_score is None else {"corpus": result.corpus_score}
    return {"score": result.score, "interval": list(bootstrap_interval(result.scores)), **corpus}


def _mean_above_baseline(results: Sequence[TaskResult]) -> float:
    return sum(above_baseline(each.score, each.baseline) for each in results) / len(results)


def paired_scores(a: TaskResult, b: TaskResult) -> tuple[list[float], list[float]]:
    """The scores of both on the examples that both answered; a time limit may have ended one earlier."""
    others = {_example_key(sample): sample.score for sample in b.samples}
    pairs = [(sample.score, others[_example_key(sample)]) for sample in a.samples if _example_key(sample) in others]
    if not pairs or a.scorer != b.scorer:
        reason = "have no example in common" if not pairs else f"used different scorers, {a.scorer} and {b.scorer}"
        raise WhetError(f"task {a.task}: the two evaluations cannot be compared: they {reason}")
    return [score for score, _ in pairs], [score for _, score in pairs]


def _example_key(sample: AnsweredExample) -> tuple[int, str, str]:
    return sample.number, sample.prompt, sample.expected


def results_to_json(results: Sequence[TaskResult]) -> list[dict[str, Any]]:
    """The results with all answers, for the file that --against reads."""
    return [
        {
            "task": each.task, "scorer": each.scorer, "asked_for": each.requested, "baseline": each.baseline,
            "graded": each.graded, "corpus": each.corpus_score,
            "samples": [sample.as_dict() for sample in each.samples],
        }
        for each in results
    ]  # fmt: skip


def results_from_json(record: Any, place: str) -> list[TaskResult]:
    """The inverse of `results_to_json`; a WhetError for a file of another kind."""
    try:
        return [
            TaskResult(
                each["task"], each["scorer"], [AnsweredExample(**sample) for sample in each["samples"]],
                each["asked_for"], each["baseline"], each["graded"], each["corpus"],
            )
            for each in record["scored"]
        ]  # fmt: skip
    except (KeyError, TypeError):
        raise WhetError(f"{place}: not a result file of `whet eval`") from None


def format_results(result: Mapping[str, Any]) -> list[str]:
    """The result as lines of text."""
    lines = []
    for name, value in result.items():
        if name in ("tasks", "mean_above_baseline") or name.startswith("task/"):
            continue
        lines.append(f"{name}: {value:.4f}" if isinstance(value, float) else f"{name}: {value}")
    label = "against" if "against" in result else "base"
    lines += [_format_task(name, task, label) for name, task in result.get("tasks", {}).items()]
    mean = result.get("mean_above_baseline")
    if mean and len(result["tasks"]) > 1:
        other = f" · {label} {mean[label]:.3f}" if label in mean else ""
        lines.append(f"mean above baseline: {mean['score']:.3f}{other}")
    return lines


def _format_task(name: str, task: Mapping[str, Any], label: str) -> str:
    of = f" of {task['asked_for']} (time limit)" if "asked_for" in task else ""
    examples = f"{task['examples']}{of} examples, {task['scorer']}"
    text = f"{name}: {_format_score(task)} · baseline {100 * task['baseline']:.1f} % · {examples}"
    if label not in task:
        return text
    difference = task["difference"]
    low, high = (100 * end for end in difference["interval"])
    significance = "significant" if difference["significant"] else "not significant"
    return (
        f"{text}\n  {label} {_format_score(task[label])}\n"
        f"  difference {100 * difference['mean']:+.1f} [{low:+.1f}, {high:+.1f}], "
        f"p = {difference['p']:.2g}: {significance}"
    )


def _format_score(score: Mapping[str, Any]) -> str:
    low, high = (100 * end for end in score["interval"])
    return f"{100 * score['score']:.1f} % [{low:.1f}, {high:.1f}]"
