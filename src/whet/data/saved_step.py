"""A step that was saved: its documents by themselves, dealt into micro-batches as they were."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from whet.data.batch import PackedBatch, Shape, pack_batch, smallest
from whet.data.loader import StepTotals

if TYPE_CHECKING:
    from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class SavedDocument:
    """Ids, and which of them are targets."""

    ids: NDArray[np.int64]
    loss: NDArray[np.uint8]


class SavedStep:
    """Gives what a Loader gives, for one step and in one process. Documents are numbered by their place here."""

    def __init__(
        self, held: Sequence[SavedDocument], layout: Sequence[tuple[int, Sequence[int]]], longest: int,
        shapes: Sequence[Shape],
    ) -> None:  # fmt: skip
        """`layout`: of each micro-batch the row that seeds it, and its documents."""
        self._held, self._layout, self._longest, self._shapes = held, layout, longest, shapes

    @property
    def longest(self) -> int:
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

    def count(self, step: int) -> int:
        return len(self._layout)

    def layout(self, step: int) -> list[tuple[int, list[int]]]:
        return [(row, list(documents)) for row, documents in self._layout]

    def micro_batches(self, step: int) -> Iterator[tuple[int, PackedBatch]]:
        for row, documents in self._layout:
            yield row, self._batch(documents)

    def alone(self, step: int, most: int | None) -> Iterator[tuple[int, PackedBatch]]:
        every = [(row, document) for row, documents in self._layout for document in documents]
        for row, document in every[:most]:
            yield row, self._batch([document])

    def _batch(self, documents: Sequence[int]) -> PackedBatch:
        chosen = np.array(documents, dtype=np.int64)
        shape = smallest(self._shapes, int(self.lengths[chosen].sum()))
        return pack_batch(self, chosen, self._longest, shape)
