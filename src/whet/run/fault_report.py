"""What a faulty step leaves behind: an event, the batch for --replay, and the message for the user."""

from __future__ import annotations

import json
import shlex
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from whet.config import Config
from whet.core.files import atomic_write, read_json, write_json
from whet.data.loader import Loader
from whet.run.data import RunData
from whet.training.diagnose import DocumentResult
from whet.training.guard import Guard
from whet.training.metrics import finite_or_none
from whet.training.trainer import LOWER_LR_HINT, StepFault

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from transformers import PreTrainedTokenizerFast

_BATCH_FORMAT = 1
_PREVIEW_CHARACTERS, _MAX_NAMED = 80, 3


def fault_event(fault: StepFault, data: RunData, file: Path) -> dict[str, Any]:
    """The line in events.jsonl. What is not known is null."""
    found = fault.findings
    return {
        "time": time.time(),
        "step": fault.step,
        "kind": fault.verdict.kind,
        "action": fault.verdict.action,
        "policy": fault.policy,
        "reason": fault.verdict.reason,
        "loss": finite_or_none(fault.result.loss),
        "grad_norm": finite_or_none(fault.result.grad_norm),
        "conversations": [
            _conversation_entry(data, document)
            | {"loss": finite_or_none(part.loss) if len(part.documents) == 1 else None}
            for part in found.blamed
            for document in part.documents
        ],
        "together": _is_joint_fault(found.blamed),
        "all": fault.verdict.kind == "nonfinite" and 1 < len(found.conversations) == len(found.blamed),
        "layer": _first_bad_layer(fault),
        "losses_only": found.losses_only,
        "weights": found.nonfinite_weights,
        "file": str(file),
    }


def fault_batch(
    fault: StepFault, config: Config, data: RunData, loader: Loader, precision: str, scale: float
) -> dict[str, Any]:
    """All that `whet train --replay` needs to run the step again."""
    numbers = sorted({document for part in fault.findings.micro_batches for document in part.documents})
    store = data.train.store
    return {
        "format": _BATCH_FORMAT,
        "run": str(config.folder.resolve()),
        "step": fault.step,
        "kind": fault.verdict.kind,
        "reason": fault.verdict.reason,
        "limit": None if fault.verdict.limit is None else finite_or_none(fault.verdict.limit),
        "loss": finite_or_none(fault.result.loss),
        "grad_norm": finite_or_none(fault.result.grad_norm),
        "checkpoint": f"step-{fault.step - 1:06d}" if fault.step > 1 else None,
        "seed": config.run.seed,
        "precision": precision,
        "loss_scale": scale,
        "longest": loader.max_seqlen,
        "shapes": [asdict(shape) for shape in loader.shapes],
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
        "micro_batches": [asdict(part) for part in fault.findings.micro_batches],
    }


def write_fault_batch(file: Path, batch: dict[str, Any]) -> None:
    """On one line: indented, each id would take one of its own."""
    file.parent.mkdir(exist_ok=True)
    atomic_write(file, json.dumps(batch, ensure_ascii=False, allow_nan=False) + "\n")


def fault_message(event: dict[str, Any]) -> str:
    """The paragraph a person reads."""
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
        parts.append(f"No conversation is at fault alone, only together: {listed}")
    elif event["all"]:
        parts.append("Every conversation of the step fails: the weights are at fault, not the data")
    elif named:
        parts.append(f"At fault: {listed}")
    elif event["kind"] == "nonfinite" and event["losses_only"]:
        parts.append(
            "The loss of each conversation alone is finite; gradients were not looked at, because several processes "
            "compute them together (parallel.shard, parallel.context)"
        )
    elif event["kind"] == "nonfinite":
        parts.append("It did not come again when its conversations were run one by one")
    if event["layer"]:
        parts.append(f"First bad layer: {event['layer']}")
    if event["weights"]:
        parts.append(f"Weights that are not finite themselves: {', '.join(event['weights'][:_MAX_NAMED])}")
    became = {
        "stop": "This step did not change the weights",
        "skip": "The step is left out",
        "rollback": "The run goes back to its newest checkpoint and passes over the steps since",
        "take": "The step is taken all the same",
    }
    parts.append(became[event["action"]])
    state = "" if event["action"] == "stop" else " (with the newest checkpoint before it)"
    tells = ", which looks at gradients too" if event["losses_only"] and not named else ""
    parts.append(f"Run it again: whet train --replay {shlex.quote(event['file'])}{state}{tells}")
    is_about_data = bool(named) and not (event["together"] or event["all"])
    if event["action"] == "stop":
        if is_about_data and event["policy"] == "stop":
            knob = "on_spike" if event["kind"] == "spike" else "on_nonfinite"
            parts.append(f"Go on without it: --resume with train.{knob}=skip")
        if event["kind"] == "spike" or (event["kind"] == "nonfinite" and not is_about_data):
            parts.append(LOWER_LR_HINT)
    return ". ".join(parts)


def mask_spans(mask: NDArray[np.bool_]) -> list[list[int]]:
    """Where a mask is set, as [first, one behind the last]."""
    edges = np.flatnonzero(np.diff(np.concatenate([[0], mask.astype(np.int8), [0]])))
    return edges.reshape(-1, 2).tolist()


def read_passed_over(run: Path) -> list[tuple[int, int]]:
    """The first and the last step of what each rollback of a run passed over."""
    file = run / "faults" / "passed_over.json"
    return [(first, last) for first, last in read_json(file)["steps"]] if file.exists() else []


def write_passed_over(run: Path, guard: Guard) -> None:
    (run / "faults").mkdir(exist_ok=True)
    write_json(run / "faults" / "passed_over.json", {"steps": guard.excluded})


def preview_text(tokenizer: PreTrainedTokenizerFast, ids: list[int], length: int = 300) -> str:
    """The beginning of a conversation as text."""
    # Four ids a character: a rare character may take that many. Cut inside one, the decoder would show a �.
    text = str(tokenizer.decode(ids[: 4 * length]))
    return text if len(text) <= length else text[: length - 1] + "…"


def _conversation_entry(data: RunData, document: int) -> dict[str, Any]:
    store = data.train.store
    origin = store.origin(document)
    text = preview_text(data.tokenizer, store.ids(document).tolist())
    return {"source": origin.source, "line": origin.line, "number": document, "text": text}


def _is_joint_fault(blamed: list[DocumentResult]) -> bool:
    return any(len(part.documents) > 1 for part in blamed)


def _first_bad_layer(fault: StepFault) -> str | None:
    return next((part.layer for part in fault.findings.blamed if part.layer), None)
