"""The data loader: a rank's micro-batches of a step, by number, prefetched and without state; and the replay of a saved batch."""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, TypeVar

import numpy as np
import torch

from whet.data.batch import BatchShape, PackedBatch, pack_batch, shape_buckets, smallest_shape
from whet.data.plan.planner import Plan
from whet.data.prepare.store import Store

# Making the next things while the present one is used.

K = TypeVar("K", bound=Hashable)
T = TypeVar("T")


class Prefetcher(Generic[K, T]):
    """`make(key)`, begun ahead of time in a background thread for the keys that `following` foretells.

    At most `depth` results wait at a time. Any key may be asked for at any time; another than was foretold only waits.
    """

    def __init__(self, make: Callable[[K], T], next_key: Callable[[K], K | None], depth: int) -> None:
        self._make, self._next_key, self._depth = make, next_key, depth
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="whet-prefetch")  # starts with the first task
        self._pending: deque[tuple[K, Future[T]]] = deque()

    def get(self, key: K) -> T:
        """What `make` makes of the key, or the error that it met."""
        if not self._pending or self._pending[0][0] != key:
            self._cancel()
            self._pending.append((key, self._thread.submit(self._make, key)))
        _, wanted = self._pending.popleft()
        last: K | None = self._pending[-1][0] if self._pending else key
        while len(self._pending) < self._depth and last is not None and (last := self._next_key(last)) is not None:
            self._pending.append((last, self._thread.submit(self._make, last)))
        return wanted.result()

    def close(self) -> None:
        """End the thread; nothing can be asked for any more."""
        self._cancel()
        self._thread.shutdown()

    def _cancel(self) -> None:
        for _, future in self._pending:
            future.cancel()
        self._pending.clear()


# The loader: a step's micro-batches for one rank, by number. It has no state of its own.

if TYPE_CHECKING:
    from numpy.typing import NDArray

_PREFETCH_DEPTH = 4  # micro-batches that are made before they are asked for, across steps


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
        self._batches = Prefetcher(self._make_batch, self._next_key, _PREFETCH_DEPTH)

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
        for number in range(self.micro_batch_count(step)):
            yield self._batches.get((step, number))

    def layout(self, step: int) -> list[tuple[int, list[int]]]:
        """This rank's micro-batches without their content: the number of the first row, and the documents."""
        return [
            (int(places[0]), [int(document) for row in places for document in self._row(step, int(row))])
            for places in (self._row_numbers(number, self._rank) for number in range(self.micro_batch_count(step)))
        ]

    def single_document_batches(self, step: int, most: int | None) -> Iterator[tuple[int, PackedBatch]]:
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
    def shapes(self) -> list[BatchShape]:
        """The sizes that its batches are padded to, if they are."""
        if not self._padded_to:
            return []
        rows = self._micro_rows
        return shape_buckets(BatchShape(self._padded_to * rows, self._plan.stats.fullest * rows), self._lengths)

    @property
    def max_seqlen(self) -> int:
        return self._plan.stats.longest

    def close(self) -> None:
        """Stop making batches ahead of time."""
        self._batches.close()

    def micro_batch_count(self, step: int) -> int:
        """Micro-batches of a step, on every rank."""
        return -(-self._plan.row_count(step) // (self._world * self._micro_rows))

    def _next_key(self, key: tuple[int, int]) -> tuple[int, int] | None:
        step, number = key
        if number + 1 < self.micro_batch_count(step):
            return step, number + 1
        return (step + 1, 0) if step + 1 < len(self._plan) else None

    def _make_batch(self, key: tuple[int, int]) -> tuple[int, PackedBatch]:
        step, number = key
        places = self._row_numbers(number, self._rank)
        documents = np.concatenate([self._plan.documents[:0], *(self._row(step, int(place)) for place in places)])
        batch = self._pack(documents)
        return int(places[0]), batch if self._device is None else batch.pin_memory(self._device)

    def _pack(self, documents: NDArray[np.integer]) -> PackedBatch:
        tokens = int(self._store.lengths[documents].sum(dtype=np.int64))
        shape = smallest_shape(self.shapes, tokens)
        batch = pack_batch(self._store, documents, self._plan.stats.longest, shape, self._slices)
        return batch if self._slices == 1 else batch.slice(self._slice, self._slices)

    def _row_numbers(self, number: int, rank: int) -> NDArray[np.int64]:
        """The rows of a step that a rank's micro-batch takes; a step need not have so many."""
        turns = np.arange(number * self._micro_rows, (number + 1) * self._micro_rows)
        return turns * self._world + np.where(turns % 2, self._world - 1 - rank, rank)

    def _row(self, step: int, place: int) -> NDArray[np.integer]:
        return self._plan.row(step, place) if place < self._plan.row_count(step) else self._plan.documents[:0]

    def _document_count(self, step: int, rank: int) -> int:
        """Documents of a rank's share of a step."""
        places = (place for number in range(self.micro_batch_count(step)) for place in self._row_numbers(number, rank))
        return sum(len(self._row(step, int(place))) for place in places)


# A step that was saved: its documents by themselves, dealt into micro-batches as they were.

if TYPE_CHECKING:
    from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class SavedDocument:
    """Ids, and which of them are targets."""

    ids: NDArray[np.int64]
    loss: NDArray[np.uint8]


class ReplayLoader:
    """Gives what a Loader gives, for one step and in one process. Documents are numbered by their place here."""

    def __init__(
        self, held: Sequence[SavedDocument], layout: Sequence[tuple[int, Sequence[int]]], longest: int,
        shapes: Sequence[BatchShape],
    ) -> None:  # fmt: skip
        """`layout`: of each micro-batch the row that seeds it, and its documents."""
        self._held, self._layout, self._longest, self._shapes = held, layout, longest, shapes

    @property
    def max_seqlen(self) -> int:
        return self._longest

    @property
    def highest_id(self) -> int:
        return max((int(document.ids.max(initial=0)) for document in self._held), default=0)

    @property
    def lengths(self) -> NDArray[np.int64]:
        return np.array([len(document.ids) for document in self._held], dtype=np.int64)

    def gather(self, documents: NDArray[np.integer], ids: NDArray[np.int64], loss: NDArray[np.uint8]) -> None:
        """Write these documents back to back into `ids` and `loss`."""
        if len(documents):
            np.concatenate([self._held[int(document)].ids for document in documents], out=ids)
            np.concatenate([self._held[int(document)].loss for document in documents], out=loss)

    def totals(self, step: int) -> StepTotals:
        dealt = [self._held[number] for _, documents in self._layout for number in documents]  # one may come twice
        supervised = sum(int(np.count_nonzero(document.loss[1:])) for document in dealt)
        lengths = np.array([len(document.ids) for document in dealt], dtype=np.int64)
        return StepTotals(len(lengths), int(lengths.sum()), supervised, lengths)

    def micro_batch_count(self, step: int) -> int:
        return len(self._layout)

    def layout(self, step: int) -> list[tuple[int, list[int]]]:
        return [(row, list(documents)) for row, documents in self._layout]

    def micro_batches(self, step: int) -> Iterator[tuple[int, PackedBatch]]:
        for row, documents in self._layout:
            yield row, self._batch(documents)

    def single_document_batches(self, step: int, most: int | None) -> Iterator[tuple[int, PackedBatch]]:
        every = [(row, document) for row, documents in self._layout for document in documents]
        for row, document in every[:most]:
            yield row, self._batch([document])

    def _batch(self, documents: Sequence[int]) -> PackedBatch:
        chosen = np.array(documents, dtype=np.int64)
        shape = smallest_shape(self._shapes, int(self.lengths[chosen].sum()))
        return pack_batch(self, chosen, self._longest, shape)
