"""Runs as text: the list as a table, one run in full, several compared."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from whet.checkpoint.directory import list_steps
from whet.core.display import escape_controls
from whet.core.heartbeat import format_age
from whet.report.formatting import DASH, format_count, format_number, format_seconds, format_table, format_time
from whet.report.run_view import RunView
from whet.report.terminal_report import draw_loss_curve
from whet.runs.summary import RunSummary

if TYPE_CHECKING:
    from whet.runs.compare import ComparedRun  # needs numpy, which a list of runs does without

_QUIET_STATES = ("running", "finished", "stopped", "starting")
"""States that need no explanation under the list."""
_MAX_NOTES = 20


def format_list(runs: Sequence[RunSummary]) -> list[str]:
    """The runs as a table; those that were active last come last, where the eye is."""
    now = time.time()
    has_project = any(run.facts.project for run in runs)
    header = [
        "NAME",
        *(["PROJECT"] if has_project else []),
        "STATE",
        "STEP",
        "LOSS",
        "BEST",
        "TOKENS/S",
        "AGE",
        "HOST",
        "JOB",
    ]
    rows = []
    for run in runs:
        of = f"/{run.steps}" if run.steps else ""
        started = run.facts.status.get("started") or (run.owner.since if run.owner is not None else None)
        rows.append([
            run.name, *([run.facts.project or DASH] if has_project else []), run.state.name,
            DASH if run.step is None else f"{run.step}{of}", _loss(run.facts.loss), _loss(run.facts.best),
            format_count(run.facts.tokens_per_s), DASH if started is None else _age(now - started), run.host or DASH,
            DASH if run.job is None else str(run.job),
        ])  # fmt: skip
    return format_table(header, rows)


def list_notes(runs: Sequence[RunSummary]) -> list[str]:
    """What a user should know about runs that are neither well nor done."""
    notes = [f"{run.name}: {run.state.note}" for run in runs if run.state.note and run.state.name not in _QUIET_STATES]
    notes += [problem for run in runs for problem in run.problems]
    notes = list(dict.fromkeys(notes))
    more = len(notes) - _MAX_NOTES
    return notes[:_MAX_NOTES] + ([f"… and {more} more: `whet runs show RUN` lists them"] if more > 0 else [])


def _loss(value: float | None) -> str:
    return DASH if value is None else f"{value:.4f}"


def _age(seconds: float) -> str:
    return format_age(seconds).removesuffix(" ago")


def format_run(run: RunSummary, view: RunView | None) -> list[str]:
    """A run in full. `view`: its files; None for the beginning of a run, which has no configuration yet."""
    status, facts = run.facts.status, run.facts
    lines = {
        "folder": str(run.folder),
        "project": facts.project,
        "tags": ", ".join(map(str, view.setting("run", "tags") or ())) if view else None,
        "state": run.state.name + (f": {run.state.note}" if run.state.note else ""),
        "progress": _progress(run),
        "loss": None if facts.loss is None else _loss(facts.loss),
        "best": None if facts.best is None else f"{_loss(facts.best)} ({facts.best_metric})",
        "speed": None if facts.tokens_per_s is None else f"{format_count(facts.tokens_per_s)} tokens/s",
        "started": format_time(status["started"]) if "started" in status else None,
        "heartbeat": format_age(time.time() - status["heartbeat"]) if "heartbeat" in status else None,
        "host": run.host and run.host + (f", process {run.owner.pid}" if run.owner is not None else ""),
        "jobs": ", ".join(job.describe() for job in run.jobs) or (str(run.job) if run.job else None),
    }
    if view is not None:
        steps = list_steps(run.folder / "checkpoints")
        lines |= {
            "model": view.setting("model", "path"),
            "data": ", ".join(source.name for source in view.sources if source.use == "train") or None,
            "checkpoints": ", ".join(map(str, steps)) or None,
            "exports": ", ".join(str(each["kind"]) for each in view.certificates) or None,
            "events": f"{len(view.events)} in events.jsonl" if view.events else None,
        }
    text = [
        f"{key:<12} {' '.join(escape_controls(str(value)).split(chr(10)))}" for key, value in lines.items() if value
    ]
    if view is not None and len(view.losses) > 1:
        text += ["", *draw_loss_curve(view.losses, height=10).split("\n")]
    return text


def _progress(run: RunSummary) -> str | None:
    if run.step is None:
        return None
    return f"step {run.step:,}" + (f" of {run.steps:,} ({run.progress:.0%})" if run.progress is not None else "")


# Comparisons.


def format_comparison(runs: Sequence[ComparedRun], result: dict[str, Any]) -> list[str]:
    """Settings that differ, final metrics, curves on the same axes, and differences by conversation."""
    labels = [run.label for run in runs]
    settings = [[key, *map(_value, values)] for key, values in result["settings"].items()]
    lines = format_table(["SETTING", *labels], settings) if settings else ["the settings are the same"]
    metrics = [[key, *(_metric(key, value) for value in values)] for key, values in result["metrics"].items()]
    lines += ["", *format_table(["METRIC", *labels], metrics)]
    for title, curves in (
        ("loss", [run.view.losses for run in runs]),
        ("validation loss", [run.view.val_losses for run in runs]),
    ):
        frame = [point for curve in curves for point in curve]
        for label, curve in zip(labels, curves, strict=True):
            if len(curve) > 1:
                chart = draw_loss_curve(curve, height=8, frame=frame)
                lines += ["", f"{title} of {escape_controls(label)}", *chart.split("\n")]
    return [*lines, "", *(escape_controls(format_difference(found)) for found in result["paired"])]


def _value(value: Any) -> str:
    return DASH if value is None else value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _metric(key: str, value: Any) -> str:
    if value is None or isinstance(value, str):
        return value or DASH
    if key == "train_s":
        return format_seconds(value)
    if key in ("step", "supervised_tokens", "tokens_per_s"):
        return format_count(value)
    return format_number(value) if key == "peak_gib" else f"{value:.4f}"


def format_difference(found: dict[str, Any]) -> str:
    """As a sentence."""
    if "problem" in found:
        return f"not compared by conversation: {found['problem']}"
    low, high = found["interval"]
    better = "better" if found["difference"] < 0 else "worse" if found["difference"] > 0 else "the same"
    luck = "significant" if found["significant"] else "not significant: it may be luck"
    count = f"{found['conversations']:,} conversations"
    if found["conversations"] < max(found["of_conversations"]):
        count += f" in common (of {found['of_conversations'][0]:,} and {found['of_conversations'][1]:,})"
    steps = (
        f"steps {found['steps'][0]} and {found['steps'][1]}"
        if len(set(found["steps"])) > 1
        else f"step {found['steps'][0]}"
    )
    return (
        f"{found['of']} − {found['against']}: validation loss {found['difference']:+.4f} [{low:+.4f}, {high:+.4f}], "
        f"p = {found['p']:.2g}: {better}, {luck} ({count}, {steps})"
    )
