"""`whet eval`: loss and task scores of a run or model, compared with its base or another model."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from whet.checkpoint import directory
from whet.checkpoint.load import load_checkpoint
from whet.config import Config, read_config
from whet.core.config import load_config
from whet.core.console import set_quiet, silence_libraries, warn
from whet.core.distributed import Ranks, init_distributed
from whet.core.errors import WhetError
from whet.core.files import read_json, write_json
from whet.core.run_folder import parse_run_reference
from whet.data.render.renderer import Renderer
from whet.inference.comparison import results_from_json, results_to_json, summarize_scores
from whet.inference.tasks.task import TaskResult
from whet.inference.tasks.task_registry import load_tasks
from whet.model.lora.peft_adapters import unwrap_peft
from whet.model.loss.loss_model import LossModel
from whet.model.packing_check import require_finite_logits
from whet.run.assemble import build_loss_model, build_model, install_attention
from whet.run.data import RunData, load_recorded_data, load_run_tokenizer, prepare_data, require_same_tokenizer
from whet.run.evaluation import evaluate_tasks, evaluate_validation
from whet.run.load_models import load_inference_model
from whet.run.resume import changed_settings, recorded_template_date, require_same_base
from whet.training.precision import PrecisionPolicy, resolve_precision


@dataclass(frozen=True, slots=True)
class EvaluationRequest:
    """What the user wants to know of a run or a model."""

    reference: str
    overrides: Sequence[str] = ()
    tasks: str | None = None
    """Names and files with commas between them, or a YAML list."""
    data: str | None = None
    """A file to measure the loss on."""
    against: str | None = None
    """A run, a model, or a file that an evaluation left."""
    base: bool = True
    """Measure the model before training too, where it is a run."""
    out: str | None = None
    """A file for the result with all answers."""

    def settings(self) -> list[str]:
        tasks = [] if self.tasks is None else [f"eval.tasks={_tasks_as_yaml(self.tasks)}"]
        # which checkpoints stay was decided by the run's own tasks; with others, its eval.best may not be among them
        return ["checkpoint.keep_best=0", *self.overrides, *tasks]


@dataclass(frozen=True, slots=True)
class EvaluationResult:
    """What was found out about one model."""

    about: dict[str, Any]
    losses: dict[str, float]
    scored: list[TaskResult]
    before: list[TaskResult] | None = None
    """The same tasks before training."""


def evaluate(question: EvaluationRequest) -> dict[str, Any]:
    """Losses, scores with their intervals, and the difference from another model."""
    silence_libraries()
    ranks = init_distributed()
    if not ranks.is_main:
        set_quiet()
    config = _evaluation_config(question)
    load_tasks(config.eval)  # what is wrong with them is told before a model is loaded
    if question.against is not None and not config.eval.tasks:
        raise WhetError("--against compares by tasks, and there are none. Give some: --tasks orders,my.jsonl")
    other = None if question.against is None else _other_task_results(question, config, ranks)
    wants_base = question.base and question.against is None
    found = _evaluate_reference(question, config, ranks, wants_base)
    if not found.losses and not found.scored:
        raise WhetError(
            f"{question.reference}: there is neither validation data nor a task, so there is nothing to measure. Give "
            "some: --tasks orders, or --data FILE"
        )
    result = {**found.about, **_with_perplexity(found.losses)}
    if question.against is not None:
        result["against"] = question.against
    if found.scored:
        result |= {f"task/{each.task}": each.score for each in found.scored}
        result |= summarize_scores(found.scored, other or found.before, "base" if other is None else "against")
    file = _result_file(question, found)
    if file is not None and ranks.is_main:
        result |= _write_result(file, result, found.scored)
    ranks.shutdown()
    return result


def _tasks_as_yaml(tasks: str) -> str:
    """As YAML: what is one already stays."""
    if tasks.lstrip().startswith("["):
        return tasks
    return json.dumps([name.strip() for name in tasks.split(",") if name.strip()])


def _is_run(reference: str) -> bool:
    return (parse_run_reference(reference)[0] / "config.yaml").exists()


def _evaluation_config(question: EvaluationRequest) -> Config:
    """A run's, with what the user changes of it; a model has none, and gets the usual one."""
    if not _is_run(question.reference):
        sources = [f"data.sources={json.dumps([{'path': question.data or 'builtin:orders'}])}"]
        return load_config(
            Config, None, [f"model.path={json.dumps(question.reference)}", *sources, *question.settings()]
        )
    path, _ = parse_run_reference(question.reference)
    held = [] if question.data is None else [f"data.validation={json.dumps({'sources': [{'path': question.data}]})}"]
    config = read_config(path / "config.yaml", [*question.settings(), *held]).with_folder(path)
    changed = [key for key, _, _ in changed_settings(path, config) if not key.startswith("data.validation")]
    if changed:
        raise WhetError(
            f"{changed[0]}: an evaluation cannot change what was trained, or trained conversations might be measured. "
            "It takes eval.*, data.validation.sources and train.micro_rows"
        )
    return config


def _evaluate_reference(
    question: EvaluationRequest, config: Config, ranks: Ranks, wants_base: bool
) -> EvaluationResult:
    found = (
        _evaluate_run(question, config, ranks, wants_base)
        if _is_run(question.reference)
        else _evaluate_model(question, config, ranks)
    )
    gc.collect()  # before another model is loaded
    if ranks.device.type != "cpu":
        torch.accelerator.empty_cache()
    return found


def _other_task_results(question: EvaluationRequest, config: Config, ranks: Ranks) -> list[TaskResult]:
    """The other model's scores on the same tasks; from a file they need not be found out again."""
    assert question.against is not None
    if question.against.endswith(".json"):
        return results_from_json(read_json(Path(question.against)), question.against)
    other = dataclasses.replace(question, reference=question.against, data=None, overrides=(), tasks=None)
    its = _evaluation_config(other).model_copy(update={"eval": config.eval})
    return _evaluate_reference(dataclasses.replace(other, data=""), its, ranks, wants_base=False).scored


def _evaluate_run(question: EvaluationRequest, config: Config, ranks: Ranks, wants_base: bool) -> EvaluationResult:
    """The model as it was before training needs no second copy: the checkpoint is loaded into it afterwards."""
    path, step = parse_run_reference(question.reference)
    number = directory.resolve_step(path / "checkpoints", step)
    require_same_tokenizer(config, path / "ledger.json")
    precision = resolve_precision(config, ranks.device, trains=False)
    context = precision.autocast(ranks.device)
    model = build_model(config, precision, ranks.device, 0)
    root = LossModel(unwrap_peft(model))
    renderer = Renderer(load_run_tokenizer(config), config.data.train_on)
    before = evaluate_tasks(config, renderer, root, ranks, context) if wants_base and config.eval.tasks else None
    manifest = load_checkpoint(path / "checkpoints" / directory.checkpoint_name(number), root, None, ranks)
    require_same_base(config, manifest, ranks)
    with context:
        require_finite_logits(root.language_model)
    losses: dict[str, float] = {}
    if config.data.validation is not None and question.data != "":
        losses = _validation_losses(config, _run_data(path, config), model, ranks, precision)
    scored = evaluate_tasks(config, renderer, root, ranks, context)
    return EvaluationResult({"run": str(path), "step": number}, losses, scored, before)


def _run_data(path: Path, config: Config) -> RunData:
    if config.data.validation == read_config(path / "config.yaml").data.validation:
        return load_recorded_data(config, path / "ledger.json")
    return prepare_data(config, recorded_template_date(path))


def _validation_losses(
    config: Config, data: RunData, model: torch.nn.Module, ranks: Ranks, precision: PrecisionPolicy
) -> dict[str, float]:
    root = build_loss_model(config, model, precision, ranks.device, len(data.tokenizer), data.max_document_length)
    return evaluate_validation(config, data, root, ranks, precision.autocast(ranks.device))


def _evaluate_model(question: EvaluationRequest, config: Config, ranks: Ranks) -> EvaluationResult:
    """A model folder or one of a hub, in the numbers that it was saved in."""
    ready = load_inference_model(question.reference)
    kept = next(ready.model.parameters()).dtype
    precision = PrecisionPolicy({torch.float64: "fp64"}.get(kept, "as saved"), kept, kept)
    losses: dict[str, float] = {}
    if question.data:
        made = prepare_data(config)
        data = dataclasses.replace(
            made, validation=made.train.store, validation_documents=np.arange(len(made.train.store), dtype=np.int64)
        )
        install_attention(config, ready.model, precision, ranks.device, data.typical_length)
        losses = _validation_losses(config, data, ready.model, ranks, precision)
    root = LossModel(ready.model)
    scored = evaluate_tasks(config, ready.renderer, root, ranks, contextlib.nullcontext())
    return EvaluationResult({"model": question.reference}, losses, scored)


def _with_perplexity(losses: dict[str, float]) -> dict[str, float]:
    """e to the loss, where that is a number."""
    if losses.get("val_loss", math.inf) < 700:
        return {**losses, "val_perplexity": math.exp(losses["val_loss"])}
    return losses


def _result_file(question: EvaluationRequest, found: EvaluationResult) -> Path | None:
    """Answers are kept beside the run they are of, so that it can be compared later without asking again."""
    if question.out is not None:
        return Path(question.out).expanduser()
    if not found.scored or "run" not in found.about:
        return None
    return Path(found.about["run"]) / "evals" / f"{directory.checkpoint_name(found.about['step'])}.json"


def _write_result(file: Path, result: dict[str, Any], scored: list[TaskResult]) -> dict[str, str]:
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        write_json(file, {**result, "scored": results_to_json(scored)})
    except OSError as error:
        warn(f"{file} could not be written: {error.strerror}; the result is not kept")
        return {}
    return {"file": str(file)}
