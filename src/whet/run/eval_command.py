"""`whet eval`: loss and task scores of a run or model, compared with its base or another model."""

from __future__ import annotations

import dataclasses
import functools
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
from whet.config import Config, read_config
from whet.core import launch_env
from whet.core.checksums import read_hashed_json, write_hashed_json
from whet.core.config import load_config
from whet.core.console import set_quiet, silence_libraries, warn
from whet.core.distributed import Ranks, init_distributed
from whet.core.errors import WhetError
from whet.core.files import require_file_place, user_path
from whet.data.config import DataConfig, Source
from whet.data.read.containers.locate import locate_containers
from whet.data.read.detection import detect_source_format
from whet.data.render.renderer import Renderer
from whet.inference.comparison import results_from_json, results_to_json, summarize_scores
from whet.inference.tasks.load_tasks import load_tasks
from whet.inference.tasks.task import TaskResult
from whet.model.lora.peft_adapters import unwrap_peft
from whet.model.loss.loss_model import LossModel
from whet.model.packing_check import require_finite_logits
from whet.parallel.config import ParallelConfig
from whet.registry.references import pin_version
from whet.run.data import RunData, load_ledger_data, load_run_tokenizer, prepare_data, require_same_tokenizer
from whet.run.evaluation import evaluate_tasks, own_metrics
from whet.run.models.load_models import find_run, load_inference_model, restore_checkpoint_
from whet.run.models.model_builder import build_loss_model, build_model, install_attention
from whet.run.resume import changed_settings, read_run_config, recorded_data
from whet.run.validation import evaluate_validation
from whet.training.precision import PrecisionPolicy, resolve_precision


@dataclass(frozen=True, slots=True)
class EvaluationRequest:
    """The arguments of `whet eval`."""

    reference: str
    overrides: Sequence[str] = ()
    tasks: str | None = None
    """Names and files separated by commas, or a YAML list."""
    data: str | None = None
    """A file to compute the loss on; for a model, also a recipe, which says how its data is read."""
    against: str | None = None
    """A run, a model, or the result file of an earlier evaluation."""
    base: bool = True
    """Score the base model of a run too."""
    out: str | None = None
    """A file for the result with all answers."""

    def config_overrides(self) -> list[str]:
        tasks = [] if self.tasks is None else [f"eval.tasks={_tasks_as_yaml(self.tasks)}"]
        # keep_best=0: with other tasks, the metric eval.best of the run may not exist
        return ["checkpoint.keep_best=0", *self.overrides, *tasks]


@dataclass(frozen=True, slots=True)
class EvaluationResult:
    """The losses and task results of one model."""

    identity: dict[str, Any]
    """{"run", "step"} or {"model"}: what was evaluated."""
    losses: dict[str, float]
    task_results: list[TaskResult]
    base_task_results: list[TaskResult] | None = None
    """Those of a run's base model."""


def evaluate(request: EvaluationRequest) -> dict[str, Any]:
    """Losses, task scores with intervals, and the difference from another model; what `whet eval --json` prints."""
    silence_libraries()
    if launch_env.rank() > 0:
        set_quiet()
    if request.out is not None:
        _require_result_place(request.out)
    models = pin_version(request.reference), request.against and pin_version(request.against)
    request = dataclasses.replace(request, reference=models[0], against=models[1])
    config = _evaluation_config(request)
    load_tasks(config.eval)  # reports errors before a model is loaded
    ranks = init_distributed(share_gpu=config.launch.share_gpu, kind=config.run.device)
    if len(set(ranks.all_gather([models]))) > 1:
        raise WhetError(
            f"{' and '.join(filter(None, models))}: an alias moved while the processes started. Start again"
        )
    if request.against is not None and not config.eval.tasks:
        raise WhetError("--against compares task scores, and there is no task. Add some: --tasks orders,my.jsonl")
    other = None if request.against is None else _other_task_results(request, config, ranks)
    found = _evaluate_reference(request, config, ranks, with_base=request.base and other is None)
    if not found.losses and not found.task_results:
        raise WhetError(
            f"{request.reference}: nothing to evaluate: there is neither validation data nor a task. Add --tasks "
            "orders or --data FILE"
        )
    result = {**found.identity, **_with_perplexity(found.losses)}
    if request.against is not None:
        result["against"] = request.against
    if found.task_results:
        result |= {f"task/{each.task}": each.score for each in found.task_results}
        if other is None:
            result |= summarize_scores(found.task_results, found.base_task_results, "base")
        else:
            result |= summarize_scores(found.task_results, other, "against")
    file = _result_file(request, found)
    if file is not None and ranks.is_main:
        result |= _write_result(file, result, found.task_results)
    ranks.shutdown()
    return result


def _tasks_as_yaml(tasks: str) -> str:
    if tasks.lstrip().startswith("["):
        return tasks
    return json.dumps([name.strip() for name in tasks.split(",") if name.strip()])


def _evaluation_config(request: EvaluationRequest) -> Config:
    """The run's configuration with the user's changes; for a model, the defaults with its path."""
    run = find_run(request.reference)
    is_recipe = (request.data or "").endswith((".yaml", ".yml"))
    if run is None:
        model = f"model.path={json.dumps(request.reference)}"
        if is_recipe:  # its data; the model is whole already, and as it was saved
            config = read_config(user_path(request.data or ""), [model, *request.config_overrides()])
            return config.model_copy(update={"adapter": None, "quantize": None, "parallel": ParallelConfig()})
        sources = [{"path": request.data or "builtin:orders"}]
        return load_config(Config, None, [model, f"data.sources={json.dumps(sources)}", *request.config_overrides()])
    path, _ = run
    if is_recipe:
        raise WhetError(
            f"--data: {request.data} is a recipe, and {path} is a run, which has its own format and markers. Give the "
            "data file: --data FILE"
        )
    config = read_run_config(path, request.config_overrides())
    if request.data is not None:
        validation = {"sources": [{"path": request.data, **_common_format(config.data, request.data)}]}
        data = [f"data.validation={json.dumps(validation)}"]
        config = read_run_config(path, [*data, *request.config_overrides()])
    recorded = read_config(path / "config.yaml", expand="set")
    unknown = [key for key, _, _ in changed_settings(path, recorded)]  # from variables that only training needs
    changed = [key for key, _, _ in changed_settings(path, config) if key not in unknown]
    changed = [key for key in changed if not key.startswith("data.validation")]
    if changed:
        raise WhetError(
            f"{changed[0]}: an evaluation cannot change how the run was trained: it might measure conversations that "
            "were trained on. It accepts eval.*, data.validation.sources and train.micro_rows"
        )
    return config


def _common_format(data: DataConfig, path: str) -> dict[str, Any]:
    """How a run's training data is read, where all its sources agree: a file given to --data is read alike. The loss
    mask of token files follows rules; all others have a format and names of fields. Texts given to a run of token
    files are marked if its recipe has markers."""
    is_token_file, found = _is_token_file(path), dict[str, Any]()
    sources = [each for each in data.sources if _is_token_file(each.path, each.format) == is_token_file]
    if not sources:
        return {"format": "marked"} if data.markers is not None and not is_token_file and _is_text(path) else {}
    for key in ("format", "mask") if is_token_file else ("format", "fields"):
        first, *others = (source.model_dump(mode="json")[key] for source in sources)
        if first not in (None, "auto") and all(other == first for other in others):
            found[key] = first
    return found


def _is_token_file(path: str, format_: str = "auto") -> bool:
    folder = user_path(path)
    named = path.endswith((".bin", ".idx")) or user_path(f"{path}.bin").is_file()
    return format_ == "tokens" or named or (folder.is_dir() and any(folder.glob("*.bin")))


def _is_text(path: str) -> bool:
    """Whether no format of conversations is recognised."""
    source = Source(path=path)
    try:
        return detect_source_format(locate_containers(source), source).format == "text"
    except WhetError:
        return True


def _other_task_results(request: EvaluationRequest, config: Config, ranks: Ranks) -> list[TaskResult]:
    """The results of --against on the same tasks: from a file, or by evaluating the other model."""
    assert request.against is not None
    if request.against.endswith(".json"):
        scored = read_hashed_json(Path(request.against), "Evaluate that model again: whet eval")
        results = results_from_json(scored, request.against)
        known = {result.task for result in results}
        if missing := sorted({task.name for task, _ in load_tasks(config.eval)} - known):
            raise WhetError(
                f"--against {request.against}: it has no result of {', '.join(missing)}, only of "
                f"{', '.join(sorted(known))}. Name such tasks with --tasks, or give the model instead of its file"
            )
        return results
    other = dataclasses.replace(request, reference=request.against, data=None, overrides=(), tasks=None)
    other_config = _evaluation_config(other).model_copy(update={"eval": config.eval})
    return _evaluate_reference(other, other_config, ranks, with_loss=False).task_results


def _evaluate_reference(
    request: EvaluationRequest, config: Config, ranks: Ranks, with_base: bool = False, with_loss: bool = True
) -> EvaluationResult:
    run = find_run(request.reference)
    if run is not None:
        found = _evaluate_run(*run, config, ranks, with_base, with_loss)
    else:
        found = _evaluate_model(request.reference, config, ranks, with_loss and bool(request.data))
    gc.collect()  # before another model is loaded
    if ranks.device.type != "cpu":
        torch.accelerator.empty_cache()
    return found


def _evaluate_run(
    path: Path, which: str, config: Config, ranks: Ranks, with_base: bool, with_loss: bool
) -> EvaluationResult:
    """The base is scored first, in the same model: then the checkpoint is loaded into it."""
    step = directory.resolve_step(path / "checkpoints", which)
    require_same_tokenizer(config, path / "ledger.json")
    precision = resolve_precision(config, ranks.device, trains=False)
    autocast = functools.partial(precision.autocast, ranks.device)
    model = build_model(config, precision, ranks.device, 0)
    root = LossModel(unwrap_peft(model))
    renderer = Renderer(load_run_tokenizer(config), config.data.train_on, system=config.data.system)
    base_task_results = None
    if with_base and config.eval.tasks:
        base_task_results = evaluate_tasks(config, renderer, root, ranks, autocast)
    restore_checkpoint_(model, config, step, ranks)
    with autocast():
        require_finite_logits(root.language_model)
    losses: dict[str, float] = {}
    if config.data.validation is not None and with_loss:
        losses = _validation_losses(config, _run_data(path, config), model, ranks, precision)
    task_results = evaluate_tasks(config, renderer, root, ranks, autocast)
    losses |= _own_metrics(config, task_results, ranks)
    return EvaluationResult({"run": str(path), "step": step}, losses, task_results, base_task_results)


def _run_data(path: Path, config: Config) -> RunData:
    """The data that the run recorded; prepared again if the validation data was changed."""
    if config.data.validation == read_config(path / "config.yaml", expand="set").data.validation:
        return load_ledger_data(config, path / "ledger.json")
    return prepare_data(config, *recorded_data(path))


def _validation_losses(
    config: Config, data: RunData, model: torch.nn.Module, ranks: Ranks, precision: PrecisionPolicy
) -> dict[str, float]:
    with data.check() as store_check:
        root = build_loss_model(config, model, precision, ranks.device, len(data.tokenizer), data.max_document_length)
        losses = evaluate_validation(config, data, root, ranks, precision.autocast(ranks.device)).metrics
        store_check.require_intact()
    return losses


def _evaluate_model(reference: str, config: Config, ranks: Ranks, with_loss: bool) -> EvaluationResult:
    """A model that is not a run, in the dtype it was saved in."""
    loaded = load_inference_model(reference)
    dtype = next(loaded.model.parameters()).dtype
    precision = PrecisionPolicy("fp64" if dtype == torch.float64 else "as saved", dtype, dtype)
    losses: dict[str, float] = {}
    if with_loss:
        data = prepare_data(config)
        if data.validation is None:
            store = data.train.store
            every = np.arange(len(store), dtype=np.int64)
            data = dataclasses.replace(data, validation=store, validation_documents=every)
        install_attention(config, loaded.model, precision, ranks.device, data.typical_length)
        losses = _validation_losses(config, data, loaded.model, ranks, precision)
    task_results = evaluate_tasks(config, loaded.renderer, LossModel(loaded.model), ranks)
    losses |= _own_metrics(config, task_results, ranks)
    return EvaluationResult({"model": reference}, losses, task_results)


def _own_metrics(config: Config, task_results: list[TaskResult], ranks: Ranks) -> dict[str, float]:
    """Of the answers to tasks; a run's recipe may have only prompts, which `whet eval` does not answer."""
    samples = [sample for result in task_results for sample in result.samples]
    return own_metrics(config, samples, ranks) if samples else {}


def _with_perplexity(losses: dict[str, float]) -> dict[str, float]:
    """Adds exp(val_loss), unless it would overflow."""
    if losses.get("val_loss", math.inf) < 700:
        return {**losses, "val_perplexity": math.exp(losses["val_loss"])}
    return losses


def _require_result_place(out: str) -> None:
    """Refuse a place for --out where no file can be written: an evaluation may take hours."""
    file = user_path(out)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise WhetError(f"--out {out}: cannot be written: {error.strerror}. Give another place") from None
    require_file_place("--out", file)


def _result_file(request: EvaluationRequest, found: EvaluationResult) -> Path | None:
    """--out, or evals/STEP.json in the run folder: a later --against reads the answers from there."""
    if request.out is not None:
        return user_path(request.out)
    if not found.task_results or "run" not in found.identity:
        return None
    return Path(found.identity["run"]) / "evals" / f"{directory.checkpoint_name(found.identity['step'])}.json"


def _write_result(file: Path, result: dict[str, Any], task_results: list[TaskResult]) -> dict[str, str]:
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        write_hashed_json(file, {**result, "scored": results_to_json(task_results)})
    except OSError as error:
        warn(f"{file}: cannot write ({error.strerror}); the result is not saved")
        return {}
    return {"file": str(file)}
