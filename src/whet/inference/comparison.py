"""Task scores with bootstrap intervals, and significance tests between two models, as JSON and as text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from whet.core.errors import WhetError
from whet.evaluation.statistics import SIGNIFICANCE_LEVEL, bootstrap_interval, paired_difference
from whet.inference.tasks.task import AnsweredExample, TaskResult


def above_baseline(score: float, baseline: float) -> float:
    """The score rescaled so that the baseline is 0 and a perfect score is 1."""
    return (score - baseline) / (1 - baseline) if baseline < 1 else 0.0


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
    others = {_example_key(sample): sample.score for sample in b.samples if sample.score is not None}
    pairs = [
        (sample.score, others[_example_key(sample)])
        for sample in a.samples
        if sample.score is not None and _example_key(sample) in others
    ]
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
