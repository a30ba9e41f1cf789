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


def check_promises(run: RunView, checkpoints: list[int]) -> list[dict[str, Any]]:
    """In the order of the README."""
    folder = shlex.quote(str(run.folder))
    config = shlex.quote(str(run.folder / "config.yaml"))
    return [
        asdict(each)
        for each in (
            _nothing_is_lost(run, config),
            _nothing_leaks(run, config),
            _layout(run, config),
            _survives(checkpoints, folder),
            _fits(run, config),
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
    if packing in (None, "none"):
        return Promise(title, "proven", "each conversation is a row of its own", command)
    return Promise(title, "proven", f"the model was probed before step 1 and trained packed ({packing})", command)


def _layout(run: RunView, config: str) -> Promise:
    other = shlex.quote(f"{run.folder}-layout")
    command = (
        f"torchrun --nproc-per-node 2 -m whet train {config} train.precision=fp64 run.dir={other} "
        "# and compare metrics.jsonl"
    )
    return Promise("The layout does not matter", "open", "needs a second run with another layout", command)


def _survives(checkpoints: list[int], folder: str) -> Promise:
    title, command = "A run survives", f"whet runs resume {folder}"
    if not checkpoints:
        return Promise(title, "open", "there is no checkpoint yet", command)
    return Promise(title, "proven", f"a complete checkpoint of step {checkpoints[-1]:,}", command)


def _fits(run: RunView, config: str) -> Promise:
    title, command = "It fits", f"whet fit {config}"
    retried = [event for event in run.events if event.get("kind") == "out-of-memory"]
    if not run.step_lines:
        return Promise(title, "open", "the worst batch runs before step 1", command)
    peak = run.peak_gib
    evidence = "the worst batch ran before step 1" + ("" if peak is None else f"; peak {format_number(peak)} GiB")
    if retried:
        evidence += f"; {len(retried)} steps were short of memory and ran in smaller micro-batches"
    return Promise(title, "proven", evidence, command)


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
