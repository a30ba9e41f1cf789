"""PackedBatch: several documents in one row, each blind to the others.

Two documents, `Hi!` (its last two tokens supervised) and `Yes` (all), in a row of eight:

    tokens      H  i  !  Y  e  s  ·  ·
    labels      i  !  –  e  s  –  –  –      the next token of the same document, if it is a target
    positions   0  1  2  0  1  2  0  1      restart with each document
    cu_seqlens  0        3        6     8   where documents begin; the last one here is padding
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from torch import Tensor

from whet.data.plan.packing import cumulative_offsets

if TYPE_CHECKING:
    from numpy.typing import NDArray

SIZE_MULTIPLE = 128
"""Sizes are multiples of what kernels work on at a time."""

IGNORE_INDEX = -100
"""The label of a position that is not learned."""


class DocumentReader(Protocol):
    """Where a batch takes its documents from: a store, or a batch that was saved."""

    @property
    def lengths(self) -> NDArray[np.integer]: ...

    def gather(self, documents: NDArray[np.integer], ids: NDArray[np.int64], loss: NDArray[np.uint8]) -> None: ...


@dataclass(frozen=True, slots=True)
class PackedBatch:
    """What the model gets in one forward pass. T: tokens, D: documents, S: supervised positions."""

    tokens: Tensor  # [T] int64
    labels: Tensor  # [T] int64, IGNORED where nothing is learned
    positions: Tensor  # [T] int64
    cu_seqlens: Tensor  # [D + 1] int32
    max_seqlen: int  # bounds the length of a document; a constant of the plan, so that nothing is compiled anew
    supervised_at: Tensor  # [S] int64: where labels are not IGNORED, known without asking the device
    cu_seqlens_host: tuple[int, ...]  # cu_seqlens on the host
    documents: NDArray[np.integer]  # which documents of the store these are, in order; padding is not among them
    slice_start: int = 0  # where T begins in the row that edges describe, if it is a slice of that

    def to(self, device: torch.device) -> PackedBatch:
        """The same batch on a device."""
        return self._map_tensors(lambda tensor: tensor.to(device, non_blocking=True))

    def pin_memory(self, device: torch.device) -> PackedBatch:
        """The same batch in pages that `device`, a GPU, reads by itself, while nobody waits for it."""
        with torch.cuda.device(device):
            return self._map_tensors(Tensor.pin_memory)

    def slice(self, number: int, count: int) -> PackedBatch:
        """The `number`-th of `count` equal parts: tokens of its own, edges of the whole row. For those who compute a
        row together."""
        width = len(self.tokens) // count
        start = number * width
        here = slice(start, start + width)
        places = self.supervised_at.numpy() - start
        places = places[(places >= 0) & (places < width)]
        return replace(
            self, tokens=self.tokens[here], labels=self.labels[here], positions=self.positions[here], slice_start=start,
            supervised_at=torch.from_numpy(places),
        )  # fmt: skip

    def _map_tensors(self, change: Callable[[Tensor], Tensor]) -> PackedBatch:
        tensors: dict[str, Any] = {
            field.name: change(held) for field in fields(self) if isinstance(held := getattr(self, field.name), Tensor)
        }
        return replace(self, **tensors)


@dataclass(frozen=True, slots=True)
class BatchShape:
    """A constant size of padded batches. None: no padding, for devices where nothing is compiled."""

    tokens: int
    documents: int


def shape_buckets(largest: BatchShape, count: int) -> list[BatchShape]:
    """At most `count` sizes, smallest first: the largest, its half, its quarter and so on.

    Few, because layers are compiled for each of them.
    """
    parts = {
        min(largest.tokens, -(-largest.tokens // 2**power // SIZE_MULTIPLE) * SIZE_MULTIPLE)
        for power in range(1, count)
    }
    return [BatchShape(tokens, largest.documents) for tokens in sorted({*parts, largest.tokens})]


def smallest_shape(shapes: Sequence[BatchShape], tokens: int) -> BatchShape | None:
    """The first of these sizes that holds so many tokens; None: there is none, and batches are not padded."""
    return next((shape for shape in shapes if shape.tokens >= tokens), None)


def pack_batch(
    store: DocumentReader, documents: NDArray[np.integer], longest: int, shape: BatchShape | None, slices: int = 1
) -> PackedBatch:
    """Concatenate documents; fill up to `shape`, and to a multiple of `slices`, with padding documents. No documents:
    padding alone.

    Padding is cut into documents that are no longer than the `longest` real one: attention's work grows with the
    square of a length, and one document of padding could cost more than all that is learned from.
    """
    edges = cumulative_offsets(store.lengths[documents].astype(np.int64))
    filled = int(edges[-1])
    total = -(-(shape.tokens if shape else max(1, filled)) // slices) * slices
    longest = max(1, longest)
    if total > filled:
        edges = np.concatenate([edges, np.arange(filled + longest, total, longest), [total]])
    tokens, loss = np.zeros(total, dtype=np.int64), np.zeros(total, dtype=np.uint8)
    store.gather(documents, tokens[:filled], loss[:filled])
    loss[edges[:-1]] = 0  # nothing stands before a first token that could predict it
    targets = np.flatnonzero(loss)
    labels = np.full(total, IGNORE_INDEX, dtype=np.int64)
    labels[targets - 1] = tokens[targets]
    positions = np.arange(total) - np.repeat(edges[:-1], np.diff(edges))
    if shape:  # empty documents at the end keep the number of edges constant
        most = shape.documents + -(-total // longest)
        edges = np.concatenate([edges, np.full(most + 1 - len(edges), total)])
    return PackedBatch(
        tokens=torch.from_numpy(tokens),
        labels=torch.from_numpy(labels),
        positions=torch.from_numpy(positions),
        cu_seqlens=torch.from_numpy(edges.astype(np.int32)),
        max_seqlen=longest,
        supervised_at=torch.from_numpy(targets - 1),
        cu_seqlens_host=tuple(edges.tolist()),
        documents=documents,
    )
