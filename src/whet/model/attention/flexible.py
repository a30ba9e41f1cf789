"""torch's flex attention on CUDA: windows, soft-caps and sinks in one compiled kernel, in any float type."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention

from whet.model.attention.ask import Ask, Documents

_BLOCK = 128
_NARROWEST = 16  # head width that the kernel takes


@torch.compiler.disable
def flex(query: Tensor, key: Tensor, value: Tensor, ask: Ask, documents: Documents) -> Tensor:
    """A graph of its own also inside compiled layers, so that masks are made once for all of them."""
    out_width = value.shape[-1]
    query, key, value = (
        F.pad(states, (0, _NARROWEST - states.shape[-1])) if states.shape[-1] < _NARROWEST else states
        for states in (query, key, value)
    )
    # off CUDA torch's own slow path computes the same, without a gradient
    run = _compiled() if query.is_cuda else cast(Callable[..., Any], flex_attention)
    mask = _mask(documents, query.shape[2], ask.window)
    # also where layers are made to run uncompiled: flex without its kernel holds all scores of the row at once
    with torch.compiler.set_stance("default"):
        out, aux = run(
            query, key, value, score_mod=None if ask.softcap is None else _capped(ask.softcap), block_mask=mask,
            scale=ask.scale, enable_gqa=True, return_aux=AuxRequest(lse=True),
        )  # fmt: skip
    if ask.sinks is not None:  # with a further score s, shares shrink by exp(lse) / (exp(lse) + exp(s))
        kept = torch.sigmoid(aux.lse - ask.sinks.to(aux.lse.dtype)[None, :, None])
        out = out * kept[..., None].to(out.dtype)
    return out[..., :out_width].transpose(1, 2)


@functools.cache
def _compiled() -> Callable[..., Any]:
    return torch.compile(flex_attention)


@functools.cache
def _capped(cap: float) -> Callable[..., Tensor]:
    """One function for each cap: another one would be compiled anew."""

    def capped(score: Tensor, batch: Tensor, head: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return cap * torch.tanh(score / cap)

    return capped


def _mask(documents: Documents, length: int, window: int | None) -> BlockMask:
    if window is not None and window >= documents.longest:
        window = None
    if window not in documents.block_masks:
        documents.block_masks[window] = block_mask(documents.cu_seqlens, length, window)
    return documents.block_masks[window]


def block_mask(cu_seqlens: Tensor, length: int, window: int | None) -> BlockMask:
    """Which blocks of keys each block of queries sees. Computed from the first key that a query sees, which never
    goes back from one query to the next: blocks in sight are a range, and no [T, T] mask is built."""
    place = torch.arange(length, dtype=cu_seqlens.dtype, device=cu_seqlens.device)
    first = cu_seqlens[torch.searchsorted(cu_seqlens, place, right=True) - 1]
    if window is not None:
        first = torch.maximum(first, place - window + 1)

    def visible(batch: Tensor, head: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return (k <= q) & (k >= first[q])

    keys = torch.arange(-(-length // _BLOCK), device=cu_seqlens.device)
    queries = keys[:, None]
    begin = first[queries * _BLOCK] // _BLOCK
    last = queries * _BLOCK + _BLOCK - 1
    full = (first[last.clamp(max=length - 1)] + _BLOCK - 1) // _BLOCK  # from here to the diagonal all is seen by all
    inside = (keys >= begin) & (keys <= queries)
    whole = (keys >= full) & (keys < queries) & (last < length)  # a row's ragged end is left to the mask
    return BlockMask.from_kv_blocks(
        *_listed(inside & ~whole), *_listed(whole), BLOCK_SIZE=_BLOCK, mask_mod=visible, seq_lengths=(length, length)
    )


def _listed(chosen: Tensor) -> tuple[Tensor, Tensor]:
    """[N N] of choices → how many in each row, and their indices first."""
    order = chosen.to(torch.int32).argsort(dim=-1, descending=True, stable=True)
    return chosen.sum(dim=-1, dtype=torch.int32)[None, None], order.to(torch.int32)[None, None]
