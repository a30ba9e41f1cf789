"""Validation loss and task scores of the model of a run."""

from __future__ import annotations

import contextlib
import functools

from whet.config import Config
from whet.core.distributed import Ranks
from whet.data.plan.planner import plan_single_step
from whet.data.render.renderer import Renderer
from whet.inference.tasks.scoring import TaskModel, score_tasks
from whet.inference.tasks.task import AnsweredExample, TaskResult
from whet.inference.tasks.task_registry import loaded_tasks
from whet.inference.validation import ValidationMetadata, source_names, validation_loss
from whet.model.config import ModelConfig
from whet.model.load.tokenizer import stop_ids
from whet.model.lora.peft_adapters import embedding_rows
from whet.model.loss.loss_model import LossModel
from whet.parallel.fsdp import is_sharded, reshard
from whet.run.assemble import make_loader
from whet.run.data import RunData
from whet.tokenizer.token_bytes import bytes_per_token
from whet.training.precision import PrecisionPolicy


def evaluate_run(
    config: Config, data: RunData, root: LossModel, ranks: Ranks, precision: PrecisionPolicy
) -> tuple[dict[str, float], list[AnsweredExample]]:
    """Validation loss and task scores of the model as it is now."""
    samples: list[AnsweredExample] = []
    context = precision.autocast(ranks.device)
    results = evaluate_validation(config, data, root, ranks, context)
    for scored in evaluate_tasks(config, Renderer(data.tokenizer, config.data.train_on), root, ranks, context):
        results[f"task/{scored.task}"] = scored.score
        if len(scored.samples) < scored.asked_for:
            results[f"scored/{scored.task}"] = len(scored.samples)
        samples += scored.samples
    reshard(root)
    return results, samples


def evaluate_validation(
    config: Config, data: RunData, root: LossModel, ranks: Ranks, context: contextlib.AbstractContextManager[object]
) -> dict[str, float]:
    """On the validation data, where there is some."""
    if data.validation is None:
        return {}
    plan = plan_single_step(
        data.validation.lengths, data.validation_documents, config.row_length, config.data.packing,
        config.data.bins, config.eval.rows,
    )  # fmt: skip
    with contextlib.closing(make_loader(config, data.validation, plan, ranks)) as loader:
        results = validation_loss(root, loader, ranks, context, validation_breakdown(data, root))
    if len(plan.documents) < len(data.validation_documents):
        results["val_part"] = len(plan.documents) / len(data.validation_documents)
    return results


def evaluate_tasks(
    config: Config,
    renderer: Renderer,
    root: LossModel,
    ranks: Ranks,
    context: contextlib.AbstractContextManager[object],
) -> list[TaskResult]:
    """How the model as it is now does on each task of the configuration."""
    answerer = TaskModel(root.language_model, renderer, stop_token_ids(renderer, config.model))
    asked = functools.partial(
        score_tasks, loaded_tasks(config.eval), answerer, ranks, is_sharded(root), config.eval.minutes, context
    )
    return root.with_full_weights(asked) if config.eval.tasks else []


def validation_breakdown(data: RunData, root: LossModel) -> ValidationMetadata:
    """What tells the validation's tokens and documents apart."""
    assert data.validation is not None
    paths = [account["source"] for account in data.validation.manifest["accounts"]]
    sources = data.validation.sources if len(paths) > 1 else None
    vocabulary = embedding_rows(root.language_model)
    return ValidationMetadata(bytes_per_token(data.tokenizer, vocabulary), sources, source_names(paths))


def stop_token_ids(renderer: Renderer, model: ModelConfig) -> list[int]:
    """Every id that ends an answer: by the chat template, the tokenizer and the model's own settings."""
    tokenizer = renderer.tokenizer  # its eot_token, if it has one, closes the assistant's turn
    end = getattr(tokenizer, "eot_token_id", None)
    known = {*stop_ids(model), tokenizer.eos_token_id, end, renderer.end_of_turn()}
    return sorted(number for number in known if number is not None)
