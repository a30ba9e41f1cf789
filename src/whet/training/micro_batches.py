"""The forward passes of one step, micro-batch by micro-batch."""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import TypeVar

import torch

from whet.core.heartbeat import PHASE
from whet.data.loader import Loader, ReplayLoader
from whet.execution.cuda_graphs import compile_and_capture_count
from whet.model.loss.linear_cross_entropy import LossSum
from whet.model.loss.loss_model import LossModel
from whet.parallel.fsdp import set_gradient_sync

T = TypeVar("T")


class ForwardPasses(Iterator[LossSum]):
    """This rank's forward passes of one step, each made when it is asked for; the first can be made in advance."""

    def __init__(
        self, model: LossModel, loader: Loader | ReplayLoader, step: int, *, device: torch.device, seed: int,
        autocast: AbstractContextManager[object], loss_scale: float,
    ) -> None:  # fmt: skip
        self.model, self.step, self.loss_scale = model, step, loss_scale
        self.supervised = loader.totals(step).supervised
        self._device, self._seed, self._autocast = device, seed, autocast
        self._weight = loss_scale / self.supervised if self.supervised else math.nan
        self._batches, self._count = TimedIterator(loader.micro_batches(step)), loader.micro_batch_count(step)
        self.made_before = compile_and_capture_count()
        self._made = 0
        self._first: LossSum | None = None

    @property
    def data_s(self) -> float:
        """Seconds this rank waited for its batches."""
        return self._batches.seconds

    @property
    def has_begun(self) -> bool:
        """Whether the first one was made in advance."""
        return self._first is not None

    def begin(self) -> None:
        """Make the first one."""
        self._first = next(self)

    def __next__(self) -> LossSum:
        first, self._first = self._first, None
        return first or self._make()

    def _make(self) -> LossSum:
        row, batch = next(self._batches)
        self._made += 1
        PHASE.enter(f"micro-batch {self._made}", self.step + 1)
        set_gradient_sync(self.model, self._made == self._count)
        torch.manual_seed(derive_seed(self._seed, self.step, row))
        with self._autocast:
            result: LossSum = self.model(batch.to(self._device), self._weight)
        return result


class OverlappedForward:
    """The passes of a step that follows at once, the first of them asked for while the device is still busy with the
    step before: the host then looks at that one's numbers, and makes a line of them, while the device goes on.

    What was asked for too early, because the weights are not moved as they were to be, is dropped.
    """

    def __init__(self, make: Callable[[int], ForwardPasses], possible: bool) -> None:
        """`possible`: that a step begins early at all."""
        self._make = make
        self._begun: ForwardPasses | None = None
        self._possible = possible

    def begin(self, step: int) -> None:
        """Where there is no memory for it, the step begins in its turn, and so do those after it."""
        if not self._possible:
            return
        passes = self._make(step)
        try:
            passes.begin()
        except torch.OutOfMemoryError:
            self._possible = False
        else:
            self._begun = passes

    def take(self, step: int) -> ForwardPasses:
        """Those of a step, begun or not."""
        begun, self._begun = self._begun, None
        return begun if begun is not None and begun.step == step else self._make(step)

    def drop(self) -> None:
        self._begun = None

    def made_before(self) -> int:
        """How much was compiled and recorded before what has begun, or until now if nothing has."""
        return compile_and_capture_count() if self._begun is None else self._begun.made_before


class TimedIterator(Iterator[T]):
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


def derive_seed(*parts: int | str) -> int:
    """Randomness is a function of (seed, step, row): nothing to save, and the same after a restart."""
    digest = hashlib.blake2b("/".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest) >> 1
