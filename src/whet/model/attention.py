"""Document attention: a token attends to the tokens before it in its own document, and to no other.

Each back-end is registered with transformers under a name of its own; models stay as they are. The batch has one row of
T tokens (shape letters: B = 1, H heads, K key-value heads, T tokens, E head width); where documents begin comes with
each forward pass as keyword arguments, which transformers hands through to the attention.
"""

from __future__ import annotations

import contextlib
import inspect
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface

from whet.core.console import warn
from whet.core.errors import WhetError


class Documents:
    """Where the documents of a row lie. A plain class: the compiler looks at no more of it than a back-end reads."""

    def __init__(self, cu_seqlens: Tensor, longest: int, edges: Sequence[int]) -> None:
        self.cu_seqlens, self.longest, self.edges = cu_seqlens, longest, edges


Backend = Callable[[Tensor, Tensor, Tensor, float, Documents], Tensor]
"""(query [1 H T E], key [1 K T E], value [1 K T E], scale, documents) → [1 T H E]"""


@torch.compiler.disable  # each batch has other edges: its loop would be compiled for each
def per_document_sdpa(query: Tensor, key: Tensor, value: Tensor, scale: float, documents: Documents) -> Tensor:
    """torch's own attention, one document at a time: runs everywhere."""
    parts = [
        F.scaled_dot_product_attention(
            query[:, :, a:b], key[:, :, a:b], value[:, :, a:b], is_causal=True, scale=scale, enable_gqa=True
        )
        for a, b in itertools.pairwise(documents.edges)
        if b > a
    ]
    return torch.cat(parts, dim=2).transpose(1, 2)


def eager(query: Tensor, key: Tensor, value: Tensor, scale: float, documents: Documents) -> Tensor:
    """The definition, written out: the reference for the others."""
    place = torch.arange(query.shape[2], device=query.device)
    document = torch.searchsorted(documents.cu_seqlens, place, right=True)
    visible = (document[:, None] == document[None, :]) & (place[:, None] >= place[None, :])
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
    scores = (query @ key.transpose(2, 3) * scale).masked_fill(~visible, float("-inf"))
    return (scores.softmax(dim=-1) @ value).transpose(1, 2)


def varlen(query: Tensor, key: Tensor, value: Tensor, scale: float, documents: Documents) -> Tensor:
    """torch's variable-length flash attention on CUDA: one kernel for all documents."""
    from torch.nn.attention.varlen import varlen_attn

    # torch 2.13 wants to be told of grouped queries, 2.11 rejects the argument and knows by itself
    options: dict[str, Any] = {"scale": scale, "window_size": (-1, 0)}
    if "enable_gqa" in inspect.signature(varlen_attn).parameters:
        options["enable_gqa"] = True
    cu_seqlens, longest = documents.cu_seqlens, documents.longest
    q, k, v = (states[0].transpose(0, 1).contiguous() for states in (query, key, value))
    out = varlen_attn(q, k, v, cu_seqlens, cu_seqlens, longest, longest, **options)
    assert isinstance(out, Tensor)
    return out.unsqueeze(0)


BACKENDS: dict[str, Backend] = {"sdpa": per_document_sdpa, "eager": eager, "varlen": varlen}

_UNKNOWN = ("sliding_window", "softcap", "s_aux", "position_bias")
"""What some architectures ask of attention and these back-ends do not know yet."""


def choose(wanted: str, device: torch.device, dtype: torch.dtype) -> str:
    """The back-end that will serve: the one asked for, or the best for the device."""
    if wanted == "auto":
        return "varlen" if device.type == "cuda" and dtype in (torch.bfloat16, torch.float16) else "sdpa"
    if wanted == "varlen" and (device.type != "cuda" or dtype not in (torch.bfloat16, torch.float16)):
        raise WhetError(
            f"model.attention: varlen needs a CUDA device and bf16; here are {device.type} and {dtype}. "
            "Leave model.attention out to let whet choose"
        )
    return wanted


def described(cu_seqlens: Tensor, longest: int, edges: Sequence[int]) -> dict[str, Any]:
    """What a forward pass is told of its documents: keyword arguments that the model hands through to `attend`."""
    return {"documents": Documents(cu_seqlens, longest, edges)}


def install(model: nn.Module, backend: str) -> None:
    """Make `model` (a transformers model) attend by documents from now on."""
    if getattr(model.config, "attention_dropout", 0):
        warn("the model's configuration asks for dropout inside attention; whet trains without it")
    compute = BACKENDS[backend]

    def attend(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None,
        scaling: float | None = None, dropout: float = 0.0, **kwargs: Any,
    ) -> tuple[Tensor, None]:  # fmt: skip
        documents = kwargs["documents"]
        for name in _UNKNOWN:
            if kwargs.get(name) is not None and not (name == "sliding_window" and kwargs[name] >= documents.longest):
                raise WhetError(f"model.path: this model's attention uses '{name}', which whet cannot do yet")
        query, key = query.to(value.dtype), key.to(value.dtype)  # rotary positions leave fp32 behind under autocast
        scale = scaling if scaling is not None else query.shape[-1] ** -0.5
        return compute(query, key, value, scale, documents), None

    AttentionInterface.register(name_of(backend), attend)
    AttentionMaskInterface.register(name_of(backend), _no_mask)
    model.set_attn_implementation(name_of(backend))  # type: ignore[operator]


def name_of(backend: str) -> str:
    """What transformers knows a back-end by. A name with `sdpa` in it would make it check for its own."""
    return {"sdpa": "whet_per_document", "eager": "whet_reference", "varlen": "whet_varlen"}[backend]


@contextlib.contextmanager
def plain(model: nn.Module) -> Iterator[None]:
    """transformers' own attention for a while, as for generating: that of documents knows no cache."""
    before = model.config._attn_implementation  # type: ignore[union-attr]
    model.set_attn_implementation("sdpa" if model._supports_sdpa else "eager")  # type: ignore[operator]
    try:
        yield
    finally:
        model.set_attn_implementation(before)  # type: ignore[operator]


def _no_mask(*args: Any, **kwargs: Any) -> None:
    """Documents are told apart by their edges; no [T, T] mask is ever built."""
