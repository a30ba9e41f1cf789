"""The six promises of whet as a run keeps them: what its files prove, and the command that proves it again."""

from __future__ import annotations

import shlex
from dataclasses import asdict, dataclass
from typing import Any, Literal

from whet.report.formatting import finite_number, format_count, format_number, format_share
from whet.report.run_view import RunView


@dataclass(frozen=True, slots=True)
class Promise:
    """`state`: proven by this run's files; broken, which they show; or open, until someone runs the command."""

    title: str
    state: Literal["proven", "broken", "open"]
    evidence: str
    command: str


def check_promises(run: RunView, checkpoints: list[int], peak_gib: float | None) -> list[dict[str, Any]]:
    """In the order of the README. `peak_gib`: the largest of all steps, of which `run` may have only some."""
    folder = shlex.quote(str(run.folder))
    config = shlex.quote(str(run.folder / "config.yaml"))
    return [
        asdict(each)
        for each in (
            _nothing_is_lost(run, config),
            _nothing_leaks(run, config),
            _layout(run, folder),
            _survives(run, checkpoints, folder),
            _fits(run, peak_gib, config),
            _ships(run, folder),
        )
    ]


def _nothing_is_lost(run: RunView, config: str) -> Promise:
    title, command = "Nothing is lost", f"whet check {config}"
    missing = [source.unaccounted for source in run.sources]
    if not missing or any(number is None for number in missing):
        return Promise(title, "open", "the ledger is missing or lacks counts", command)
    lost = sum(abs(number) for number in missing if number is not None)
    if lost:
        return Promise(title, "broken", f"{format_count(lost)} conversations are not accounted for", command)
    read = sum(source.total or 0 for source in run.sources)
    return Promise(title, "proven", f"{format_count(read)} conversations read: each kept or dropped by reason", command)


def _nothing_leaks(run: RunView, config: str) -> Promise:
    title, command = "Nothing leaks", f"whet check {config}"
    packing = run.plan.get("packing")
    if not run.step_lines:
        return Promise(title, "open", "the model is probed before step 1", command)
    if packing is None:
        return Promise(title, "open", "plan.json, which tells how rows were packed, is missing or damaged", command)
    if packing == "none":
        return Promise(title, "proven", "each conversation is a row of its own", command)
    return Promise(title, "proven", f"the model was probed before step 1 and trained packed ({packing})", command)


def _layout(run: RunView, folder: str) -> Promise:
    title, command = "The layout does not matter", f"whet check {folder}"
    level, text = run.checks.get("layout", ("", ""))
    if level == "ok":
        return Promise(title, "proven", text, command)
    if level == "fault":
        return Promise(title, "broken", text, command)
    return Promise(title, "open", text or "the command computes a step again in other layouts", command)


def _survives(run: RunView, checkpoints: list[int], folder: str) -> Promise:
    title, command = "A run survives", f"whet check {folder}"
    level, text = run.checks.get("resume", ("", ""))
    if level == "fault":
        return Promise(title, "broken", text, command)
    if not checkpoints:
        return Promise(title, "open", "there is no checkpoint yet", command)
    saved = f"a complete checkpoint of step {checkpoints[-1]:,}"
    return Promise(title, "proven", f"{saved}; {text}" if level == "ok" else saved, command)


def _fits(run: RunView, peak_gib: float | None, config: str) -> Promise:
    title, command = "It fits", f"whet fit {config}"
    retried = [event for event in run.events if event.get("kind") == "out-of-memory"]
    if not run.step_lines:
        return Promise(title, "open", "on a GPU, the worst batch runs before step 1", command)
    has_tried = finite_number(run.plan.get("worst_batch_gib")) is not None
    is_done = run.status.state == "finished"
    done = f"{'all' if is_done else 'so far'} {format_count(run.step_lines[-1]['step'])} steps ran"
    evidence = "the worst batch ran before step 1" if has_tried else done
    if peak_gib is not None:
        evidence += f"; peak {format_number(peak_gib)} GiB"
    if retried:
        evidence += f"; {len(retried)} steps were short of memory and ran in smaller micro-batches"
    return Promise(title, "proven" if has_tried or is_done else "open", evidence, command)


def _ships(run: RunView, folder: str) -> Promise:
    title, command = "What ships is what was trained", f"whet export {folder}"
    if not run.certificates:
        return Promise(title, "open", "nothing was exported yet", command)
    unverified = [str(each.get("kind")) for each in run.certificates if each.get("verified") is not True]
    if unverified:
        return Promise(title, "broken", f"not verified: {', '.join(unverified)}", command)
    worst = max((finite_number(each.get("max_logit_difference")) or 0.0 for each in run.certificates), default=0.0)
    same = min((finite_number(each.get("same_next_token")) or 0.0 for each in run.certificates), default=0.0)
    kinds = ", ".join(str(each.get("kind")) for each in run.certificates)
    return Promise(
        title, "proven",
        f"{kinds}: loaded back; largest logit difference {format_number(worst)}, same next token at "
        f"{format_share(same)} of positions", command,
    )  # fmt: skip
