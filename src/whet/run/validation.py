"""Validation loss, bits per byte and token accuracy on held-out conversations."""

from __future__ import annotations

import contextlib
import itertools
import math
from collections import deque
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from whet.config import Config
from whet.core.console import ProgressBar, progress
from whet.core.distributed import Ranks
from whet.core.heartbeat import PHASE
from whet.data.batch import PackedBatch
from whet.data.loader import Loader
from whet.data.plan.planner import plan_single_step
from whet.evaluation.validation_losses import ConversationLosses
from whet.execution.device_memory import free_cached
from whet.model.lora.peft_adapters import embedding_rows
from whet.model.loss.linear_cross_entropy import LossSum
from whet.model.loss.loss_model import LossModel
from whet.parallel.fsdp import has_collectives_in_passes
from whet.run.data import RunData
from whet.run.loader import make_loader
from whet.tokenizer.token_bytes import bytes_per_token

if TYPE_CHECKING:
    from numpy.typing import NDArray

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


def _validation_metadata(data: RunData, root: LossModel) -> ValidationMetadata:
    assert data.validation is not None
    paths = [account["source"] for account in data.validation.manifest["accounts"]]
    sources = data.validation.sources if len(paths) > 1 else None
    vocabulary = embedding_rows(root.language_model)
    return ValidationMetadata(
        bytes_per_token(data.tokenizer, vocabulary), sources, source_names(paths), data.validation.hashes
    )


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
        # exact: every document was processed by one rank, the others add 0
        ranks.all_reduce_(torch.from_numpy(self._sums))
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
