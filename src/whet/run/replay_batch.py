"""`whet train --replay`: run a saved faulty step again, each conversation alone, then all together."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import Field, ValidationError
from rich.table import Table
from rich.text import Text

from whet.checkpoint import directory
from whet.checkpoint.load import load_checkpoint
from whet.config import Config
from whet.core import launch_env
from whet.core.config import Section
from whet.core.console import info, silence_libraries, warn
from whet.core.display import escape_controls
from whet.core.distributed import Ranks, init_distributed
from whet.core.errors import WhetError
from whet.core.files import read_json, resolve_path
from whet.data.batch import BatchShape
from whet.data.loader import ReplayLoader, SavedDocument
from whet.model import attention
from whet.model.lora.peft_adapters import embedding_rows
from whet.model.loss.loss_model import LossModel
from whet.run.data import load_run_tokenizer
from whet.run.models.model_builder import build_loss_model, build_model, set_deterministic
from whet.run.plan_summary import read_plan_json
from whet.run.resume import read_run_config
from whet.training.diagnose import Diagnoser, Diagnosis, DocumentResult
from whet.training.faults import preview_text
from whet.training.metrics import finite_or_none
from whet.training.precision import PrecisionPolicy, choose_precision
from whet.training.step import ForwardPasses, StepResult, train_step

_PREVIEW_CHARACTERS = 48
_NOT_A_BATCH = "this is not a batch that a run saved. Give a file faults/step-NNNNNN.json of a run directory"


class _SavedConversation(Section):
    number: int
    source: str
    line: int
    ids: list[Annotated[int, Field(ge=0)]] = Field(min_length=1)
    supervised: list[Annotated[tuple[int, int], Field(strict=False)]]


class _SavedMicroBatch(Section):
    rank: int
    row: int
    documents: list[int]


class _SavedShape(Section):
    tokens: int = Field(ge=1)
    documents: int = Field(ge=0)
    supervised: int = Field(default=0, ge=0)  # of earlier versions, unused


class _SavedBatchFile(Section):
    """The format of a file in faults/, written by training/faults.py."""

    format: Literal[1]
    run: str
    step: int = Field(ge=1)
    kind: Literal["nonfinite", "empty", "spike"]
    reason: str
    limit: float | None
    loss: float | None
    grad_norm: float | None
    checkpoint: str | None
    seed: int = Field(ge=0)
    precision: Literal["fp64", "fp32", "bf16", "fp16", "fp8"]
    loss_scale: float = Field(gt=0)
    longest: int = Field(ge=1)
    shapes: list[_SavedShape]
    conversations: list[_SavedConversation] = Field(min_length=1)
    micro_batches: list[_SavedMicroBatch]


@dataclass(frozen=True, slots=True)
class SavedBatch:
    """A file in faults/, read."""

    content: dict[str, Any]
    step: ReplayLoader

    @classmethod
    def read(cls, file: Path) -> SavedBatch:
        try:
            content = _SavedBatchFile.model_validate(read_json(file)).model_dump()
            places = {each["number"]: place for place, each in enumerate(content["conversations"])}
            layout = [(part["row"], [places[n] for n in part["documents"]]) for part in content["micro_batches"]]
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(map(str, first["loc"]))
            raise WhetError(f"{file}: {_NOT_A_BATCH} ({where}: {first['msg']})") from None
        except KeyError as error:
            raise WhetError(f"{file}: {_NOT_A_BATCH} (conversation {error} is missing)") from None
        held = [_saved_document(each["ids"], each["supervised"]) for each in content["conversations"]]
        shapes = [BatchShape(shape["tokens"], shape["documents"]) for shape in content["shapes"]]
        return cls(content, ReplayLoader(held, layout, content["longest"], shapes))


def replay_batch(file: Path) -> dict[str, Any]:
    """Run a saved step again and print the result of each conversation; neither weights nor run change."""
    if launch_env.world_size() > 1:
        raise WhetError("--replay runs in one process: start it without torchrun")
    silence_libraries()
    saved = SavedBatch.read(file)
    run = _find_run(file, saved)
    config = read_run_config(run)
    set_deterministic(config)
    ranks = init_distributed()
    precision = choose_precision(config, ranks.device, trains=False)
    tokens = len(load_run_tokenizer(config))
    model = build_model(config, precision, ranks.device, tokens, typical=_typical_length(run))
    root = build_loss_model(config, model, precision, ranks.device, tokens, saved.step.max_seqlen).train()
    if saved.step.highest_id >= embedding_rows(model):
        raise WhetError(f"{file}: it holds ids that this run's model does not know. Was the file edited?")
    checkpoint = _load_nearest_checkpoint(saved, run, root, ranks)
    if precision.name != saved.content["precision"]:
        warn(f"the run computed in {saved.content['precision']}; this device computes in {precision.name}")
    findings, result = _rerun(saved, config, root, ranks, precision)
    exact = checkpoint == saved.content["checkpoint"]
    reproduced = _is_reproduced(saved, result, exact)
    _print_results(saved, config, findings, result, reproduced)
    return {
        "run": str(run),
        "step": saved.content["step"],
        "kind": saved.content["kind"],
        "checkpoint": checkpoint,
        "reproduced": reproduced,
        "loss": finite_or_none(result.loss),
        "grad_norm": finite_or_none(result.grad_norm),
        "conversations": [_conversation_result(saved, found) for found in findings.conversations],
        "weights": findings.nonfinite_weights,
    }


def _find_run(file: Path, saved: SavedBatch) -> Path:
    """The run whose folder holds the file, or else the one that wrote it."""
    holder = resolve_path(file).parent.parent
    run = holder if (holder / "config.yaml").exists() else Path(saved.content["run"])
    if not (run / "config.yaml").exists():
        raise WhetError(f"{file}: its run {run}, which holds the model, no longer exists")
    return run


def _load_nearest_checkpoint(saved: SavedBatch, run: Path, root: LossModel, ranks: Ranks) -> str | None:
    """Load the checkpoint before the step, or the nearest earlier one; returns its name, None for the initial model."""
    wanted = saved.content["step"] - 1
    before = [step for step in directory.list_steps(run / "checkpoints") if step <= wanted]
    if not before and wanted:
        warn(f"no checkpoint of step {wanted} or before is left: using the model that the run started from")
    if not before:
        return None
    name = f"step-{before[-1]:06d}"
    if before[-1] < wanted:
        warn(f"the state after step {wanted} was not saved; using {name}, the nearest before it")
    load_checkpoint(run / "checkpoints" / name, root, None, ranks)
    return name


def _typical_length(run: Path) -> float:
    """A document length for which the attention backend of this run is chosen again."""
    served = str(read_plan_json(run).get("attention", ""))
    return {"cudnn": attention.CUDNN_MIN_LENGTH, "fa4": attention.FA4_MIN_LENGTH}.get(served, 0)


def _rerun(
    saved: SavedBatch, config: Config, root: LossModel, ranks: Ranks, precision: PrecisionPolicy
) -> tuple[Diagnosis, StepResult]:
    content, context = saved.content, precision.autocast(ranks.device)
    step = content["step"] - 1
    diagnoser = Diagnoser(root, ranks, content["seed"], context, content["loss_scale"], max_conversations=None)
    findings = diagnoser.diagnose(saved.step, step, "nonfinite")
    forward = ForwardPasses(
        root, saved.step, step, device=ranks.device, seed=content["seed"], autocast=context,
        loss_scale=content["loss_scale"],
    )  # fmt: skip
    return findings, train_step(forward, None, ranks=ranks, clip_norm=config.train.clip_norm).wait()


def _is_reproduced(saved: SavedBatch, result: StepResult, exact: bool) -> bool | None:
    """None: unknown, because the weights are not those of the step."""
    match saved.content["kind"]:
        case "empty":
            return saved.step.totals(0).supervised == 0
        case "spike":
            return result.loss > saved.content["limit"] if exact else None
    return True if not result.finite else (False if exact else None)


def _print_results(
    saved: SavedBatch, config: Config, findings: Diagnosis, result: StepResult, reproduced: bool | None
) -> None:
    tokenizer = load_run_tokenizer(config)
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("place", overflow="fold")
    for title in ("tokens", "loss", "gradient"):
        table.add_column(title, justify="right", no_wrap=True)
    table.add_column("first bad layer", overflow="fold")
    table.add_column("text")
    for found in findings.conversations:
        each = _conversation_result(saved, found)
        ids = saved.content["conversations"][found.documents[0]]["ids"]
        text = " ".join(preview_text(tokenizer, ids, _PREVIEW_CHARACTERS).split())
        place = f"{each['source']}:{each['line']}"
        table.add_row(
            Text(escape_controls(place)), str(each["tokens"]), _format_number(each["loss"]),
            _format_number(each["grad_norm"]), Text(found.layer or ""), Text(escape_controls(text)),
            style="red" if found.layer else None,
        )  # fmt: skip
    info(table)
    info(
        f"together: loss {_format_number(finite_or_none(result.loss))}, "
        f"gradient norm {_format_number(finite_or_none(result.grad_norm))}"
    )
    if findings.nonfinite_weights:
        info(f"weights that are not finite: {', '.join(findings.nonfinite_weights)}")
    reason = saved.content["reason"]
    words = {True: "reproduced", False: "not reproduced", None: "unknown whether reproduced"}
    because = "; its weights were not saved" if reproduced is None else ""
    info(f"step {saved.content['step']}: {words[reproduced]} ({reason}{because})")


def _conversation_result(saved: SavedBatch, found: DocumentResult) -> dict[str, Any]:
    each = saved.content["conversations"][found.documents[0]]
    return {
        "source": each["source"],
        "line": each["line"],
        "number": each["number"],
        "tokens": found.tokens,
        "loss": finite_or_none(found.loss),
        "grad_norm": finite_or_none(found.grad_norm),
        "layer": found.layer,
    }


def _format_number(value: float | None) -> str:
    return "—" if value is None else f"{value:.4g}"


def _saved_document(ids: list[int], supervised: list[list[int]]) -> SavedDocument:
    loss = np.zeros(len(ids), dtype=np.uint8)
    for first, end in supervised:
        loss[first:end] = 1
    return SavedDocument(np.array(ids, dtype=np.int64), loss)
