"""Measuring the model of a run."""

from __future__ import annotations

import contextlib
import functools

from whet.config import Config
from whet.core.ranks import Ranks
from whet.data.planner import plan_whole
from whet.data.render import Renderer
from whet.infer.evaluate import validation_loss
from whet.infer.tally import Kinds, source_names
from whet.infer.tasks.answers import Answerer
from whet.infer.tasks.find import known_tasks
from whet.infer.tasks.score import score_all
from whet.infer.tasks.task import Sample, Scored
from whet.model.config import ModelConfig
from whet.model.lora import vocabulary_of
from whet.model.loss import LossModel
from whet.model.token_bytes import token_bytes
from whet.model.tokenizer import stop_ids
from whet.parallel.shard import give_back, is_sharded
from whet.recipe.data import Data
from whet.recipe.parts import Arithmetic, make_loader


def measure(
    config: Config, data: Data, root: LossModel, ranks: Ranks, arithmetic: Arithmetic
) -> tuple[dict[str, float], list[Sample]]:
    """Validation loss and task scores of the model as it is now."""
    samples: list[Sample] = []
    context = arithmetic.context(ranks.device)
    results = measure_loss(config, data, root, ranks, context)
    for scored in measure_tasks(config, Renderer(data.tokenizer, config.data.train_on), root, ranks, context):
        results[f"task/{scored.task}"] = scored.score
        if len(scored.samples) < scored.asked_for:
            results[f"scored/{scored.task}"] = len(scored.samples)
        samples += scored.samples
    give_back(root)
    return results, samples


def measure_loss(
    config: Config, data: Data, root: LossModel, ranks: Ranks, context: contextlib.AbstractContextManager[object]
) -> dict[str, float]:
    """On the validation data, where there is some."""
    if data.validation is None:
        return {}
    plan = plan_whole(
        data.validation.lengths, data.validation_documents, config.row_length, config.data.packing,
        config.data.bins, config.eval.rows,
    )  # fmt: skip
    with contextlib.closing(make_loader(config, data.validation, plan, ranks)) as loader:
        results = validation_loss(root, loader, ranks, context, kinds_of(data, root))
    if len(plan.documents) < len(data.validation_documents):
        results["val_part"] = len(plan.documents) / len(data.validation_documents)
    return results


def measure_tasks(
    config: Config,
    renderer: Renderer,
    root: LossModel,
    ranks: Ranks,
    context: contextlib.AbstractContextManager[object],
) -> list[Scored]:
    """How the model as it is now does on each task of the configuration."""
    answerer = Answerer(root.language_model, renderer, answer_stops(renderer, config.model))
    asked = functools.partial(
        score_all, known_tasks(config.eval), answerer, ranks, is_sharded(root), config.eval.minutes, context
    )
    return root.within(asked) if config.eval.tasks else []


def kinds_of(data: Data, root: LossModel) -> Kinds:
    """What tells the validation's tokens and documents apart."""
    assert data.validation is not None
    paths = [account["source"] for account in data.validation.manifest["accounts"]]
    sources = data.validation.sources if len(paths) > 1 else None
    vocabulary = vocabulary_of(root.language_model)
    return Kinds(token_bytes(data.tokenizer, vocabulary), sources, source_names(paths))


def answer_stops(renderer: Renderer, model: ModelConfig) -> list[int]:
    """Every id that ends an answer: by the chat template, the tokenizer and the model's own settings."""
    tokenizer = renderer.tokenizer  # its eot_token, if it has one, closes the assistant's turn
    end = getattr(tokenizer, "eot_token_id", None)
    known = {*stop_ids(model), tokenizer.eos_token_id, end, renderer.end_of_turn()}
    return sorted(number for number in known if number is not None)
