"""The data loader: the micro-batches of a step for one rank, prefetched; and its counterpart for a saved step.

The plan fixes every batch in advance. A loader has no state: any step can be loaded by number, and resuming is a seek.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Generic, TypeVar

import numpy as np
import torch

from whet.data.batch import IGNORE_INDEX, BatchShape, PackedBatch, choose_shapes, pack_batch, smallest_shape
from whet.data.plan.planner import Plan, document_cost
from whet.data.prepare.store import Store

if TYPE_CHECKING:
    from numpy.typing import NDArray

K = TypeVar("K", bound=Hashable)
T = TypeVar("T")


class Prefetcher(Generic[K, T]):
    """Computes `make(key)` in a background thread for the keys that `next_key` predicts, at most `depth` ahead.

    Any key may be requested; an unpredicted one is computed on demand.
    """

    def __init__(self, make: Callable[[K], T], next_key: Callable[[K], K | None], depth: int) -> None:
        self._make, self._next_key, self._depth = make, next_key, depth
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="whet-prefetch")  # starts with the first task
        self._pending: deque[tuple[K, Future[T]]] = deque()

    def get(self, key: K) -> T:
        """Return `make(key)`, or raise its error."""
        if not self._pending or self._pending[0][0] != key:
            self._cancel()
            self._pending.append((key, self._thread.submit(self._make, key)))
        _, wanted = self._pending.popleft()
        last: K | None = self._pending[-1][0] if self._pending else key
        while len(self._pending) < self._depth and last is not None and (last := self._next_key(last)) is not None:
            self._pending.append((last, self._thread.submit(self._make, last)))
        return wanted.result()

    def close(self) -> None:
        """Stop the thread. The prefetcher cannot be used any more."""
        self._cancel()
        self._thread.shutdown()

    def _cancel(self) -> None:
        for _, future in self._pending:
            future.cancel()
        self._pending.clear()


_PREFETCH_DEPTH = 4  # micro-batches, across steps
_MAX_SHAPES = 4
_COMPILE_TOKENS = 2**18
"""What a device computes in about the time that a compilation takes: a 135M model on an H200 in 1.3 s, an 8B model in
14 s."""


@dataclass(frozen=True, slots=True)
class StepTotals:
    """Counts of one optimizer step, over all ranks and micro-batches."""

    conversations: int
    tokens: int
    supervised: int
    lengths: NDArray[np.integer]
    """Tokens of each document, which determine the cost of attention."""


class Loader:
    """Distributes the rows of each step over the ranks and groups those of a rank into micro-batches.

    Load balancing: the rows of a step descend in cost and are dealt in snake order, so rank r of w takes the rows r,
    2w − 1 − r, 2w + r, … The cost of ranks then differs by less than the most expensive row, and within a micro-batch
    by less than its rows differ among each other.
    """

    def __init__(
        self, store: Store, plan: Plan, micro_rows: int, rank: int, world: int, pads: bool = False,
        device: torch.device | None = None, part: tuple[int, int] = (0, 1),
    ) -> None:  # fmt: skip
        """`pads`: micro-batches are padded to a few sizes, because code is compiled for each. `device`: batches are
        pinned for it if it is a GPU. `part`: (index, number) of the slices of a batch in context parallelism."""
        self._store, self._plan, self._micro_rows = store, plan, micro_rows
        self._rank, self._world = rank, world
        self._pads = pads
        self._slice, self._slices = part
        self._device = device if device is not None and device.type == "cuda" else None
        self._batches = Prefetcher(self._make_batch, self._next_key, _PREFETCH_DEPTH)

    def documents(self, step: int) -> NDArray[np.integer]:
        """The documents of a step on all ranks."""
        return self._plan.documents_of(step)

    def totals(self, step: int) -> StepTotals:
        """From the plan, without communication."""
        documents = self._plan.documents_of(step)
        lengths = self._store.lengths[documents]
        supervised = int(self._store.targets[documents].sum())
        return StepTotals(len(documents), int(lengths.sum(dtype=np.int64)), supervised, lengths)

    def micro_batches(self, step: int) -> Iterator[tuple[int, PackedBatch]]:
        """This rank's micro-batches of a step, each with the number of its first row in the step, which seeds dropout.

        Every rank gets the same number of them, because sharded models run collectives in each. A rank without rows
        gets padding, which adds nothing to the loss.
        """
        for number in range(self.micro_batch_count(step)):
            yield self._batches.get((step, number))

    def layout(self, step: int) -> list[tuple[int, list[int]]]:
        """This rank's micro-batches without their tokens: (number of the first row, documents)."""
        return [
            (int(rows[0]), [int(document) for row in rows for document in self._row(step, int(row))])
            for rows in (self._row_indices(number, self._rank) for number in range(self.micro_batch_count(step)))
        ]

    def single_document_batches(self, step: int, limit: int | None) -> Iterator[tuple[int, PackedBatch]]:
        """This rank's documents of a step, each as a batch, with the row number that seeds its micro-batch.

        At most `limit`, and the same number on every rank: a rank with fewer documents gets padding at the end.
        """
        mine = [(row, document) for row, documents in self.layout(step) for document in documents]
        count = max(self._document_count(step, rank) for rank in range(self._world))
        for number in range(count if limit is None else min(limit, count)):
            row, documents = (mine[number][0], [mine[number][1]]) if number < len(mine) else (0, [])
            chosen = np.array(documents, dtype=self._plan.documents.dtype)
            yield row, self._pack(chosen)

    @functools.cached_property
    def shapes(self) -> list[BatchShape]:
        """The shapes that batches are padded to; none without padding."""
        if not self._pads:
            return []
        starts = self._plan.rows[:-1]
        lengths = self._store.lengths[self._plan.documents].astype(np.int64)
        tokens = self._sum_by_micro_batch(np.add.reduceat(lengths, starts) if len(starts) else starts)
        documents = self._sum_by_micro_batch(np.diff(self._plan.rows))
        return choose_shapes(tokens, int(documents.max(initial=0)), _MAX_SHAPES, _COMPILE_TOKENS)

    def _sum_by_micro_batch(self, values: NDArray[np.integer]) -> NDArray[np.int64]:
        """The sum of a value of each row over the rows of every micro-batch of the plan, on all ranks."""
        counts, world = np.diff(self._plan.steps).astype(np.int64), self._world
        step = np.repeat(np.arange(len(counts)), counts)
        row = np.arange(len(step)) - np.repeat(np.cumsum(counts) - counts, counts)
        turn, place = np.divmod(row, world)
        rank = np.where(turn % 2, world - 1 - place, place)  # as in _row_indices
        most = -(-int(counts.max(initial=0)) // (world * self._micro_rows))
        sums = np.bincount((step * most + turn // self._micro_rows) * world + rank, values)
        return sums[sums > 0].astype(np.int64)

    def worst_batch(self) -> PackedBatch:
        """A micro-batch that needs at least as much memory as any of the plan: its longest rows, of equally long ones
        those with the longest documents, as far as they fit into the largest shape, and as many supervised positions
        as the rows have that have most."""
        plan, rows = self._plan, self._micro_rows
        starts, lengths = plan.rows[:-1], self._store.lengths[plan.documents]
        tokens = np.add.reduceat(lengths.astype(np.int64), starts)
        costs = np.add.reduceat(document_cost(lengths), starts)
        supervised = np.add.reduceat(self._store.targets[plan.documents].astype(np.int64), starts)
        longest = np.lexsort((-costs, -tokens))[:rows]
        documents = np.concatenate([plan.documents[plan.rows[row] : plan.rows[row + 1]] for row in longest])
        if self.shapes:
            ends = np.cumsum(self._store.lengths[documents], dtype=np.int64)
            documents = documents[: np.searchsorted(ends, self.shapes[-1].tokens, side="right")]
            documents = documents[: self.shapes[-1].documents]
        batch = self._pack(documents, shape=self.shapes[-1] if self.shapes else None)
        most = min(int(np.sort(supervised)[-rows:].sum()), len(batch.tokens))
        labels = torch.full_like(batch.labels, IGNORE_INDEX)
        labels[:most] = batch.tokens[:most]
        return replace(batch, labels=labels, supervised_at=torch.arange(most), place_at=torch.zeros_like(labels[:most]))

    def with_micro_rows(self, micro_rows: int) -> Loader:
        """The same steps in micro-batches of another size; every rank keeps its rows."""
        return Loader(
            self._store, self._plan, micro_rows, self._rank, self._world, self._pads, self._device,
            (self._slice, self._slices),
        )  # fmt: skip

    def in_layout(self, micro_rows: int, plan: Plan, rank: int, world: int) -> Loader:
        """The same steps, without padding, as rank `rank` of `world` would get them by this plan."""
        return Loader(self._store, plan, micro_rows, rank, world, device=self._device)

    @property
    def micro_rows(self) -> int:
        return self._micro_rows

    @property
    def max_rank_rows(self) -> int:
        """The rows of the largest step on the rank that has most of them."""
        return -(-int(np.diff(self._plan.steps).max(initial=0)) // self._world)

    @property
    def max_seqlen(self) -> int:
        return self._plan.stats.longest

    def close(self) -> None:
        """Stop prefetching."""
        self._batches.close()

    def micro_batch_count(self, step: int) -> int:
        """Micro-batches of a step on every rank."""
        return -(-self._plan.row_count(step) // (self._world * self._micro_rows))

    def _next_key(self, key: tuple[int, int]) -> tuple[int, int] | None:
        step, number = key
        if number + 1 < self.micro_batch_count(step):
            return step, number + 1
        return (step + 1, 0) if step + 1 < self._plan.last_step else None

    def _make_batch(self, key: tuple[int, int]) -> tuple[int, PackedBatch]:
        step, number = key
        rows = self._row_indices(number, self._rank)
        documents = np.concatenate([self._plan.documents[:0], *(self._row(step, int(row)) for row in rows)])
        places = [np.arange(0), *(self._places(step, int(row)) for row in rows)]
        batch = self._pack(documents, np.concatenate(places))
        return int(rows[0]), batch if self._device is None else batch.pin_memory(self._device)

    def _pack(
        self, documents: NDArray[np.integer], places: NDArray[np.integer] | None = None, shape: BatchShape | None = None
    ) -> PackedBatch:
        shape = shape or smallest_shape(self.shapes, int(self._store.lengths[documents].sum(dtype=np.int64)))
        batch = pack_batch(self._store, documents, self._plan.stats.longest, shape, self._slices, places)
        return batch if self._slices == 1 else batch.slice(self._slice, self._slices)

    def _row_indices(self, number: int, rank: int) -> NDArray[np.int64]:
        """The rows of a rank's micro-batch. Numbers beyond the rows of the step stand for empty rows."""
        rounds = np.arange(number * self._micro_rows, (number + 1) * self._micro_rows)
        return rounds * self._world + np.where(rounds % 2, self._world - 1 - rank, rank)

    def _row(self, step: int, row: int) -> NDArray[np.integer]:
        return self._plan.row(step, row) if row < self._plan.row_count(step) else self._plan.documents[:0]

    def _places(self, step: int, row: int) -> NDArray[np.int64]:
        """Where the documents of a row are in `documents(step)`."""
        return self._plan.places(step, row) if row < self._plan.row_count(step) else np.arange(0)

    def _document_count(self, step: int, rank: int) -> int:
        """The number of documents of a step on one rank."""
        rows = (row for number in range(self.micro_batch_count(step)) for row in self._row_indices(number, rank))
        return sum(len(self._row(step, int(row))) for row in rows)


@dataclass(frozen=True, slots=True)
class SavedDocument:
    """A document of a saved step."""

    ids: NDArray[np.int64]
    loss: NDArray[np.uint8]


class ReplayLoader:
    """Loads one saved step, with its micro-batches as they were, in one process. It has the interface of Loader;
    document numbers are indices into `documents`."""

    def __init__(
        self, documents: Sequence[SavedDocument], layout: Sequence[tuple[int, Sequence[int]]], max_seqlen: int,
        shapes: Sequence[BatchShape],
    ) -> None:  # fmt: skip
        """`layout`: (row number that seeds it, documents) of each micro-batch."""
        self._documents, self._layout, self._max_seqlen, self._shapes = documents, layout, max_seqlen, shapes

    @property
    def max_seqlen(self) -> int:
        return self._max_seqlen

    @property
    def highest_id(self) -> int:
        return max((int(document.ids.max(initial=0)) for document in self._documents), default=0)

    @property
    def lengths(self) -> NDArray[np.int64]:
        return np.array([len(document.ids) for document in self._documents], dtype=np.int64)

    def gather(self, documents: NDArray[np.integer], ids: NDArray[np.int64], loss: NDArray[np.uint8]) -> None:
        """Write these documents back to back into `ids` and `loss`, as Store.gather does."""
        if len(documents):
            np.concatenate([self._documents[int(document)].ids for document in documents], out=ids)
            np.concatenate([self._documents[int(document)].loss for document in documents], out=loss)

    def totals(self, step: int) -> StepTotals:
        # A document may occur twice.
        dealt = [self._documents[number] for _, documents in self._layout for number in documents]
        supervised = sum(int(np.count_nonzero(document.loss[1:])) for document in dealt)
        lengths = np.array([len(document.ids) for document in dealt], dtype=np.int64)
        return StepTotals(len(lengths), int(lengths.sum()), supervised, lengths)

    def micro_batch_count(self, step: int) -> int:
        return len(self._layout)

    def layout(self, step: int) -> list[tuple[int, list[int]]]:
        return [(row, list(documents)) for row, documents in self._layout]

    def micro_batches(self, step: int) -> Iterator[tuple[int, PackedBatch]]:
        first = 0
        for row, documents in self._layout:
            yield row, self._batch(documents, first)
            first += len(documents)

    def single_document_batches(self, step: int, limit: int | None) -> Iterator[tuple[int, PackedBatch]]:
        every = [(row, document) for row, documents in self._layout for document in documents]
        for row, document in every[:limit]:
            yield row, self._batch([document])

    def _batch(self, documents: Sequence[int], first: int = 0) -> PackedBatch:
        """`first`: how many documents of the step come before."""
        chosen = np.array(documents, dtype=np.int64)
        shape = smallest_shape(self._shapes, int(self.lengths[chosen].sum()))
        return pack_batch(self, chosen, self._max_seqlen, shape, places=first + np.arange(len(chosen)))
