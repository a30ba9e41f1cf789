"""An evaluation of a run's model: validation metrics, task scores, answers to fixed prompts; also for `whet eval`."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace

import numpy as np
import torch

from whet.config import Config
from whet.core.console import warn
from whet.core.distributed import Ranks
from whet.core.errors import WhetError, first_line
from whet.core.plugins import load_plugin, require_number
from whet.data.conversation import Message
from whet.data.prepare.store import Store
from whet.data.render.renderer import Renderer
from whet.execution.device_memory import free_cached
from whet.inference.generate import context_length, generate
from whet.inference.inference_model import InferenceModel, stop_token_ids
from whet.inference.sampling import Sampling
from whet.inference.tasks.load_tasks import loaded_tasks
from whet.inference.tasks.scoring import score_tasks
from whet.inference.tasks.task import AnsweredExample, TaskResult
from whet.model.loss.loss_model import LossModel
from whet.parallel.fsdp import is_sharded, reshard
from whet.run.data import RunData
from whet.run.validation import evaluate_validation
from whet.training.precision import PrecisionPolicy
from whet.training.run_state import Evaluation


def evaluate_run(
    config: Config, data: RunData, root: LossModel, ranks: Ranks, precision: PrecisionPolicy
) -> Evaluation:
    """The metrics of the model's current weights, its answers to the tasks, and its losses by conversation."""
    samples: list[AnsweredExample] = []
    autocast = functools.partial(precision.autocast, ranks.device)
    metrics, losses = evaluate_validation(config, data, root, ranks, autocast())
    renderer = _renderer(config, data)
    for result in evaluate_tasks(config, renderer, root, ranks, autocast):
        metrics[f"task/{result.task}"] = result.score
        if len(result.samples) < result.requested:
            metrics[f"scored/{result.task}"] = len(result.samples)
        samples += result.samples
    samples += _answer_fixed_prompts(config, data, renderer, root, ranks, autocast)
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
    model, tasks = _inference_model(config, renderer, root, autocast), loaded_tasks(config.eval)
    return root.with_full_weights(lambda: score_tasks(tasks, model, ranks, is_sharded(root), config.eval.minutes))


def _answer_fixed_prompts(
    config: Config, data: RunData, renderer: Renderer, root: LossModel, ranks: Ranks,
    autocast: Callable[[], AbstractContextManager[object]],
) -> list[AnsweredExample]:  # fmt: skip
    """Answers to eval.prompts; without them, and without tasks, to a few held-out prompts."""
    texts, held_out = config.eval.prompts, data.validation
    if not texts and (texts is not None or config.eval.tasks or held_out is None):
        return []
    model, shares_model = _inference_model(config, renderer, root, autocast), is_sharded(root)

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
        model = _inference_model(config, _renderer(config, data), root, contextlib.nullcontext)
        given_prompts(config.eval.prompts, model)


def _renderer(config: Config, data: RunData) -> Renderer:
    return Renderer(data.tokenizer, config.data.train_on, system=config.data.system)


def _inference_model(
    config: Config, renderer: Renderer, root: LossModel, autocast: Callable[[], AbstractContextManager[object]]
) -> InferenceModel:
    stop_ids = stop_token_ids(renderer, config.model)
    return InferenceModel(root.language_model, renderer, stop_ids, config.model.path, autocast)


# Prompts that the model answers at every evaluation, so that one can read how it changes: those of eval.prompts, or,
# in runs without tasks, the beginnings of a few held-out conversations.

GIVEN, HELD_OUT = "eval.prompts", "data.validation"
"""Where a prompt comes from: `task` in samples.jsonl."""
_MAX_NEW_TOKENS, _MAX_HELD_OUT_TOKENS = 256, 64
_HELD_OUT_PROMPTS, _PROMPT_TOKENS_OF_TEXT = 4, 32


@dataclass(frozen=True, slots=True)
class FixedPrompt:
    """A prompt, as text and as tokens."""

    origin: str
    text: str
    expected: str
    """The answer in the data; empty for those of eval.prompts."""
    ids: list[int]
    max_new_tokens: int


def given_prompts(texts: Sequence[str], model: InferenceModel) -> list[FixedPrompt]:
    """Those of eval.prompts, each the message of a user; a WhetError for one that the model cannot answer."""
    prompts, context = [], context_length(model.model)
    for number, text in enumerate(texts):
        try:
            ids = model.prompt_ids([Message("user", text)])
        except WhetError as error:
            raise WhetError(f"eval.prompts.{number}: {error}") from None
        if context is not None and len(ids) >= context:
            raise WhetError(
                f"eval.prompts.{number}: it has {len(ids):,} tokens, and the model's context is {context:,}. Shorten it"
            )
        prompts.append(FixedPrompt(GIVEN, text, "", ids, _MAX_NEW_TOKENS))
    return prompts


def held_out_prompts(store: Store, documents: Sequence[int], model: InferenceModel) -> list[FixedPrompt]:
    """The beginnings of a few validation conversations, spread evenly, up to their first supervised token; of plain
    text, which is supervised as a whole, its first tokens."""
    context, prompts = context_length(model.model) or 1 << 62, list[FixedPrompt]()
    usable = [number for number in documents if store.targets[number]]
    for at in dict.fromkeys(np.linspace(0, len(usable) - 1, min(_HELD_OUT_PROMPTS, len(usable))).astype(int).tolist()):
        ids, supervised = store.ids(usable[at]).tolist(), np.flatnonzero(store.loss(usable[at]))
        start = int(supervised[supervised > 0][0])
        start = start if start > 1 else min(_PROMPT_TOKENS_OF_TEXT, len(ids) // 2 + 1)
        end = next((i for i in range(start, len(ids)) if not store.loss(usable[at])[i]), len(ids))
        if start + _MAX_HELD_OUT_TOKENS < context:
            text, expected = (model.renderer.tokenizer.decode(part) for part in (ids[:start], ids[start:end]))
            prompts.append(FixedPrompt(HELD_OUT, str(text), str(expected), ids[:start], _MAX_HELD_OUT_TOKENS))
    return prompts


def answer_prompts(
    prompts: Sequence[FixedPrompt], model: InferenceModel, ranks: Ranks, shares_model: bool, is_optional: bool = False
) -> list[AnsweredExample]:
    """The model's most likely answers. Ranks share the prompts, unless the model is sharded over them.

    `is_optional`: they were not requested, so a model that cannot generate does not end the run.
    """
    rank, world = (0, 1) if shares_model else (ranks.rank, ranks.world_size)
    own = range(rank, len(prompts), world)
    try:
        answers = _generate([prompts[i] for i in own], replace(model, sampling=Sampling(), tool=None))
    except (WhetError, torch.OutOfMemoryError, NotImplementedError) as error:
        if not is_optional or (shares_model and ranks.world_size > 1):  # the others wait for this rank
            raise
        free_cached(ranks.device, after_failure=True)
        warn(f"held-out prompts were not answered: {first_line(error)}. eval.prompts=[] turns them off")
        own, answers = range(0), []
    answered = [
        AnsweredExample(prompts[i].origin, prompts[i].text, prompts[i].expected, answer, None, None, i)
        for i, answer in zip(own, answers, strict=True)
    ]
    return answered if shares_model else sorted(ranks.all_gather(answered), key=lambda sample: sample.number)


def _generate(prompts: Sequence[FixedPrompt], model: InferenceModel) -> list[str]:
    with model.context():
        completions = generate(
            model.model, [each.ids for each in prompts], model.sampling, model.stop_ids, pad_id=model.pad_id,
            limits=[each.max_new_tokens for each in prompts],
        )  # fmt: skip
    return [model.decode(each.ids) for each in completions]
