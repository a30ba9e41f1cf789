"""Validation loss and task scores of the model of a run, during training and for `whet eval`."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

from whet.config import Config
from whet.core.distributed import Ranks
from whet.core.errors import WhetError
from whet.core.plugins import load_plugin, require_number
from whet.data.plan.planner import plan_single_step
from whet.data.render.renderer import Renderer
from whet.inference.fixed_prompts import answer_prompts, given_prompts, held_out_prompts
from whet.inference.inference_model import InferenceModel, stop_token_ids
from whet.inference.tasks.load_tasks import loaded_tasks
from whet.inference.tasks.scoring import score_tasks
from whet.inference.tasks.task import AnsweredExample, TaskResult
from whet.inference.validation import ValidationMetadata, ValidationResult, source_names, validation_loss
from whet.model.lora.peft_adapters import embedding_rows
from whet.model.loss.loss_model import LossModel
from whet.parallel.fsdp import is_sharded, reshard
from whet.run.data import RunData
from whet.run.model_builder import make_loader
from whet.tokenizer.token_bytes import bytes_per_token
from whet.training.precision import PrecisionPolicy
from whet.training.run_state import Evaluation


def evaluate_run(
    config: Config, data: RunData, root: LossModel, ranks: Ranks, precision: PrecisionPolicy
) -> Evaluation:
    """The metrics of the model's current weights, its answers to the tasks, and its losses by conversation."""
    samples: list[AnsweredExample] = []
    autocast = functools.partial(precision.autocast, ranks.device)
    metrics, losses = evaluate_validation(config, data, root, ranks, autocast())
    for result in evaluate_tasks(
        config, Renderer(data.tokenizer, config.data.train_on, system=config.data.system), root, ranks, autocast
    ):
        metrics[f"task/{result.task}"] = result.score
        if len(result.samples) < result.requested:
            metrics[f"scored/{result.task}"] = len(result.samples)
        samples += result.samples
    samples += _answer_fixed_prompts(config, data, root, ranks, autocast)
    metrics |= own_metrics(config, samples, ranks)
    reshard(root)
    return Evaluation(metrics, samples, losses)


def own_metrics(config: Config, samples: Sequence[AnsweredExample], ranks: Ranks) -> dict[str, float]:
    """The metrics of eval.metrics over all answers; rank 0 computes them for all."""
    found = []
    for name in config.eval.metrics if ranks.is_main else ():
        metric = load_plugin("metrics", name, "eval.metrics")
        found.append((f"metric/{name}", require_number(metric([each.as_dict() for each in samples]), f"metric {name}")))
    return dict(ranks.all_gather(found))


def evaluate_validation(
    config: Config, data: RunData, root: LossModel, ranks: Ranks, autocast: AbstractContextManager[object]
) -> ValidationResult:
    """The metrics on the validation data; empty if there is none."""
    if data.validation is None:
        return ValidationResult({})
    plan = plan_single_step(
        data.validation.lengths, data.validation_documents, config.row_length, config.data.packing,
        config.data.bins, config.validation_rows,
    )  # fmt: skip
    if root.unpacked:
        plan = plan.unpacked(data.validation.lengths)
    with contextlib.closing(make_loader(config, data.validation, plan, ranks, root)) as loader:
        result = validation_loss(root, loader, ranks, autocast, _validation_metadata(data, root))
    if len(plan.documents) < len(data.validation_documents):
        result.metrics["val_part"] = len(plan.documents) / len(data.validation_documents)
    return result


def evaluate_tasks(
    config: Config,
    renderer: Renderer,
    root: LossModel,
    ranks: Ranks,
    autocast: Callable[[], AbstractContextManager[object]] = contextlib.nullcontext,
) -> list[TaskResult]:
    """The results of the model's current weights on the configured tasks."""
    if not config.eval.tasks:
        return []
    stop_ids = stop_token_ids(renderer, config.model)
    model = InferenceModel(root.language_model, renderer, stop_ids, config.model.path, autocast)
    tasks = loaded_tasks(config.eval)
    return root.with_full_weights(lambda: score_tasks(tasks, model, ranks, is_sharded(root), config.eval.minutes))


def _answer_fixed_prompts(
    config: Config, data: RunData, root: LossModel, ranks: Ranks, autocast: Callable[[], AbstractContextManager[object]]
) -> list[AnsweredExample]:
    """Answers to eval.prompts; without them, and without tasks, to a few held-out prompts."""
    texts, held_out = config.eval.prompts, data.validation
    if not texts and (texts is not None or config.eval.tasks or held_out is None):
        return []
    model, shares_model = _inference_model(config, data, root, autocast), is_sharded(root)

    def answer() -> list[AnsweredExample]:
        if texts:
            return answer_prompts(given_prompts(texts, model), model, ranks, shares_model)
        assert held_out is not None
        prompts = held_out_prompts(held_out, data.validation_documents.tolist(), model)
        return answer_prompts(prompts, model, ranks, shares_model, is_optional=True)

    return root.with_full_weights(answer)


def require_prompts(config: Config, data: RunData, root: LossModel) -> None:
    """Refuse prompts that the model cannot answer, and metrics that cannot be computed, before the first step, not at
    the first evaluation."""
    has_answers = config.eval.tasks or config.eval.prompts or (config.eval.prompts is None and data.validation)
    for name in config.eval.metrics:
        if not has_answers:
            raise WhetError("eval.metrics: there are no answers to measure. Give eval.tasks or eval.prompts")
        load_plugin("metrics", name, "eval.metrics")
    if config.eval.prompts:
        given_prompts(config.eval.prompts, _inference_model(config, data, root, contextlib.nullcontext))


def _inference_model(
    config: Config, data: RunData, root: LossModel, autocast: Callable[[], AbstractContextManager[object]]
) -> InferenceModel:
    renderer = Renderer(data.tokenizer, config.data.train_on, system=config.data.system)
    stop_ids = stop_token_ids(renderer, config.model)
    return InferenceModel(root.language_model, renderer, stop_ids, config.model.path, autocast)


def _validation_metadata(data: RunData, root: LossModel) -> ValidationMetadata:
    assert data.validation is not None
    paths = [account["source"] for account in data.validation.manifest["accounts"]]
    sources = data.validation.sources if len(paths) > 1 else None
    vocabulary = embedding_rows(root.language_model)
    return ValidationMetadata(
        bytes_per_token(data.tokenizer, vocabulary), sources, source_names(paths), data.validation.hashes
    )
