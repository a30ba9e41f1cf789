"""PackedBatch: several documents in one row, each blind to the others.

Two documents, `Hi!` (its last two tokens supervised) and `Yes` (all), in a row of eight:

    tokens      H  i  !  Y  e  s  ·  ·
    labels      i  !  –  e  s  –  –  –      the next token of the same document, if it is a target
    positions   0  1  2  0  1  2  0  1      restart with each document
    cu_seqlens  0        3        6     8   where documents begin; the last one here is padding
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from whet.data.store import Store

if TYPE_CHECKING:
    from numpy.typing import NDArray

IGNORED = -100
"""The label of a position that is not learned."""


@dataclass(frozen=True, slots=True)
class PackedBatch:
    """What the model gets in one forward pass. T: tokens, D: documents, S: supervised positions."""

    tokens: Tensor  # [T] int64
    labels: Tensor  # [T] int64, IGNORED where nothing is learned
    positions: Tensor  # [T] int64
    cu_seqlens: Tensor  # [D + 1] int32
    longest: int  # bounds the length of a document; a constant of the plan, so that nothing is compiled anew
    supervised_at: Tensor  # [S] int64: where labels are not IGNORED, known without asking the device
    edges: tuple[int, ...]  # cu_seqlens on the host

    def to(self, device: torch.device) -> PackedBatch:
        """The same batch on a device."""
        tensors = {
            name: getattr(self, name).to(device, non_blocking=True)
            for name in ("tokens", "labels", "positions", "cu_seqlens", "supervised_at")
        }
        return replace(self, **tensors)


@dataclass(frozen=True, slots=True)
class Shape:
    """The constant size of padded batches. None: no padding, for devices where nothing is compiled."""

    tokens: int
    documents: int


def pack_batch(store: Store, documents: Sequence[int], longest: int, shape: Shape | None) -> PackedBatch:
    """Concatenate documents; fill up to `shape` with one padding document. No documents: padding alone."""
    ids = [store.ids(document) for document in documents]
    labels = [_labels(ids_, store.loss(document)) for ids_, document in zip(ids, documents, strict=True)]
    room = shape.tokens - sum(map(len, ids)) if shape else (0 if ids else 1)
    if room:
        ids.append(np.zeros(room, dtype=np.int64))
        labels.append(np.full(room, IGNORED, dtype=np.int64))
    positions = np.concatenate([np.arange(len(ids_)) for ids_ in ids])
    edges = np.cumsum([0, *map(len, ids)])
    if shape:  # empty documents at the end keep the number of edges constant
        edges = np.concatenate([edges, np.full(shape.documents + 2 - len(edges), edges[-1])])
    flat = np.concatenate(labels)
    return PackedBatch(
        tokens=torch.from_numpy(np.concatenate(ids)),
        labels=torch.from_numpy(flat),
        positions=torch.from_numpy(positions),
        cu_seqlens=torch.from_numpy(edges.astype(np.int32)),
        longest=shape.tokens if shape else longest,  # the padding may be the longest document
        supervised_at=torch.from_numpy(np.flatnonzero(flat != IGNORED)),
        edges=tuple(edges.tolist()),
    )


def _labels(ids: NDArray[np.int64], loss: NDArray[np.bool_]) -> NDArray[np.int64]:
    labels = np.full(len(ids), IGNORED, dtype=np.int64)
    labels[:-1][loss[1:]] = ids[1:][loss[1:]]
    return labels
