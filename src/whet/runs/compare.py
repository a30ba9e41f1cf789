"""Two or more runs side by side: settings that differ, curves, final metrics, and whether a difference is luck."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from whet.checkpoint.directory import lower_is_better
from whet.core.errors import WhetError
from whet.core.run_folder import parse_run_reference
from whet.evaluation.statistics import SIGNIFICANCE_LEVEL, paired_loss_difference
from whet.evaluation.validation_losses import ConversationLosses, read_validation_losses
from whet.report.run_view import RunView
from whet.runs.find import is_run, resolve_run
from whet.runs.summary import summarize_run_folder

_OWN_SETTINGS = ("run.name", "run.dir", "run.tags", "run.project")


@dataclass(frozen=True, slots=True)
class ComparedRun:
    """A run at a step."""

    label: str
    view: RunView
    state: str
    which: str
    """`latest`, `best`, or a step."""


def read_compared(references: Sequence[str]) -> list[ComparedRun]:
    """The runs RUN, RUN@STEP, RUN@best or RUN@latest, each with a short label."""
    found = []
    for reference in references:
        place, which = parse_run_reference(reference)
        folder = resolve_run(reference) if is_run(Path(reference)) else resolve_run(str(place))
        found.append((folder, which))
    names = [folder.name for folder, _ in found]
    return [
        ComparedRun(
            _label(folder, which, names.count(folder.name) > 1), RunView.read(folder),
            summarize_run_folder(folder).state.name, which,
        )
        for folder, which in found
    ]  # fmt: skip


def _label(folder: Path, which: str, is_ambiguous: bool) -> str:
    return (str(folder) if is_ambiguous else folder.name) + ("" if which == "latest" else f"@{which}")


def compare_runs(runs: Sequence[ComparedRun]) -> dict[str, Any]:
    """What `whet runs compare --json` prints. The first run is the one that the others are compared with."""
    return {
        "runs": [run.label for run in runs],
        "settings": differing_settings([run.view.config for run in runs]),
        "metrics": final_metrics(runs),
        "paired": [compare_losses(runs[0], other) for other in runs[1:]],
    }


# Settings.


def differing_settings(configs: Sequence[dict[str, Any]]) -> dict[str, list[Any]]:
    """The settings that are not the same in all runs, by key; null where one does not have it."""
    flat = [dict(_flatten(config)) for config in configs]
    keys = dict.fromkeys(itertools.chain.from_iterable(flat))
    values = {key: [each.get(key) for each in flat] for key in keys if not key.startswith(_OWN_SETTINGS)}
    return {key: found for key, found in values.items() if any(value != found[0] for value in found)}


def _flatten(value: Any, above: str = "") -> list[tuple[str, Any]]:
    """(key, value) of every setting, with list items by number, so that long lists differ in what differs."""
    if isinstance(value, dict) and value:
        items: Any = value.items()
    elif isinstance(value, list) and any(isinstance(each, dict) for each in value):
        items = enumerate(value)
    else:
        return [(above, value)]
    return [pair for key, inner in items for pair in _flatten(inner, f"{above}.{key}" if above else str(key))]


# Metrics.


def final_metrics(runs: Sequence[ComparedRun]) -> dict[str, list[Any]]:
    """The last value of each metric of each run, by name; null where one does not have it."""
    keys = dict.fromkeys(key for run in runs for line in run.view.metrics for key in line if _is_result(key))
    rows: dict[str, list[Any]] = {
        "state": [run.state for run in runs],
        "step": [run.view.step for run in runs],
        "loss": [_last(run.view.losses) for run in runs],
        **{key: [_metric_at(run, key) for run in runs] for key in keys},
        "supervised_tokens": [run.view.supervised_tokens for run in runs],
        "tokens_per_s": [run.view.tokens_per_s for run in runs],
        "train_s": [run.view.train_seconds for run in runs],
        "peak_gib": [run.view.peak_gib for run in runs],
    }
    return {key: values for key, values in rows.items() if any(value is not None for value in values)}


def _is_result(key: str) -> bool:
    return key.startswith(("val_", "task/")) and not key.startswith("val_tokens/")


def _last(points: Sequence[tuple[int, float]]) -> float | None:
    return points[-1][1] if points else None


def _metric_at(run: ComparedRun, key: str) -> float | None:
    points = dict(run.view.points(key))
    if run.which == "latest" or not points:
        return points[max(points)] if points else None
    return points.get(_evaluated_step(run, list(points)))


def _evaluated_step(run: ComparedRun, steps: Sequence[int]) -> int:
    """The step that `which` means, among those that were evaluated."""
    if run.which == "latest":
        return max(steps)
    if run.which == "best":
        metric = str(run.view.setting("eval", "best") or "val_loss")
        scores = {step: value for step, value in run.view.points(metric) if step in steps}
        if scores:
            return (min if lower_is_better(metric) else max)(scores, key=scores.__getitem__)
        return max(steps)
    if not run.which.isdecimal() or int(run.which) not in steps:
        shown = ", ".join(map(str, sorted(steps)[-10:]))
        raise WhetError(f"{run.view.folder}@{run.which}: not evaluated at that step. Use one of {shown}, best, latest")
    return int(run.which)


# Losses by conversation.


def compare_losses(one: ComparedRun, other: ComparedRun) -> dict[str, Any]:
    """The difference of the validation losses of `other` and `one`, paired by conversation; or why there is none."""
    pair = {"of": other.label, "against": one.label}
    try:
        (first_step, a), (second_step, b) = _losses_of(one), _losses_of(other)
        shared, in_a, in_b = np.intersect1d(a.conversations, b.conversations, assume_unique=True, return_indices=True)
        same = a.tokens[in_a] == b.tokens[in_b]
        if not len(shared) or not same.any():
            raise WhetError(
                f"{one.label} and {other.label} have no validation conversation in common: their validation data, "
                "tokenizer or chat template differs"
            )
    except WhetError as error:
        return {**pair, "problem": str(error)}
    in_a, in_b = in_a[same], in_b[same]
    found = paired_loss_difference(b.nats[in_b], a.nats[in_a], a.tokens[in_a])
    return {
        **pair, "steps": [second_step, first_step], "conversations": len(in_a),
        "of_conversations": [len(b.tokens), len(a.tokens)], "difference": found.mean, "interval": list(found.interval),
        "p": found.p, "test": found.test, "significant": found.p < SIGNIFICANCE_LEVEL,
    }  # fmt: skip


def _losses_of(run: ComparedRun) -> tuple[int, ConversationLosses]:
    losses = read_validation_losses(run.view.folder)
    if not losses:
        reason = (
            "it has no validation data (data.validation)" if run.view.setting("data", "validation") is None
            else "it has not been evaluated, or only by a version of whet that kept none"
        )  # fmt: skip
        raise WhetError(f"{run.label}: no losses by conversation: {reason}")
    step = _evaluated_step(run, list(losses))
    return step, losses[step]
