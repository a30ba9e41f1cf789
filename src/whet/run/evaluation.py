"""Validation loss, answers to fixed prompts and task scores of a run's model, in training and for `whet eval`."""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from whet.config import Config
from whet.core.console import ProgressBar, progress, warn
from whet.core.distributed import Ranks
from whet.core.errors import WhetError, first_line
from whet.core.heartbeat import PHASE
from whet.core.plugins import load_plugin, require_number
from whet.data.batch import PackedBatch
from whet.data.conversation import Message
from whet.data.loader import Loader
from whet.data.plan.planner import plan_single_step
from whet.data.prepare.store import Store
from whet.data.render.renderer import Renderer
from whet.evaluation.validation_losses import ConversationLosses
from whet.execution.device_memory import free_cached
from whet.inference.generate import context_length, generate
from whet.inference.inference_model import InferenceModel, stop_token_ids
from whet.inference.sampling import Sampling
from whet.inference.tasks.load_tasks import loaded_tasks
from whet.inference.tasks.scoring import score_tasks
from whet.inference.tasks.task import AnsweredExample, TaskResult
from whet.model.lora.peft_adapters import embedding_rows
from whet.model.loss.linear_cross_entropy import LossSum
from whet.model.loss.loss_model import LossModel
from whet.parallel.fsdp import has_collectives_in_passes, is_sharded, reshard
from whet.run.data import RunData
from whet.run.models.model_builder import make_loader
from whet.tokenizer.token_bytes import bytes_per_token
from whet.training.precision import PrecisionPolicy
from whet.training.run_state import Evaluation

if TYPE_CHECKING:
    from numpy.typing import NDArray


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
    with contextlib.closing(make_loader(config, data.validation, plan, ranks, root, with_gradients=False)) as loader:
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


# Validation loss, bits per byte and token accuracy on held-out conversations.

NATS, CORRECT, COUNT, TEXT_NATS, TEXT_BYTES = range(5)


@dataclass(frozen=True, slots=True)
class ValidationMetadata:
    """What the metrics need besides losses."""

    token_bytes: NDArray[np.int64] | None = None
    """UTF-8 bytes of each token, 0 for special tokens; None: unknown, so there is no val_bpb."""
    sources: NDArray[np.integer] | None = None
    """The source index of each document of the store; None: there is only one source."""
    source_names: tuple[str, ...] = ()
    hashes: NDArray[np.uint64] | None = None
    """The hash of each document's conversation; None: losses are not kept by conversation."""


class ValidationResult(NamedTuple):
    """What a model achieves on held-out conversations."""

    metrics: dict[str, float]
    losses: ConversationLosses | None = None


class ValidationSums:
    """Sums per document. They are added in document order at the end, so that the result does not depend on which rank
    processed a document, or when."""

    def __init__(self, documents: NDArray[np.integer], metadata: ValidationMetadata) -> None:
        self._documents, self._metadata = np.sort(documents), metadata
        self._sums = np.zeros((len(documents), 5))
        """Columns NATS, CORRECT, COUNT over all supervised tokens; TEXT_NATS, TEXT_BYTES over those that have bytes."""

    def add(self, batch: PackedBatch, result: LossSum) -> None:
        """Add the losses of a batch; both are in host memory."""
        at = batch.supervised_at.numpy()
        segment = np.searchsorted(np.array(batch.cu_seqlens_host), batch.slice_start + at, side="right") - 1
        row = np.searchsorted(self._documents, batch.documents[segment])
        nats = result.nll.double().numpy()
        bytes_ = np.zeros(len(at))
        if self._metadata.token_bytes is not None:
            bytes_ = self._metadata.token_bytes[batch.labels.numpy()[at]].astype(np.float64)
        columns = [nats, result.hits.numpy(), np.ones(len(at)), nats * (bytes_ > 0), bytes_]
        np.add.at(self._sums, row, np.stack(columns, axis=1))

    def results(self, ranks: Ranks) -> dict[str, float]:
        """val_loss, val_accuracy and val_bpb over all ranks, and val_loss of each source if there are several."""
        if not ranks.is_tensor_main:
            self._sums[:] = 0
        ranks.all_reduce_(
            torch.from_numpy(self._sums)
        )  # exact: every document was processed by one rank, the others add 0
        total = self._sums.sum(axis=0)
        metrics = {"val_loss": _mean_per_token(total, NATS), "val_accuracy": _mean_per_token(total, CORRECT)}
        if total[TEXT_BYTES]:
            metrics["val_bpb"] = float(total[TEXT_NATS] / (math.log(2) * total[TEXT_BYTES]))
        if self._metadata.sources is not None:
            source = self._metadata.sources[self._documents]
            for i, name in enumerate(self._metadata.source_names):
                part = self._sums[source == i].sum(axis=0)
                if part[COUNT]:
                    metrics |= {f"val_loss/{name}": _mean_per_token(part, NATS), f"val_tokens/{name}": int(part[COUNT])}
        return metrics

    def by_conversation(self) -> ConversationLosses | None:
        """The losses of each conversation, over all ranks once `results` has added them."""
        if self._metadata.hashes is None:
            return None
        hashes = self._metadata.hashes[self._documents]
        return ConversationLosses.from_documents(hashes, self._sums[:, COUNT], self._sums[:, NATS])


def _mean_per_token(sums: NDArray[np.float64], column: int) -> float:
    return float(sums[column] / sums[COUNT]) if sums[COUNT] else math.nan


def source_names(paths: list[str]) -> tuple[str, ...]:
    """Short unique names: the file name without folders and extensions, or the part after builtin: or hub:; equal names
    are numbered."""
    short = [path.split(":", 1)[-1].rstrip("/").rpartition("/")[2].split(".")[0] or path for path in paths]
    names: list[str] = []
    for name in short:
        numbered = (f"{name}-{number}" for number in itertools.count(1))
        taken = {*short, *names}
        names.append(name if short.count(name) == 1 else next(each for each in numbered if each not in taken))
    return tuple(names)


@torch.no_grad()
def validation_loss(
    model: LossModel,
    loader: Loader,
    ranks: Ranks,
    autocast: AbstractContextManager[object],
    metadata: ValidationMetadata,
) -> ValidationResult:
    """Metrics on held-out conversations, with the model and batches of training.

    val_loss is the mean −log p over all supervised tokens, val_accuracy the share of them with the highest logit.
    val_bpb, bits per byte, does not depend on the tokenizer: Σ −log₂ p ÷ Σ bytes over the supervised tokens of text;
    special tokens have no bytes and count in neither sum.
    """
    model.eval()
    sums = _sum_losses(model, loader, ranks, autocast, metadata)
    if sums is None:  # out of memory; rows are the same in micro-batches of one
        free_cached(ranks.device, after_failure=True)
        with contextlib.closing(loader.with_micro_rows(1)) as smaller:
            sums = _sum_losses(model, smaller, ranks, autocast, metadata)
    assert sums is not None
    return ValidationResult(sums.results(ranks), sums.by_conversation())


def _sum_losses(
    model: LossModel, loader: Loader, ranks: Ranks, autocast: AbstractContextManager[object],
    metadata: ValidationMetadata,
) -> ValidationSums | None:  # fmt: skip
    """This rank's sums; None: the device has too little memory for these micro-batches, and smaller ones may fit."""
    sums = ValidationSums(loader.documents(0), metadata)
    try:
        with progress("validating", loader.micro_batch_count(0), ends_with_line=False) as bar:
            launched: deque[tuple[PackedBatch, _HostLosses]] = deque()
            for _, batch in loader.micro_batches(0):
                PHASE.enter("validating")
                with autocast:
                    launched.append((batch, _HostLosses(model(batch.to(ranks.device)))))
                if len(launched) > 1:  # the device computes the next batch while the host adds
                    _add_oldest(sums, launched, bar)
            while launched:
                _add_oldest(sums, launched, bar)
    except torch.OutOfMemoryError:
        if loader.micro_rows == 1 or has_collectives_in_passes(model, ranks):
            raise
        return None
    return sums


def _add_oldest(sums: ValidationSums, launched: deque[tuple[PackedBatch, _HostLosses]], bar: ProgressBar) -> None:
    batch, losses = launched.popleft()
    sums.add(batch, losses.wait())
    bar.advance()


class _HostLosses:
    """The losses of a batch on their way to the host. Waiting for them does not wait for kernels launched later."""

    def __init__(self, result: LossSum) -> None:
        nll, hits = (values.to("cpu", non_blocking=True) for values in (result.nll, result.hits))
        self._result = replace(result, nll=nll, hits=hits)
        self._copied = torch.cuda.Event() if result.nll.is_cuda else None
        if self._copied is not None:
            self._copied.record()

    def wait(self) -> LossSum:
        if self._copied is not None:
            self._copied.synchronize()
        return self._result
