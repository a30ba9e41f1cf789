"""What a layer asks of attention, and what a forward pass says of its documents."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """What one layer asks of attention beyond its states."""

    scale: float
    window: int | None = None
    """A token sees itself and the window − 1 tokens before it."""
    softcap: float | None = None
    """Scores s become softcap · tanh(s / softcap)."""
    sinks: Tensor | None = None
    """[H] a further score in each head's softmax, whose share goes nowhere."""


class Documents:
    """Where the documents of one forward pass begin.

    Layers are compiled: what compiled code reads is guarded, and edges differ from batch to batch. So it reads
    `cu_seqlens`, `spans` (tensors) and `longest` (a constant) alone; the rest is for code that the compiler
    passes by. Not a dataclass, because the compiler reads all fields of those.
    """

    def __init__(
        self, cu_seqlens: Tensor, longest: int, edges: Sequence[int], spans: Tensor | None = None,
    ) -> None:  # fmt: skip
        self.cu_seqlens = cu_seqlens  # [D + 1] int32
        self.spans = spans  # [2 T] int32, see `spans_of`; for back-ends that want it, made once for all layers
        self.longest = longest
        self.edges = edges  # cu_seqlens on the host
        self.block_masks: dict[int | None, Any] = {}  # of flex, by window: all layers share them


AttentionBackend = Callable[[Tensor, Tensor, Tensor, AttentionSpec, Documents], Tensor]
"""(query [1 H T E], key [1 K T E], value [1 K T V], ask, documents) → [1 T H V]"""


def document_kwargs(cu_seqlens: Tensor, longest: int, edges: Sequence[int], by_token: bool = False) -> dict[str, Any]:
    """What a forward pass is told of its documents: keyword arguments that the model hands through to attention.

    `by_token`: also where the document of each token begins and ends (`wants_spans` says whether a model needs it).
    """
    spans = document_spans(cu_seqlens, edges[-1]) if by_token else None
    return {"documents": Documents(cu_seqlens, longest, edges, spans)}


def document_spans(cu_seqlens: Tensor, tokens: int) -> Tensor:
    """[2 T] int32: where the document of each token begins, and where it ends; empty documents have no token."""
    place = torch.arange(tokens, dtype=cu_seqlens.dtype, device=cu_seqlens.device)
    after = torch.searchsorted(cu_seqlens, place, right=True)
    return torch.stack([cu_seqlens[after - 1], cu_seqlens[after]])
