"""What was measured, in numbers for programs and in lines for people: scores, how sure they are, who is better."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from whet.core.errors import WhetError
from whet.infer.bootstrap import SIGNIFICANT, above_baseline, difference, interval
from whet.infer.tasks.task import Sample, Scored


def report(scored: Sequence[Scored], other: Sequence[Scored] | None = None, label: str = "base") -> dict[str, Any]:
    """For each task score, baseline and interval, those of another model, and the difference with its significance;
    and the mean over tasks of what was gained over the baseline (ChatCORE's way)."""
    others = {each.task: each for each in other or ()}
    tasks = {each.task: _task(each, others.get(each.task), label) for each in scored}
    mean = {"score": _mean(scored)}
    if scored and all(each.task in others for each in scored):
        mean[label] = _mean([others[each.task] for each in scored])
    return {"tasks": tasks, "mean_above_baseline": mean}


def _task(scored: Scored, other: Scored | None, label: str) -> dict[str, Any]:
    found: dict[str, Any] = {
        "scorer": scored.scorer, "examples": len(scored.samples), "baseline": scored.baseline, **_score(scored),
    }  # fmt: skip
    if len(scored.samples) < scored.asked_for:
        found["asked_for"] = scored.asked_for
    if other is None:
        return found
    mine, theirs = common(scored, other)
    apart = difference(mine, theirs, scored.graded)
    return found | {
        label: _score(other) | ({"examples": len(other.samples)} if len(other.samples) != len(scored.samples) else {}),
        "difference": {
            "examples": len(mine), "mean": apart.mean, "interval": list(apart.interval), "p": apart.p,
            "test": apart.test, "significant": apart.p < SIGNIFICANT,
        },
    }  # fmt: skip


def _score(scored: Scored) -> dict[str, Any]:
    whole = {} if scored.whole is None else {"corpus": scored.whole}
    return {"score": scored.score, "interval": list(interval(scored.scores)), **whole}


def _mean(scored: Sequence[Scored]) -> float:
    return sum(above_baseline(each.score, each.baseline) for each in scored) / len(scored)


def common(a: Scored, b: Scored) -> tuple[list[float], list[float]]:
    """The scores of both on the examples that both were asked; time may have ended one of them earlier."""
    theirs = {_question(sample): sample.score for sample in b.samples}
    pairs = [(sample.score, theirs[_question(sample)]) for sample in a.samples if _question(sample) in theirs]
    if not pairs or a.scorer != b.scorer:
        what = "have no example in common" if not pairs else f"were judged by {a.scorer} and {b.scorer}"
        raise WhetError(f"task {a.task}: the two evaluations {what}, so they cannot be compared")
    return [mine for mine, _ in pairs], [their for _, their in pairs]


def _question(sample: Sample) -> tuple[int, str, str]:
    return sample.number, sample.prompt, sample.expected


def as_record(scored: Sequence[Scored]) -> list[dict[str, Any]]:
    """What a file keeps, so that another model can be compared later."""
    return [
        {
            "task": each.task, "scorer": each.scorer, "asked_for": each.asked_for, "baseline": each.baseline,
            "graded": each.graded, "corpus": each.whole, "samples": [sample.as_dict() for sample in each.samples],
        }
        for each in scored
    ]  # fmt: skip


def from_record(record: Any, place: str) -> list[Scored]:
    """What `as_record` gave; a WhetError if this is something else."""
    try:
        return [
            Scored(
                each["task"], each["scorer"], [Sample(**sample) for sample in each["samples"]], each["asked_for"],
                each["baseline"], each["graded"], each["corpus"],
            )
            for each in record["scored"]
        ]  # fmt: skip
    except (KeyError, TypeError):
        raise WhetError(f"{place}: this is no evaluation that `whet eval` wrote") from None


def lines(result: Mapping[str, Any]) -> list[str]:
    """The result as a person reads it."""
    found = []
    for name, value in result.items():
        if name in ("tasks", "mean_above_baseline") or name.startswith("task/"):
            continue
        found.append(f"{name}: {value:.4f}" if isinstance(value, float) else f"{name}: {value}")
    label = "against" if "against" in result else "base"
    found += [_line(name, task, label) for name, task in result.get("tasks", {}).items()]
    mean = result.get("mean_above_baseline")
    if mean and len(result["tasks"]) > 1:
        other = f" · {label} {mean[label]:.3f}" if label in mean else ""
        found.append(f"mean above the baselines: {mean['score']:.3f}{other}")
    return found


def _line(name: str, task: Mapping[str, Any], label: str) -> str:
    of = f" of {task['asked_for']}, then the time was up" if "asked_for" in task else ""
    by = f"{task['examples']} examples{of}, {task['scorer']}"
    text = f"{name}: {_share(task)} · baseline {100 * task['baseline']:.1f} % · {by}"
    if label not in task:
        return text
    apart = task["difference"]
    low, high = (100 * end for end in apart["interval"])
    sure = "significant" if apart["significant"] else "not significant"
    return (
        f"{text}\n  {label} {_share(task[label])}\n  difference {100 * apart['mean']:+.1f} [{low:+.1f}, {high:+.1f}], "
        f"p = {apart['p']:.2g}: {sure}"
    )


def _share(score: Mapping[str, Any]) -> str:
    low, high = (100 * end for end in score["interval"])
    return f"{100 * score['score']:.1f} % [{low:.1f}, {high:.1f}]"
