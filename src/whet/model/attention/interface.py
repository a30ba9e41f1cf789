"""The signature that all attention back-ends share: states, attention spec of the layer, and where documents begin."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from whet.core.errors import WhetError


class PackingError(WhetError):
    """Packed documents of this model would influence each other; the message says why."""


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """The parameters of one layer's attention."""

    scale: float
    window: int | None = None
    """A token attends to itself and the window − 1 tokens before it."""
    softcap: float | None = None
    """Scores s become softcap · tanh(s / softcap)."""
    sinks: Tensor | None = None
    """[H] an additional logit in each head's softmax, with no value behind it."""


class Documents:
    """The document boundaries of one forward pass.

    Compiled layers guard on what they read, and boundaries differ from batch to batch. Compiled code therefore reads
    only `cu_seqlens` and `spans` (tensors) and `max_seqlen` (a constant of the run); the rest is for code outside the
    graph. Not a dataclass: torch.compile guards on every field of those.
    """

    def __init__(
        self, cu_seqlens: Tensor, max_seqlen: int, cu_seqlens_host: Sequence[int], spans: Tensor | None = None
    ) -> None:
        self.cu_seqlens = cu_seqlens  # [D + 1] int32
        self.spans = spans  # [2 T] int32, see `document_spans`; computed once for all layers
        self.max_seqlen = max_seqlen
        self.cu_seqlens_host = cu_seqlens_host
        self.block_masks: dict[int | None, Any] = {}  # flex's masks by window, shared by all layers
        self.padded_groups: tuple[list[Tensor], Tensor] | None = None  # for recurrent layers, shared by all of them


_CURRENT: ContextVar[Documents | None] = ContextVar("documents", default=None)


class PackedDocuments(AbstractContextManager[None]):
    """Inside this context, rows of the model are packed from `documents`: for layers that get no keyword arguments."""

    def __init__(self, documents: Documents | None) -> None:
        self._documents = documents

    def __enter__(self) -> None:
        self._token = _CURRENT.set(self._documents)

    def __exit__(self, *error: object) -> None:
        _CURRENT.reset(self._token)


def current_documents() -> Documents | None:
    """The documents of the current forward pass; None if its rows are not packed."""
    return _CURRENT.get()


AttentionBackend = Callable[[Tensor, Tensor, Tensor, AttentionSpec, Documents], Tensor]
"""(query [1 H T E], key [1 K T E], value [1 K T V], spec, documents) → [1 T H V]"""


def document_kwargs(
    cu_seqlens: Tensor, max_seqlen: int, cu_seqlens_host: Sequence[int], with_spans: bool = False
) -> dict[str, Any]:
    """Keyword arguments for a model's forward, which transformers passes through to the attention.

    `with_spans`: also compute `document_spans`, for models where `needs_document_spans`.
    """
    spans = document_spans(cu_seqlens, cu_seqlens_host[-1]) if with_spans else None
    return {"documents": Documents(cu_seqlens, max_seqlen, cu_seqlens_host, spans)}


def document_spans(cu_seqlens: Tensor, tokens: int) -> Tensor:
    """[2 T] int32: start and end of each token's document. Empty documents have no token."""
    position = torch.arange(tokens, dtype=cu_seqlens.dtype, device=cu_seqlens.device)
    after = torch.searchsorted(cu_seqlens, position, right=True)
    return torch.stack([cu_seqlens[after - 1], cu_seqlens[after]])


def spec_from_call(
    query: Tensor, scaling: float | None, sliding_window: int | None = None, softcap: float | None = None,
    s_aux: Tensor | None = None, **others: Any,
) -> AttentionSpec:  # fmt: skip
    """The spec from the keyword arguments with which a transformers model calls its attention function."""
    for name in ("position_bias", "indices", "block_indices"):
        if others.get(name) is not None:
            raise PackingError(f"its attention uses '{name}', which whet does not support")
    return AttentionSpec(query.shape[-1] ** -0.5 if scaling is None else scaling, sliding_window, softcap, s_aux)
