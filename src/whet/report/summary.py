"""The outcome of a run in one sentence, and as JSON."""

from __future__ import annotations

from typing import Any

from whet.report.formatting import DASH, format_number, format_share, format_time
from whet.report.run_view import RunView


def summarize_run(run: RunView) -> str:
    """The model, the data, the progress, and how scores or loss changed."""
    model = f"{run.setting('model', 'path') or 'The model'}{_adapter_note(run)}"
    parts = [f"{model} {_progress_note(run)}"]
    results = [
        f"the {score.task} score went from {format_share(score.before)} to {format_share(score.after)}"
        for score in run.task_scores
        if score.before is not None and score.after is not None
    ]
    if results:
        parts.append(", ".join(results))
    elif len(run.losses) > 1:
        parts.append(
            f"the training loss went from {format_number(run.losses[0][1])} to {format_number(run.losses[-1][1])}"
        )
    return "; ".join(parts) + "."


def result_json(run: RunView) -> dict[str, Any]:
    """The result of `whet train --json`. `before` and `after` are scores of the first task; null without tasks."""
    score = next(iter(run.task_scores), None)
    final = run.losses[-1][1] if run.losses else None
    return {
        "run": str(run.folder),
        "steps": run.step,
        "loss": final,
        "val_loss": run.val_losses[-1][1] if run.val_losses else None,
        "before": score.before if score else None,
        "after": score.after if score else None,
        "tokens": _as_int(run.tokens),
        "supervised_tokens": _as_int(run.supervised_tokens),
        "train_s": run.train_seconds,
        "export": str(run.folder / "exports" / run.certificates[-1]["kind"]) if run.certificates else None,
    }


def _as_int(count: float | None) -> int | None:
    return None if count is None else int(count)


def _adapter_note(run: RunView) -> str:
    method = run.setting("adapter", "method")
    if not method:
        return ""
    rank = run.setting("adapter", "rank")
    return f" ({method}, rank {rank})" if rank else f" ({method})"


def _progress_note(run: RunView) -> str:
    done = DASH if run.step is None else f"{run.step:,}"
    of = (f"{done} of {run.steps:,} steps" if run.steps else f"{done} steps") + _data_note(run)
    of += _start_step_note(run)
    match run.status.state:
        case "finished":
            return f"was trained for {done} steps{_data_note(run)}{_start_step_note(run)}"
        case "stopped":
            return f"was stopped after {of}"
        case "failed":
            return f"failed after {of}"
        case "running":
            # the state of a killed process stays "running", so the time of its last heartbeat is part of the sentence
            return f"had completed {of} at its last heartbeat ({format_time(run.status.heartbeat)})"
    return f"has completed {of}" if run.step is not None else "has not been trained yet"


def _start_step_note(run: RunView) -> str:
    return f" (starting at step {run.start_step:,})" if run.start_step else ""


def _data_note(run: RunView) -> str:
    return f", {run.seen_note} conversations seen" if run.seen_note is not None else ""
