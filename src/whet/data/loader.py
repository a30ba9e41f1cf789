"""The loader: a step's micro-batches for one rank, by number. It has no state of its own."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from whet.data.batch import PackedBatch, Shape, pack_batch
from whet.data.plan import Plan
from whet.data.store import Store


@dataclass(frozen=True, slots=True)
class StepTotals:
    """What one optimizer step covers, over all ranks and micro-batches."""

    conversations: int
    tokens: int
    supervised: int
    squares: int
    """Sum of squared document lengths: the work of attention."""


class Loader:
    """Cuts each step's rows into equal slices for the ranks, and a slice into micro-batches."""

    def __init__(
        self, store: Store, plan: Plan, micro_rows: int, rank: int, world: int, padded_to: int | None = None
    ) -> None:
        """`padded_to`: the constant row length where padding pays (compiled devices); None: rows as they are."""
        self._store, self._plan, self._micro_rows = store, plan, micro_rows
        self._rank, self._world = rank, world
        lengths = store.lengths[plan.documents]
        self._longest = int(lengths.max(initial=1))
        documents = int(np.diff(plan.rows).max(initial=1))
        self._shape = Shape(padded_to * micro_rows, documents * micro_rows) if padded_to else None

    def totals(self, step: int) -> StepTotals:
        """Known from the plan; no rank has to ask another."""
        documents = self._plan.documents_of(step)
        lengths = self._store.lengths[documents].astype(np.int64)
        supervised = int(self._store.targets[documents].sum())
        return StepTotals(len(documents), int(lengths.sum()), supervised, int((lengths**2).sum()))

    def micro_batches(self, step: int) -> Iterator[tuple[int, PackedBatch]]:
        """This rank's share of a step, each with the number of its first row, by which randomness is seeded.

        Every rank gets the same number of them, because sharded models compute together; a rank without rows runs
        padding, which adds nothing to the loss.
        """
        rows = self._plan.rows_of(step)
        share = -(-len(rows) // self._world)
        mine = rows[self._rank * share : (self._rank + 1) * share]
        for start in range(0, share, self._micro_rows):
            chosen = mine[start : start + self._micro_rows]
            documents = [int(document) for row in chosen for document in row]
            yield self._rank * share + start, pack_batch(self._store, documents, self._longest, self._shape)
