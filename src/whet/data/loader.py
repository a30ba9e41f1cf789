"""The loader: a step's micro-batches for one rank, by number. It has no state of its own."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from whet.data.batch import PackedBatch, Shape, buckets, pack_batch
from whet.data.plan import Plan
from whet.data.prefetch import Prefetch
from whet.data.store import Store

if TYPE_CHECKING:
    from numpy.typing import NDArray

_AHEAD = 4  # micro-batches that are made before they are asked for, across steps


@dataclass(frozen=True, slots=True)
class StepTotals:
    """What one optimizer step covers, over all ranks and micro-batches."""

    conversations: int
    tokens: int
    supervised: int
    lengths: NDArray[np.integer]
    """Tokens of each document: they decide the work of attention."""


class Loader:
    """Deals each step's rows to the ranks and cuts a rank's share into micro-batches.

    Rows descend in work and are dealt there and back again, rank r of w takes rows r, 2w − 1 − r, 2w + r, …: ranks
    then differ by less than the heaviest row, in each micro-batch by less than its rows differ among each other.
    """

    def __init__(
        self, store: Store, plan: Plan, micro_rows: int, rank: int, world: int, padded_to: int | None = None,
        lengths: int = 1,
    ) -> None:  # fmt: skip
        """`padded_to`: the constant row length where padding pays (compiled devices); None: rows as they are.
        `lengths`: how many different lengths micro-batches may be padded to; full rows need one."""
        self._store, self._plan, self._micro_rows = store, plan, micro_rows
        self._rank, self._world = rank, world
        self._shapes: list[Shape] = []
        if padded_to:
            self._shapes = buckets(Shape(padded_to * micro_rows, plan.sizes.fullest * micro_rows), lengths)
        self._batches = Prefetch(self._make, self._following, _AHEAD)

    def documents(self, step: int) -> NDArray[np.integer]:
        """The documents of a step, of all ranks."""
        return self._plan.documents_of(step)

    def totals(self, step: int) -> StepTotals:
        """Known from the plan; no rank has to ask another."""
        documents = self._plan.documents_of(step)
        lengths = self._store.lengths[documents]
        supervised = int(self._store.targets[documents].sum())
        return StepTotals(len(documents), int(lengths.sum(dtype=np.int64)), supervised, lengths)

    def micro_batches(self, step: int) -> Iterator[tuple[int, PackedBatch]]:
        """This rank's share of a step, each with the number of its first row in the step, which seeds randomness.

        Every rank gets the same number of them, because sharded models compute together; a rank without rows runs
        padding, which adds nothing to the loss.
        """
        for number in range(self._count(step)):
            yield self._batches.get((step, number))

    def close(self) -> None:
        """Stop making batches ahead of time."""
        self._batches.close()

    def _count(self, step: int) -> int:
        """Micro-batches of a step, on every rank."""
        return -(-self._plan.row_count(step) // (self._world * self._micro_rows))

    def _following(self, key: tuple[int, int]) -> tuple[int, int] | None:
        step, number = key
        if number + 1 < self._count(step):
            return step, number + 1
        return (step + 1, 0) if step + 1 < len(self._plan) else None

    def _make(self, key: tuple[int, int]) -> tuple[int, PackedBatch]:
        step, number = key
        turns = np.arange(number * self._micro_rows, (number + 1) * self._micro_rows)
        places = turns * self._world + np.where(turns % 2, self._world - 1 - self._rank, self._rank)
        rows = [self._plan.row(step, int(place)) for place in places[places < self._plan.row_count(step)]]
        documents = np.concatenate([self._plan.documents[:0], *rows])
        tokens = int(self._store.lengths[documents].sum(dtype=np.int64))
        shape = next((shape for shape in self._shapes if shape.tokens >= tokens), None)
        return int(places[0]), pack_batch(self._store, documents, self._plan.sizes.longest, shape)
