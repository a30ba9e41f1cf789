"""A faulty step, run again from the file that it left: each conversation alone, then all together."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import Field, ValidationError
from rich.table import Table
from rich.text import Text

from whet.checkpoint import place
from whet.checkpoint.load import load
from whet.config import Config, read_config
from whet.core.config import Section
from whet.core.console import say, warn
from whet.core.errors import WhetError
from whet.core.files import read_json
from whet.core.ranks import Ranks, start_ranks, who_am_i
from whet.data.batch import Shape
from whet.data.saved_step import SavedDocument, SavedStep
from whet.model import attention
from whet.model.lora import vocabulary_of
from whet.model.loss import LossModel
from whet.recipe.data import hush_libraries, tokenizer_of
from whet.recipe.fault import shortened
from whet.recipe.parts import Arithmetic, be_deterministic, build_model, choose_arithmetic, make_root
from whet.train.faults import Examined, Examiner, Findings
from whet.train.metrics import known
from whet.train.passes import Passes
from whet.train.step import StepResult, find_gradients

_BEGINNING = 48
_NOT_ONE = "this is not a batch that a run saved. Give a file faults/step-NNNNNN.json of a run directory"


class _Conversation(Section):
    number: int
    source: str
    line: int
    ids: list[Annotated[int, Field(ge=0)]] = Field(min_length=1)
    supervised: list[Annotated[tuple[int, int], Field(strict=False)]]


class _MicroBatch(Section):
    rank: int
    row: int
    documents: list[int]


class _Size(Section):
    tokens: int = Field(ge=1)
    documents: int = Field(ge=0)
    supervised: int = Field(default=0, ge=0)


class _File(Section):
    """What a file in faults/ holds."""

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
    precision: Literal["fp64", "fp32", "bf16", "fp16", "fp8", "fp8-rowwise"]
    loss_scale: float = Field(gt=0)
    longest: int = Field(ge=1)
    shapes: list[_Size]
    conversations: list[_Conversation] = Field(min_length=1)
    micro_batches: list[_MicroBatch]


@dataclass(frozen=True, slots=True)
class Saved:
    """The content of a file in faults/."""

    content: dict[str, Any]
    step: SavedStep

    @classmethod
    def read(cls, file: Path) -> Saved:
        try:
            content = _File.model_validate(read_json(file)).model_dump()
            places = {each["number"]: place for place, each in enumerate(content["conversations"])}
            layout = [(part["row"], [places[n] for n in part["documents"]]) for part in content["micro_batches"]]
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(map(str, first["loc"]))
            raise WhetError(f"{file}: {_NOT_ONE} ({where}: {first['msg']})") from None
        except KeyError as error:
            raise WhetError(f"{file}: {_NOT_ONE} (conversation {error} is missing)") from None
        held = [_document(each["ids"], each["supervised"]) for each in content["conversations"]]
        shapes = [Shape(**shape) for shape in content["shapes"]]
        return cls(content, SavedStep(held, layout, content["longest"], shapes))


def replay(file: Path) -> dict[str, Any]:
    """Run a saved step again and show what comes of each conversation; the weights and the run are left alone."""
    if who_am_i()[1] > 1:
        raise WhetError("--replay: a saved step is run again in one process; start it without torchrun")
    hush_libraries()
    saved = Saved.read(file)
    run = _run_of(file, saved)
    config = read_config(run / "config.yaml").at(run)
    be_deterministic(config)
    ranks = start_ranks()
    arithmetic = choose_arithmetic(config, ranks.device, trains=False)
    tokens = len(tokenizer_of(config))
    model = build_model(config, arithmetic, ranks.device, tokens, typical=_typical(run))
    root = make_root(config, model, arithmetic, ranks.device, tokens, saved.step.longest).train()
    if saved.step.highest_id >= vocabulary_of(model):
        raise WhetError(f"{file}: it holds ids that this run's model does not know. Was the file edited?")
    checkpoint = _restore(saved, run, root, ranks)
    if arithmetic.name != saved.content["precision"]:
        warn(f"the run computed in {saved.content['precision']}; this device computes in {arithmetic.name}")
    findings, result = _again(saved, config, root, ranks, arithmetic)
    exact = checkpoint == saved.content["checkpoint"]
    reproduced = _came_again(saved, result, exact)
    _show(saved, config, findings, result, reproduced)
    return {
        "run": str(run),
        "step": saved.content["step"],
        "kind": saved.content["kind"],
        "checkpoint": checkpoint,
        "reproduced": reproduced,
        "loss": known(result.loss),
        "grad_norm": known(result.grad_norm),
        "conversations": [_as_dict(saved, found) for found in findings.alone],
        "weights": findings.weights,
    }


def _run_of(file: Path, saved: Saved) -> Path:
    """The run that holds the file, which may have been moved; else the one that wrote it."""
    holder = file.resolve().parent.parent
    run = holder if (holder / "config.yaml").exists() else Path(saved.content["run"])
    if not (run / "config.yaml").exists():
        raise WhetError(f"{file}: its run {run} is gone, and with it the model that the batch was run through")
    return run


def _restore(saved: Saved, run: Path, root: LossModel, ranks: Ranks) -> str | None:
    """Load the state before the step, or the nearest before that; gives its name, None for the model at the start."""
    wanted = saved.content["step"] - 1
    before = [step for step in place.steps_in(run / "checkpoints") if step <= wanted]
    if not before and wanted:
        warn(f"no checkpoint of step {wanted} or before is left: the model is the one that the run started from")
    if not before:
        return None
    name = f"step-{before[-1]:06d}"
    if before[-1] < wanted:
        warn(f"the state after step {wanted} was not saved; the nearest before it is {name}")
    load(run / "checkpoints" / name, root, None, ranks)
    return name


def _typical(run: Path) -> float:
    """A length of documents for which attention is chosen as it was for this run."""
    try:
        served = str(read_json(run / "plan.json").get("attention", ""))
    except WhetError:
        return 0
    return attention.LONG if served == "cudnn" else 0


def _again(
    saved: Saved, config: Config, root: LossModel, ranks: Ranks, arithmetic: Arithmetic
) -> tuple[Findings, StepResult]:
    content, context = saved.content, arithmetic.context(ranks.device)
    step = content["step"] - 1
    examiner = Examiner(root, ranks, content["seed"], context, content["loss_scale"], most=None)
    findings = examiner.examine(saved.step, step, "nonfinite")
    passes = Passes(
        root, saved.step, step, device=ranks.device, seed=content["seed"], arithmetic=context,
        loss_scale=content["loss_scale"],
    )  # fmt: skip
    return findings, find_gradients(passes, ranks=ranks, clip_norm=config.train.clip_norm, stop=False)


def _came_again(saved: Saved, result: StepResult, exact: bool) -> bool | None:
    """None: with other weights than those of the step it cannot be told."""
    match saved.content["kind"]:
        case "empty":
            return saved.step.totals(0).supervised == 0
        case "spike":
            return result.loss > saved.content["limit"] if exact else None
    return True if not result.finite else (False if exact else None)


def _show(saved: Saved, config: Config, findings: Findings, result: StepResult, reproduced: bool | None) -> None:
    tokenizer = tokenizer_of(config)
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("place", overflow="fold")
    for title in ("tokens", "loss", "gradient"):
        table.add_column(title, justify="right", no_wrap=True)
    table.add_column("first bad layer", overflow="fold")
    table.add_column("text")
    for found in findings.alone:
        each = _as_dict(saved, found)
        ids = saved.content["conversations"][found.documents[0]]["ids"]
        text = " ".join(shortened(tokenizer, ids, _BEGINNING).split())
        table.add_row(
            Text(f"{each['source']}:{each['line']}"), str(each["tokens"]), _number(each["loss"]),
            _number(each["grad_norm"]), Text(found.layer or ""), Text(text),
            style="red" if found.layer else None,
        )  # fmt: skip
    say(table)
    say(f"together: loss {_number(known(result.loss))}, gradient norm {_number(known(result.grad_norm))}")
    if findings.weights:
        say(f"weights that are not finite themselves: {', '.join(findings.weights)}")
    reason = saved.content["reason"]
    words = {True: "it came again", False: "it did not come again", None: "whether it came again cannot be told"}
    because = "; its weights were not saved" if reproduced is None else ""
    say(f"step {saved.content['step']}: {words[reproduced]} ({reason}{because})")


def _as_dict(saved: Saved, found: Examined) -> dict[str, Any]:
    each = saved.content["conversations"][found.documents[0]]
    return {
        "source": each["source"],
        "line": each["line"],
        "number": each["number"],
        "tokens": found.tokens,
        "loss": known(found.loss),
        "grad_norm": known(found.grad_norm),
        "layer": found.layer,
    }


def _number(value: float | None) -> str:
    return "—" if value is None else f"{value:.4g}"


def _document(ids: list[int], supervised: list[list[int]]) -> SavedDocument:
    loss = np.zeros(len(ids), dtype=np.uint8)
    for first, end in supervised:
        loss[first:end] = 1
    return SavedDocument(np.array(ids, dtype=np.int64), loss)
