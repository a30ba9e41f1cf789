"""Validation loss, bits per byte and token accuracy on held-out conversations."""

from __future__ import annotations

import itertools
import math
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from whet.core.console import progress
from whet.core.distributed import Ranks
from whet.core.heartbeat import PHASE
from whet.data.batch import PackedBatch
from whet.data.loader import Loader
from whet.model.loss.linear_cross_entropy import LossSum
from whet.model.loss.loss_model import LossModel

# What was measured of each document, and the numbers made of it.

if TYPE_CHECKING:
    from numpy.typing import NDArray

NATS, CORRECT, COUNT, TEXT_NATS, TEXT_BYTES = range(5)


@dataclass(frozen=True, slots=True)
class ValidationMetadata:
    """What is known of tokens and documents beside their losses."""

    token_bytes: NDArray[np.int64] | None = None
    """Bytes of text of each token, 0 for special ones; None: not known."""
    sources: NDArray[np.integer] | None = None
    """The source of each document of the store; None: there is only one."""
    names: tuple[str, ...] = ()
    """Of the sources."""


class ValidationSums:
    """Sums by document. They are added up in the order of the documents at the end, so that the result does not depend
    on which rank measured which document, or when."""

    def __init__(self, documents: NDArray[np.integer], kinds: ValidationMetadata) -> None:
        self._documents, self._kinds = np.sort(documents), kinds
        self._sums = np.zeros((len(documents), 5))
        """For each document −log p, hits and number of all targets, −log p and bytes of those that stand for text."""

    def add(self, batch: PackedBatch, result: LossSum) -> None:
        """Take in a batch; it is the one on the host."""
        at = batch.supervised_at.numpy()
        place = np.searchsorted(np.array(batch.cu_seqlens_host), batch.slice_start + at, side="right") - 1
        owner = np.searchsorted(self._documents, batch.documents[place])
        nats = result.nll.double().cpu().numpy()
        bytes_ = np.zeros(len(at))
        if self._kinds.token_bytes is not None:
            bytes_ = self._kinds.token_bytes[batch.labels.numpy()[at]].astype(np.float64)
        columns = [nats, result.hits.cpu().numpy(), np.ones(len(at)), nats * (bytes_ > 0), bytes_]
        np.add.at(self._sums, owner, np.stack(columns, axis=1))

    def results(self, ranks: Ranks) -> dict[str, float]:
        """Over all ranks: val_loss, val_accuracy, val_bpb, and val_loss of each source where there are several."""
        if not ranks.is_tensor_main:
            self._sums[:] = 0
        ranks.all_reduce_(torch.from_numpy(self._sums))  # each document was measured by one rank: nothing is rounded
        whole = self._sums.sum(axis=0)
        found = {"val_loss": _mean_per_token(whole, NATS), "val_accuracy": _mean_per_token(whole, CORRECT)}
        if whole[TEXT_BYTES]:
            found["val_bpb"] = float(whole[TEXT_NATS] / (math.log(2) * whole[TEXT_BYTES]))
        if self._kinds.sources is not None:
            owner = self._kinds.sources[self._documents]
            for number, name in enumerate(self._kinds.names):
                part = self._sums[owner == number].sum(axis=0)
                if part[COUNT]:
                    found |= {f"val_loss/{name}": _mean_per_token(part, NATS), f"val_tokens/{name}": int(part[COUNT])}
        return found


def _mean_per_token(sums: NDArray[np.float64], column: int) -> float:
    return float(sums[column] / sums[COUNT]) if sums[COUNT] else math.nan


def source_names(paths: list[str]) -> tuple[str, ...]:
    """Short names: the file's without folders and endings, or what follows builtin: or hub:, numbered where two are
    the same."""
    short = [path.split(":", 1)[-1].rstrip("/").rpartition("/")[2].split(".")[0] or path for path in paths]
    names: list[str] = []
    for name in short:
        numbered = (f"{name}-{number}" for number in itertools.count(1))
        taken = {*short, *names}
        names.append(name if short.count(name) == 1 else next(each for each in numbered if each not in taken))
    return tuple(names)


# Loss on conversations that were kept apart: the same model, batches and division as in training.


@torch.no_grad()
def validation_loss(
    model: LossModel,
    loader: Loader,
    ranks: Ranks,
    arithmetic: AbstractContextManager[object],
    kinds: ValidationMetadata,
) -> dict[str, float]:
    """val_loss: mean −log p over all supervised tokens; val_accuracy: the part of them with the highest logit.

    val_bpb, bits per byte, is the loss in a unit that does not depend on the tokenizer: Σ −log₂ p ÷ Σ bytes over the
    supervised tokens that stand for text. Special tokens have no bytes and are left out of both sums.
    """
    model.eval()
    tally = ValidationSums(loader.documents(0), kinds)
    with progress("validating", loader.micro_batch_count(0)) as bar:
        for _, batch in loader.micro_batches(0):
            PHASE.enter("validating")
            with arithmetic:
                result = model(batch.to(ranks.device))
            tally.add(batch, result)
            bar.advance()
    return tally.results(ranks)
