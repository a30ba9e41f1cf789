"""PackedBatch: several documents in one row, without attention between them.

Two documents, `Hi!` (its last two tokens supervised) and `Yes` (all), in a row of eight tokens:

    tokens      H  i  !  Y  e  s  ·  ·
    labels      i  !  –  e  s  –  –  –      the next token of the same document, if it is a target
    positions   0  1  2  0  1  2  0  1      restart with each document
    cu_seqlens  0        3        6     8   where documents start; the last one here is padding
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
"""Padded sizes are multiples of this, the tile size of kernels."""

IGNORE_INDEX = -100
"""The label of an unsupervised position, as in torch's cross entropy."""


class DocumentReader(Protocol):
    """The documents of a batch: a Store or a ReplayLoader."""

    @property
    def lengths(self) -> NDArray[np.integer]: ...

    def gather(self, documents: NDArray[np.integer], ids: NDArray[np.int64], loss: NDArray[np.uint8]) -> None: ...


@dataclass(frozen=True, slots=True)
class PackedBatch:
    """The input of one forward pass. T: tokens, D: documents, S: supervised positions."""

    tokens: Tensor  # [T] int64
    labels: Tensor  # [T] int64, IGNORE_INDEX where unsupervised
    positions: Tensor  # [T] int64
    cu_seqlens: Tensor  # [D + 1] int32
    max_seqlen: int  # upper bound on the length of a document; constant for a plan, so that nothing is recompiled
    supervised_at: Tensor  # [S] int64: where labels are not IGNORE_INDEX, known without a device sync
    cu_seqlens_host: tuple[int, ...]  # cu_seqlens on the host
    documents: NDArray[np.integer]  # document numbers in the store, in order; without padding
    place_at: Tensor  # [S] int64: which document of the step each supervised position is in, by its place in the plan
    slice_start: int = 0  # of a slice: its start in the row that cu_seqlens describes

    def is_document(self) -> Tensor:
        """[T] bool: which tokens are not padding."""
        places = torch.arange(self.slice_start, self.slice_start + len(self.tokens), device=self.tokens.device)
        return places < self.cu_seqlens_host[len(self.documents)]

    def to(self, device: torch.device) -> PackedBatch:
        """Copy the batch to a device."""
        return self._map_tensors(lambda tensor: tensor.to(device, non_blocking=True))

    def pin_memory(self, device: torch.device) -> PackedBatch:
        """Copy the batch to pinned memory, from which `device`, a GPU, copies asynchronously."""
        with torch.cuda.device(device):
            return self._map_tensors(Tensor.pin_memory)

    def slice(self, number: int, count: int) -> PackedBatch:
        """The `number`-th of `count` equal slices of the tokens, for context parallelism; cu_seqlens stay those of the
        whole row."""
        width = len(self.tokens) // count
        start = number * width
        here = slice(start, start + width)
        positions = self.supervised_at.numpy() - start
        is_here = (positions >= 0) & (positions < width)
        return replace(
            self, tokens=self.tokens[here], labels=self.labels[here], positions=self.positions[here], slice_start=start,
            supervised_at=torch.from_numpy(positions[is_here]), place_at=self.place_at[torch.from_numpy(is_here)],
        )  # fmt: skip

    def _map_tensors(self, function: Callable[[Tensor], Tensor]) -> PackedBatch:
        tensors: dict[str, Any] = {
            field.name: function(held)
            for field in fields(self)
            if isinstance(held := getattr(self, field.name), Tensor)
        }
        return replace(self, **tensors)


@dataclass(frozen=True, slots=True)
class BatchShape:
    """The size of padded batches. Compiled code needs few different ones."""

    tokens: int
    documents: int


_SHAPE_SAVING = 0.05
"""A further shape must save so much of the padded tokens."""
_SIZE_STEPS = 16
"""Sizes between two powers of two. With more of them, another seed would often mean another size, and every layer
would be compiled again."""


def choose_shapes(tokens: NDArray[np.integer], documents: int, count: int, compile_tokens: int = 0) -> list[BatchShape]:
    """At most `count` shapes, smallest first, that pad batches of these many tokens least. Layers are compiled for each
    shape, which must save more tokens than `compile_tokens`. `documents`: the most in a batch."""
    if not len(tokens):
        return []
    tokens = np.maximum(tokens, 1).astype(np.int64)
    multiple = np.maximum(SIZE_MULTIPLE, 2 ** np.floor(np.log2(tokens)).astype(np.int64) // _SIZE_STEPS)
    sizes, batches = np.unique(-(-tokens // multiple) * multiple, return_counts=True)
    before = cumulative_offsets(batches)  # before[i]: batches smaller than sizes[i]
    # padded[i, j]: the tokens of all batches from sizes[i] to sizes[j], padded to the latter
    padded = np.where(np.tri(len(sizes), dtype=bool).T, sizes * (before[1:] - before[:-1, None]), np.inf)
    least, chosen = padded[0], [[j] for j in range(len(sizes))]  # for batches up to each size, with one shape
    for _ in range(1, min(count, len(sizes))):
        split = np.concatenate([[np.inf], least[:-1]])[:, None] + padded  # split[i, j]: sizes[j] is for those from i on
        first = split.argmin(axis=0)
        if least[-1] - split[first[-1], -1] < max(compile_tokens, _SHAPE_SAVING * least[-1]):
            break
        least = split[first, np.arange(len(sizes))]
        chosen = [[*(chosen[i - 1] if i else []), j] for j, i in enumerate(first)]
    return [BatchShape(int(sizes[j]), documents) for j in chosen[-1]]


def smallest_shape(shapes: Sequence[BatchShape], tokens: int) -> BatchShape | None:
    """The first shape with room for this many tokens; None, which means no padding, if there are no shapes."""
    return next((shape for shape in shapes if shape.tokens >= tokens), None)


def pack_batch(
    store: DocumentReader, documents: NDArray[np.integer], max_seqlen: int, shape: BatchShape | None, slices: int = 1,
    places: NDArray[np.integer] | None = None,
) -> PackedBatch:  # fmt: skip
    """Concatenate documents and pad to `shape` and to a multiple of `slices`. Without documents, all is padding.
    `places`: of each document in its step; default: in this batch.

    Padding is cut into short documents: attention is quadratic in the length of a document, so one long document of
    padding could cost more than all the others.
    """
    offsets = cumulative_offsets(store.lengths[documents].astype(np.int64))
    filled = int(offsets[-1])
    total = -(-(shape.tokens if shape else max(1, filled)) // slices) * slices
    max_seqlen = max(1, max_seqlen)
    piece = min(max_seqlen, max(SIZE_MULTIPLE, max_seqlen // 8))
    if total > filled:
        offsets = np.concatenate([offsets, np.arange(filled + piece, total, piece), [total]])
    tokens, loss = np.zeros(total, dtype=np.int64), np.zeros(total, dtype=np.uint8)
    store.gather(documents, tokens[:filled], loss[:filled])
    loss[offsets[:-1]] = 0  # the first token has no context to be predicted from
    targets = np.flatnonzero(loss)
    document_at = np.searchsorted(offsets, targets, side="right") - 1
    labels = np.full(total, IGNORE_INDEX, dtype=np.int64)
    labels[targets - 1] = tokens[targets]
    positions = np.arange(total) - np.repeat(offsets[:-1], np.diff(offsets))
    if shape:  # empty documents at the end keep the length of cu_seqlens constant
        most = shape.documents + -(-total // piece)
        offsets = np.concatenate([offsets, np.full(most + 1 - len(offsets), total)])
    return PackedBatch(
        tokens=torch.from_numpy(tokens),
        labels=torch.from_numpy(labels),
        positions=torch.from_numpy(positions),
        cu_seqlens=torch.from_numpy(offsets.astype(np.int32)),
        max_seqlen=max_seqlen,
        supervised_at=torch.from_numpy(targets - 1),
        cu_seqlens_host=tuple(offsets.tolist()),
        documents=documents,
        place_at=torch.from_numpy(document_at if places is None else places[document_at].astype(np.int64)),
    )
