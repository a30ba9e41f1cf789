"""One optimizer step. It fits on a screen, and there is no other."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import nn

from whet.core.ranks import Ranks
from whet.data.loader import Loader
from whet.model.loss import LossModel
from whet.parallel.replicate import sum_gradients, trainable

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class StepResult:
    """Over the whole step: all micro-batches, all ranks."""

    loss: float
    """Sum of −log p over supervised tokens ÷ their number, divided once."""
    grad_norm: float
    """Before clipping."""
    stop: bool
    """Some rank was asked to stop."""
    data_s: float
    """Seconds this rank waited for its batches."""


def train_step(
    model: LossModel, optimizer: torch.optim.Optimizer, loader: Loader, step: int, *, ranks: Ranks, seed: int,
    clip_norm: float, arithmetic: AbstractContextManager[object], stop: bool,
) -> StepResult:  # fmt: skip
    """Forward and backward over this rank's micro-batches, one reduction, one update.

    A loss or gradient that is not finite is returned as it is and the weights are left alone.
    """
    supervised = loader.totals(step).supervised
    optimizer.zero_grad(set_to_none=True)
    sums = torch.zeros(2, dtype=torch.float64, device=ranks.device)
    batches = Timed(loader.micro_batches(step))
    for row, batch in batches:
        torch.manual_seed(_seed(seed, step, row))
        with arithmetic:
            loss = model(batch.to(ranks.device)).loss
        (loss / supervised).backward()
        sums[0] += loss.detach()
    sums[1] = float(stop)
    sum_gradients(model, ranks)
    ranks.sum_(sums)
    norm = nn.utils.clip_grad_norm_(trainable(model), clip_norm)
    loss_sum, stops = sums.tolist()
    result = StepResult(loss_sum / supervised, norm.item(), stops > 0, batches.seconds)
    if torch.isfinite(torch.tensor([result.loss, result.grad_norm])).all():
        optimizer.step()
    return result


class Timed(Iterator[T]):
    """An iterator that knows how long its consumer has waited for it."""

    def __init__(self, items: Iterator[T]) -> None:
        self._items = items
        self.seconds = 0.0

    def __next__(self) -> T:
        began = time.perf_counter()
        try:
            return next(self._items)
        finally:
            self.seconds += time.perf_counter() - began


def _seed(seed: int, step: int, row: int) -> int:
    """Randomness is a function of (seed, step, row): nothing to save, and the same after a restart."""
    digest = hashlib.blake2b(f"{seed}/{step}/{row}".encode(), digest_size=8).digest()
    return int.from_bytes(digest) >> 1
