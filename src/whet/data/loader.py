"""The loader: a step's micro-batches for one rank, by number. It has no state of its own."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from whet.data.batch import STEP, PackedBatch, Shape, buckets, pack_batch, smallest
from whet.data.plan import Plan
from whet.data.prefetch import Prefetch
from whet.data.store import Store

if TYPE_CHECKING:
    from numpy.typing import NDArray

_LOOKED_AT = 256  # steps
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
        lengths: int = 1, device: torch.device | None = None, part: tuple[int, int] = (0, 1),
    ) -> None:  # fmt: skip
        """`padded_to`: the constant row length where padding pays (compiled devices); None: rows as they are.
        `lengths`: how many different lengths micro-batches may be padded to; full rows need one. `device`: for which
        batches are made ready. `part`: (which, of how many) slices of a batch's tokens is this process's."""
        self._store, self._plan, self._micro_rows = store, plan, micro_rows
        self._rank, self._world = rank, world
        self._padded_to, self._lengths = padded_to, lengths
        self._slice, self._slices = part
        self._device = device if device is not None and device.type == "cuda" else None
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
        for number in range(self.count(step)):
            yield self._batches.get((step, number))

    def layout(self, step: int) -> list[tuple[int, list[int]]]:
        """This rank's micro-batches without their content: the number of the first row, and the documents."""
        return [
            (int(places[0]), [int(document) for row in places for document in self._row(step, int(row))])
            for places in (self._places(number, self._rank) for number in range(self.count(step)))
        ]

    def alone(self, step: int, most: int | None) -> Iterator[tuple[int, PackedBatch]]:
        """This rank's documents of a step, each in a batch of its own, with the row that seeds its micro-batch.

        At most `most`, if given, and as many on every rank: a rank that has fewer runs padding at the end.
        """
        mine = [(row, document) for row, documents in self.layout(step) for document in documents]
        count = max(self._document_count(step, rank) for rank in range(self._world))
        for number in range(count if most is None else min(most, count)):
            row, documents = (mine[number][0], [mine[number][1]]) if number < len(mine) else (0, [])
            chosen = np.array(documents, dtype=self._plan.documents.dtype)
            yield row, self._pack(chosen)

    @functools.cached_property
    def shapes(self) -> list[Shape]:
        """The sizes that its batches are padded to, if they are."""
        if not self._padded_to:
            return []
        rows = self._micro_rows
        return buckets(Shape(self._padded_to * rows, self._plan.sizes.fullest * rows, self._room()), self._lengths)

    @property
    def longest(self) -> int:
        return self._plan.sizes.longest

    def close(self) -> None:
        """Stop making batches ahead of time."""
        self._batches.close()

    def count(self, step: int) -> int:
        """Micro-batches of a step, on every rank."""
        return -(-self._plan.row_count(step) // (self._world * self._micro_rows))

    def _following(self, key: tuple[int, int]) -> tuple[int, int] | None:
        step, number = key
        if number + 1 < self.count(step):
            return step, number + 1
        return (step + 1, 0) if step + 1 < len(self._plan) else None

    def _make(self, key: tuple[int, int]) -> tuple[int, PackedBatch]:
        step, number = key
        places = self._places(number, self._rank)
        documents = np.concatenate([self._plan.documents[:0], *(self._row(step, int(place)) for place in places)])
        batch = self._pack(documents)
        return int(places[0]), batch if self._device is None else batch.pinned(self._device)

    def _pack(self, documents: NDArray[np.integer]) -> PackedBatch:
        tokens = int(self._store.lengths[documents].sum(dtype=np.int64))
        shape = smallest(self.shapes, tokens)
        batch = pack_batch(self._store, documents, self._plan.sizes.longest, shape, self._slices)
        return batch if self._slices == 1 else batch.slice(self._slice, self._slices)

    def _room(self) -> int:
        """For the supervised positions of micro-batches: of the fullest, as far as some steps tell. Where there is a
        fuller one, all its positions are computed."""
        steps = np.unique(np.linspace(0, max(0, len(self._plan) - 1), _LOOKED_AT).astype(np.int64))
        most = 0
        for step in map(int, steps[: len(self._plan)]):
            for number in range(self.count(step)):
                rows = [self._row(step, int(place)) for place in self._places(number, self._rank)]
                most = max(most, int(self._store.targets[np.concatenate(rows)].sum(dtype=np.int64)))
        return -(-most // STEP) * STEP

    def _places(self, number: int, rank: int) -> NDArray[np.int64]:
        """The rows of a step that a rank's micro-batch takes; a step need not have so many."""
        turns = np.arange(number * self._micro_rows, (number + 1) * self._micro_rows)
        return turns * self._world + np.where(turns % 2, self._world - 1 - rank, rank)

    def _row(self, step: int, place: int) -> NDArray[np.integer]:
        return self._plan.row(step, place) if place < self._plan.row_count(step) else self._plan.documents[:0]

    def _document_count(self, step: int, rank: int) -> int:
        """Documents of a rank's share of a step."""
        places = (place for number in range(self.count(step)) for place in self._places(number, rank))
        return sum(len(self._row(step, int(place))) for place in places)
