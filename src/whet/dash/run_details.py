"""Everything about one run that is not a curve, as JSON: state, plan, ledger, scores, promises, exports, logs."""

from __future__ import annotations

import shlex
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from whet.checkpoint.directory import list_steps
from whet.core.costs import counted_costs, predicted_costs
from whet.core.display import mask_secrets
from whet.core.errors import WhetError
from whet.core.json_lines import parse_json_line
from whet.dash.curves import MetricsFile
from whet.dash.runs_folder import RunsFolder
from whet.evaluation.statistics import bootstrap_interval
from whet.report.blocks import AnswersOverTime, Cell, Facts, ReportSection, Styled, Table
from whet.report.formatting import finite_number, format_count, format_gib, format_number, format_share
from whet.report.run_view import RunView
from whet.report.samples import FIXED_PROMPTS, LoggedSample
from whet.report.sections import effect_section, exports_section, plan_section, prompts_section
from whet.report.terminal_report import summarize_run
from whet.runs.summary import RunSummary

_MAX_EVENTS = 500
_MAX_FLIPPED = 100
_MAX_TEXT = 20_000
_MAX_LEDGER_LINES = 200
_LOG_BYTES = 2**16


def shown_state(run: RunSummary) -> str:
    """A run that waits in the queue after it has trained was requeued."""
    return "requeued" if run.state.name == "queued" and run.step else run.state.name


def summary_json(run: RunSummary) -> dict[str, Any]:
    """A row of the list of runs."""
    row = run.as_dict() | {"state": shown_state(run), "last_sign": run.last_sign}
    row["note"] = mask_secrets(str(row["note"]))
    row["problems"] = [mask_secrets(problem) for problem in row["problems"]]
    return row


def describe_run(folders: RunsFolder, name: str, file: MetricsFile) -> dict[str, Any]:
    """What the page of a run shows. `file`: its metrics, read."""
    summary = folders.summary(name)
    details = {"summary": summary_json(summary) | {"name": name}, "ranks": log_ranks(summary.folder)}
    if not (summary.folder / "config.yaml").exists() or not summary.facts.is_readable:
        return details
    try:
        lines = [file.first_step, *file.evaluation_lines, file.last_step]
        view = RunView.read(summary.folder, [line for line in lines if line])
    except WhetError as error:
        return details | {"damage": [mask_secrets(str(error))]}
    damage = [*view.damage, *([f"metrics.jsonl: lines that cannot be read: {file.damaged}"] if file.damaged else [])]
    checkpoints = list_steps(summary.folder / "checkpoints")
    return details | {
        "damage": damage,
        "sentence": mask_secrets(summarize_run(view)),
        "model": mask_secrets(str(view.setting("model", "path") or "")),
        "plan": view.plan,
        "status": {"phase": summary.facts.status.get("phase"), "first_step": summary.facts.status.get("first_step")},
        "sources": [asdict(each) | {"name": mask_secrets(each.name), "unaccounted": each.unaccounted}
                    for each in view.sources],
        "events": [_event_json(event) for event in view.events[-_MAX_EVENTS:]],
        "checkpoints": checkpoints,
        "best_checkpoint": _best_checkpoint(summary.folder),
        "scores": _scores(view),
        "flipped": _flipped(view),
        "validation": {key: list(values) for key, values in view.validation.items()},
        "reported": [_section_json(each) for each in _reported_sections(view, file) if each is not None],
        "prompts": _prompts(view),
        "costs": _costs(view, file),
        "promises": check_promises(view, checkpoints, _peak_gib(file)),
        "config": mask_secrets(view.config_text),
    }  # fmt: skip


def _event_json(event: dict[str, Any]) -> dict[str, Any]:
    return {
        "step": event.get("step"), "kind": str(event.get("kind") or "event"), "action": event.get("action"),
        "reason": mask_secrets(str(event.get("reason") or "")), "layer": event.get("layer"),
        "conversations": [
            {"source": mask_secrets(str(each.get("source"))), "line": each.get("line"), "loss": each.get("loss")}
            for each in event["conversations"][:20]
        ],
    }  # fmt: skip


def _reported_sections(view: RunView, file: MetricsFile) -> list[ReportSection | None]:
    """Sections of the report that the page shows as they are. `view` has the first and the last step alone: numbers
    over all steps come from `file`."""
    plan = plan_section(view)
    (facts,) = (block for block in plan.blocks if isinstance(block, Facts))
    mfu = file.steps.column("mfu")
    mfu, peak = mfu[np.isfinite(mfu)], _peak_gib(file)
    facts.values["mean MFU"] = format_share(float(mfu.mean())) if len(mfu) else None
    facts.values["peak memory"] = None if peak is None else format_gib(peak)
    return [effect_section(view), exports_section(view), plan]


def _peak_gib(file: MetricsFile) -> float | None:
    peak = file.steps.column("peak_gib")
    peak = peak[np.isfinite(peak)]
    return float(peak.max()) if len(peak) else None


def _section_json(section: ReportSection) -> dict[str, Any]:
    blocks: list[dict[str, Any]] = []
    for block in section.blocks:
        if isinstance(block, Table):
            blocks.append({"head": list(block.head), "rows": [list(map(_cell_json, row)) for row in block.rows]})
        elif isinstance(block, Facts):
            blocks.append({"facts": {name: _cell_json(cell) for name, cell in block.values.items()}})
    return {"title": section.title, "note": _cell_json(section.note), "blocks": blocks}


def _cell_json(cell: Cell) -> Any:
    return {"text": cell.text, "style": cell.style} if isinstance(cell, Styled) else cell


def _prompts(view: RunView) -> list[dict[str, Any]]:
    """The answers to eval.prompts at every evaluation."""
    section = prompts_section(view)
    blocks = [] if section is None else section.blocks
    return [
        {"prompt": block.prompt[:_MAX_TEXT],
         "answers": [{"step": each.step, "answer": each.answer[:_MAX_TEXT]} for each in block.answers]}
        for block in blocks
        if isinstance(block, AnswersOverTime)
    ]  # fmt: skip


def _costs(view: RunView, file: MetricsFile) -> dict[str, Any]:
    """Time, memory, energy and money: predicted and measured. The worst batch, which ran before step 1, predicts the
    peak memory; the first steps predict the rest."""
    peaks = {"predicted": finite_number(view.plan.get("worst_batch_gib")), "measured": _peak_gib(file)}
    costs = {"predicted": predicted_costs(view.folder), "measured": counted_costs(view.folder)}
    return {
        name: {"peak_gib": peaks[name], **({} if found is None else found.as_dict())} for name, found in costs.items()
    }


def _best_checkpoint(folder: Path) -> str | None:
    file = folder / "checkpoints" / "best"
    if not file.is_file():
        return None
    try:
        return file.read_text().partition("\n")[0].strip()[:40] or None
    except (OSError, UnicodeDecodeError):
        return None


def _scores(view: RunView) -> list[dict[str, Any]]:
    """Each task before and after, with 95 % intervals where every answer's score is known."""
    found = []
    for score in (each for each in view.task_scores if each.task != FIXED_PROMPTS):
        both = {"before": (view.start_step, score.before), "after": (score.after_step, score.after)}
        entry: dict[str, Any] = {"task": score.task, "after_step": score.after_step}
        for name, (step, value) in both.items():
            samples = [each for each in view.samples if each.task == score.task and each.step == step]
            points = [value for each in samples if (value := _points(each)) is not None]
            known = bool(points) and len(points) == len(samples)
            entry[name] = {
                "score": value, "of": len(samples), "interval": list(bootstrap_interval(points)) if known else None
            }  # fmt: skip
        found.append(entry)
    return found


def _points(sample: LoggedSample) -> float | None:
    return sample.score if sample.score is not None else None if sample.right is None else float(sample.right)


def _flipped(view: RunView) -> list[dict[str, Any]]:
    """Answers that became right or wrong, the new faults first."""
    both = [(pair.before, pair.after) for pair in view.pairs if pair.before is not None and pair.after is not None]
    changed = [(a, b) for a, b in both if a.right is not None and b.right is not None and a.right != b.right]
    changed.sort(key=lambda pair: bool(pair[1].right))
    return [
        {
            "task": after.task, "prompt": after.prompt[:_MAX_TEXT], "expected": after.expected[:_MAX_TEXT],
            "before": before.answer[:_MAX_TEXT], "after": after.answer[:_MAX_TEXT], "right": after.right,
            "steps": [before.step, after.step],
        }
        for before, after in changed[:_MAX_FLIPPED]
    ]  # fmt: skip


# The ledger's lines.


def ledger_lines(folder: Path, outcome: str | None, reason: str | None, start: int) -> dict[str, Any]:
    """Lines of ledger.jsonl with an outcome and a reason, a page of them."""
    lines, matched = list[dict[str, Any]](), 0
    file = folder / "ledger.jsonl"
    if not file.is_file():
        return {"lines": [], "more": False, "note": "the ledger of this run names no lines: an earlier whet wrote it"}
    with file.open("rb") as opened:
        for text in opened:
            line = parse_json_line(text)
            if (
                line is None
                or (outcome and line.get("outcome") != outcome)
                or (reason and line.get("reason") != reason)
            ):
                continue
            matched += 1
            if matched <= start:
                continue
            if len(lines) == _MAX_LEDGER_LINES:
                return {"lines": lines, "more": True}
            lines.append({key: mask_secrets(str(value))[:500] for key, value in line.items()})
    return {"lines": lines, "more": False}


# Logs.


def log_ranks(folder: Path) -> list[int]:
    """The ranks that have a log."""
    names = (file.stem.removeprefix("rank-") for file in folder.glob("logs/rank-*.log"))
    return sorted(int(name) for name in names if name.isdecimal() and len(name) < 7)


def log_tail(file: Path, position: int | None) -> tuple[list[str], int]:
    """The lines of a log after a position, or its last ones, and where to go on. A line without an end waits."""
    if not file.is_file():  # a pipe would block
        return [], 0
    size = file.stat().st_size
    start = max(0, size - _LOG_BYTES) if position is None or position > size else max(position, size - _LOG_BYTES)
    with file.open("rb") as opened:
        opened.seek(start)
        content = opened.read(_LOG_BYTES)
    end = content.rfind(b"\n") + 1
    lines = content[:end].decode("utf-8", "replace").splitlines()
    if start and start != position:
        lines = lines[1:]  # half of one
    return [mask_secrets(line)[:2000] for line in lines], start + end


# The six promises of whet as a run keeps them: what its files prove, and the command that proves it again.


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
