"""What a run did, in one sentence."""

from __future__ import annotations

from typing import Any

from whet.watch.readable import DASH, count_text, number_text, share_text, time_text
from whet.watch.run import RunView


def summary(run: RunView) -> str:
    """Which model was trained on how much data, how far it came, and what that changed."""
    model = f"{run.setting('model', 'path') or 'The model'}{_method(run)}"
    parts = [f"{model} {_progress(run)}"]
    results = [
        f"{score.task} went from {share_text(score.before)} to {share_text(score.after)} right"
        for score in run.results
        if score.before is not None and score.after is not None
    ]
    if results:
        parts.append(", ".join(results))
    elif len(run.losses) > 1:
        parts.append(f"the training loss went from {number_text(run.losses[0][1])} to {number_text(run.losses[-1][1])}")
    return "; ".join(parts) + "."


def result(run: RunView) -> dict[str, Any]:
    """The outcome in numbers, for --json. `before` and `after` are the score of the first task, null without one."""
    score = next(iter(run.results), None)
    final = run.losses[-1][1] if run.losses else None
    return {
        "run": str(run.folder),
        "steps": run.step,
        "loss": final,
        "val_loss": run.val_losses[-1][1] if run.val_losses else None,
        "before": score.before if score else None,
        "after": score.after if score else None,
        "tokens": _whole(run.tokens),
        "supervised_tokens": _whole(run.supervised_tokens),
        "train_s": run.train_seconds,
        "export": str(run.folder / "exports" / run.certificates[-1]["kind"]) if run.certificates else None,
    }


def _whole(count: float | None) -> int | None:
    return None if count is None else int(count)


def _method(run: RunView) -> str:
    method = run.setting("adapter", "method")
    if not method:
        return ""
    rank = run.setting("adapter", "rank")
    return f" ({method}, rank {rank})" if rank else f" ({method})"


def _progress(run: RunView) -> str:
    done = DASH if run.step is None else f"{run.step:,}"
    of = (f"{done} of {run.steps:,} steps" if run.steps else f"{done} steps") + _data(run)
    of += _taken_for_done(run)
    match run.status.state:
        case "finished":
            return f"was trained for {done} steps{_data(run)}{_taken_for_done(run)}"
        case "stopped":
            return f"was stopped after {of}"
        case "failed":
            return f"failed after {of}"
        case "running":
            # A killed process cannot say that it ended: only when it was last heard of is known.
            return f"had done {of} when last heard of ({time_text(run.status.heartbeat)})"
    return f"has done {of}" if run.step is not None else "has not been trained yet"


def _taken_for_done(run: RunView) -> str:
    return f" (the first {run.first:,} steps were taken for done)" if run.first else ""


def _data(run: RunView) -> str:
    kept = [source.kept for source in run.sources if source.use == "train"]
    known = [number for number in kept if number is not None]
    return f" on {count_text(sum(known))} conversations" if known and len(known) == len(kept) else ""
