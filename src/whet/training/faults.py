"""Faulty steps: diagnose, report and act. A fault leaves an event, the batch for --replay, and a message."""

from __future__ import annotations

import json
import shlex
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from whet.core.console import warn
from whet.core.errors import RunFailedError
from whet.core.files import atomic_write, resolve_path
from whet.core.heartbeat import PHASE
from whet.training.checkpoints import resumable_steps, save_checkpoint, saved_steps, wait_for_save
from whet.training.diagnose import Diagnoser, Diagnosis
from whet.training.guard import Verdict
from whet.training.metrics import finite_or_none
from whet.training.run_state import Run
from whet.training.step import StepResult

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from transformers import PreTrainedTokenizerFast

LOWER_LR_HINT = "A lower train.optimizer.lr often helps: start a new run with it, in another folder (run.dir=FOLDER)"
_BATCH_FORMAT = 1
_PREVIEW_CHARACTERS, _MAX_NAMED = 80, 3


def handle_fault(run: Run, result: StepResult, verdict: Verdict) -> Verdict:
    """Diagnose the current step, whose weights have not changed, and report it.

    Raises RunFailedError if the run has to stop, after saving the state before the step unless a weight is not finite.
    """
    if verdict.action == "rollback" and not resumable_steps(run):
        verdict = verdict.stop_because("there is no checkpoint to go back to")
    PHASE.enter("diagnosing a fault")
    diagnoser = Diagnoser(run.model, run.ranks, run.config.run.seed, run.autocast, run.loss_scaler.value)
    diagnosis = diagnoser.diagnose(run.loader, run.step, verdict.kind)
    file = run.config.folder / "faults" / f"step-{run.step + 1:06d}.json"
    event = fault_event(run, result, verdict, diagnosis, file)
    if run.ranks.is_main:
        write_fault_batch(file, fault_batch(run, result, verdict, diagnosis))
    run.output.write_event(event)
    is_saved = run.step in saved_steps(run)
    if verdict.action == "stop" and run.step > run.intervals.first and not is_saved and not diagnosis.nonfinite_weights:
        save_checkpoint(run)
        wait_for_save(run)
    message = fault_message(event)
    if verdict.action == "stop":
        raise RunFailedError(message)
    warn(message)
    return verdict


def fault_event(run: Run, result: StepResult, verdict: Verdict, diagnosis: Diagnosis, file: Path) -> dict[str, Any]:
    """The line in events.jsonl; null for what is not known."""
    blamed = diagnosis.blamed
    return {
        "time": time.time(),
        "step": run.step + 1,
        "kind": verdict.kind,
        "action": verdict.action,
        "policy": run.guard.policy(verdict.kind),
        "reason": verdict.reason,
        "loss": finite_or_none(result.loss),
        "grad_norm": finite_or_none(result.grad_norm),
        "conversations": [
            _conversation_entry(run, document)
            | {"loss": finite_or_none(part.loss) if len(part.documents) == 1 else None}
            for part in blamed
            for document in part.documents
        ],
        "together": any(len(part.documents) > 1 for part in blamed),
        "all": verdict.kind == "nonfinite" and 1 < len(diagnosis.conversations) == len(blamed),
        "layer": next((part.layer for part in blamed if part.layer), None),
        "losses_only": diagnosis.losses_only,
        "weights": diagnosis.nonfinite_weights,
        "file": str(file),
    }


def fault_batch(run: Run, result: StepResult, verdict: Verdict, diagnosis: Diagnosis) -> dict[str, Any]:
    """All that `whet train --replay` needs to run the step again; run/replay_batch.py reads it."""
    config, store = run.config, run.store
    numbers = sorted({document for part in diagnosis.micro_batches for document in part.documents})
    return {
        "format": _BATCH_FORMAT,
        "run": str(resolve_path(config.folder)),
        "step": run.step + 1,
        "kind": verdict.kind,
        "reason": verdict.reason,
        "limit": None if verdict.limit is None else finite_or_none(verdict.limit),
        "loss": finite_or_none(result.loss),
        "grad_norm": finite_or_none(result.grad_norm),
        "checkpoint": f"step-{run.step:06d}" if run.step > run.intervals.first else None,
        "seed": config.run.seed,
        "precision": run.precision.name,
        "loss_scale": run.loss_scaler.value,
        "longest": run.loader.max_seqlen,
        "shapes": [asdict(shape) for shape in run.loader.shapes],
        "conversations": [
            {
                "number": number,
                "source": store.origin(number).source,
                "line": store.origin(number).line,
                "ids": store.ids(number).tolist(),
                "supervised": mask_spans(store.loss(number)),
            }
            for number in numbers
        ],
        "micro_batches": [asdict(part) for part in diagnosis.micro_batches],
    }


def write_fault_batch(file: Path, batch: dict[str, Any]) -> None:
    """On one line: indented, every id would take a line."""
    file.parent.mkdir(exist_ok=True)
    atomic_write(file, json.dumps(batch, ensure_ascii=False, allow_nan=False) + "\n")


def fault_message(event: dict[str, Any]) -> str:
    """The event as a paragraph for the user."""
    parts = [f"step {event['step']}: {event['reason']}"]
    named = [
        f"{each['source']}:{each['line']} ({each['text'][:_PREVIEW_CHARACTERS]!r})"
        for each in event["conversations"][:_MAX_NAMED]
    ]
    more = len(event["conversations"]) - len(named)
    listed = "; ".join(named) + (f"; and {more} more" if more > 0 else "")
    if event["kind"] == "spike" and named:
        parts.append(f"The highest losses are those of {listed}")
    elif event["together"]:
        parts.append(f"No conversation is faulty on its own, only together: {listed}")
    elif event["all"]:
        parts.append("Every conversation of the step fails: the cause is the weights, not the data")
    elif named:
        parts.append(f"Faulty: {listed}")
    elif event["kind"] == "nonfinite" and event["losses_only"]:
        parts.append(
            "The loss of each conversation alone is finite; gradients were not checked, because several processes "
            "share them (parallel.shard, parallel.context)"
        )
    elif event["kind"] == "nonfinite":
        parts.append("It did not recur when its conversations were run one by one")
    if event["layer"]:
        parts.append(f"First bad layer: {event['layer']}")
    if event["weights"]:
        parts.append(f"Weights that are not finite: {', '.join(event['weights'][:_MAX_NAMED])}")
    became = {
        "stop": "This step did not change the weights",
        "skip": "The step is skipped",
        "rollback": "The run returns to its newest checkpoint and skips the steps since",
        "take": "The step is taken anyway",
    }
    parts.append(became[event["action"]])
    state = "" if event["action"] == "stop" else " (with the newest checkpoint before it)"
    tells = ", which checks gradients too" if event["losses_only"] and not named else ""
    parts.append(f"Run it again: whet train --replay {shlex.quote(event['file'])}{state}{tells}")
    is_about_data = bool(named) and not (event["together"] or event["all"])
    if event["action"] == "stop":
        if is_about_data and event["policy"] == "stop":
            knob = "on_spike" if event["kind"] == "spike" else "on_nonfinite"
            parts.append(f"Continue without it: --resume with train.{knob}=skip")
        if event["kind"] == "spike" or (event["kind"] == "nonfinite" and not is_about_data):
            parts.append(LOWER_LR_HINT)
    return ". ".join(parts)


def mask_spans(mask: NDArray[np.bool_]) -> list[list[int]]:
    """Where a mask is set, as half-open [start, end)."""
    edges = np.flatnonzero(np.diff(np.concatenate([[0], mask.astype(np.int8), [0]])))
    return edges.reshape(-1, 2).tolist()


def preview_text(tokenizer: PreTrainedTokenizerFast, ids: list[int], length: int = 300) -> str:
    """The beginning of a conversation as text."""
    # Four ids a character: a rare character may take that many. Cut inside one, the decoder would show a �.
    text = str(tokenizer.decode(ids[: 4 * length]))
    return text if len(text) <= length else text[: length - 1] + "…"


def _conversation_entry(run: Run, document: int) -> dict[str, Any]:
    origin = run.store.origin(document)
    text = preview_text(run.tokenizer, run.store.ids(document).tolist())
    return {"source": origin.source, "line": origin.line, "number": document, "text": text}
