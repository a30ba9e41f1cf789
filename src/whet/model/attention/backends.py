"""Attention back-ends over packed documents, behind one signature: eager (the reference), sdpa, cudnn, varlen and flex.

Shape letters: H heads, K key-value heads, T tokens, E head width, V head width of values."""

from __future__ import annotations

import functools
import inspect
import itertools
from collections.abc import Callable
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import attention as torch_attention
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention
from torch.nn.attention.varlen import varlen_attn

from whet.core.console import info, warn
from whet.core.errors import WhetError
from whet.model.attention.interface import AttentionSpec, Documents

# The definition of attention, written out.


def reference_attention(query: Tensor, key: Tensor, value: Tensor, ask: AttentionSpec, visible: Tensor) -> Tensor:
    """Attention over the keys that are `visible` [T T] to each query, as [1 H T V]; all scores exist at once."""
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
    scores = query @ key.transpose(2, 3) * ask.scale
    if ask.softcap is not None:
        scores = ask.softcap * torch.tanh(scores / ask.softcap)
    scores = scores.masked_fill(~visible, float("-inf"))
    if ask.sinks is not None:
        sinks = ask.sinks.to(scores.dtype)[None, :, None, None].expand(len(scores), -1, scores.shape[2], 1)
        scores = torch.cat([scores, sinks], dim=-1)
    shares = scores.softmax(dim=-1, dtype=torch.promote_types(scores.dtype, torch.float32)).to(value.dtype)
    return shares[..., : key.shape[2]] @ value


def causal_mask(length: int, window: int | None, device: torch.device) -> Tensor:
    """[T T] which keys a query sees within one document."""
    place = torch.arange(length, device=device)
    back = place[:, None] - place[None, :]
    return (back >= 0) if window is None else (back >= 0) & (back < window)


def eager_attention_forward(
    query: Tensor, key: Tensor, value: Tensor, ask: AttentionSpec, documents: Documents
) -> Tensor:
    """All documents at once under one mask: the reference for the other back-ends."""
    length, device = query.shape[2], query.device
    place = torch.arange(length, device=device, dtype=documents.cu_seqlens.dtype)
    document = torch.searchsorted(documents.cu_seqlens, place, right=True)
    visible = causal_mask(length, ask.window, device) & (document[:, None] == document[None, :])
    return reference_attention(query, key, value, ask, visible).transpose(1, 2)


# torch's own attention, one document at a time: runs everywhere.


@torch.compiler.disable
def sdpa_attention_forward(
    query: Tensor, key: Tensor, value: Tensor, ask: AttentionSpec, documents: Documents
) -> Tensor:
    """Scaled dot-product attention over each document; the definition where a layer asks for more than that knows."""
    parts = [
        _sdpa_one_document(query[:, :, a:b], key[:, :, a:b], value[:, :, a:b], ask)
        for a, b in itertools.pairwise(documents.edges)
        if b > a
    ]
    return torch.cat(parts, dim=2).transpose(1, 2)


def _sdpa_one_document(query: Tensor, key: Tensor, value: Tensor, ask: AttentionSpec) -> Tensor:
    length = query.shape[2]
    if ask.softcap is not None or ask.sinks is not None:
        return reference_attention(query, key, value, ask, causal_mask(length, ask.window, query.device))
    # a mask costs the fast kernels: only where the document outgrows the window
    windowed = ask.window is not None and ask.window < length
    mask = causal_mask(length, ask.window, query.device) if windowed else None
    return F.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, is_causal=mask is None, scale=ask.scale, enable_gqa=True
    )


# cuDNN's attention, one document at a time: the fastest there is for long ones.
#
# It plans anew for each length, which takes longer than the attention itself, so documents are filled up to a few
# lengths. What is filled up comes last, where nothing that is real can see it.

CUDNN_MAX_HEAD_DIM = 128
"""The head width up to which it goes backward."""
_CUDNN_LENGTH_MULTIPLE = 1024


@torch.compiler.disable
def cudnn_attention_forward(
    query: Tensor, key: Tensor, value: Tensor, ask: AttentionSpec, documents: Documents
) -> Tensor:
    """A compiled layer is two graphs around it, because where documents begin is known on the host alone."""
    windowed = ask.window is not None and ask.window < documents.longest
    if windowed or ask.softcap is not None or ask.sinks is not None:
        raise WhetError("model.attention: cudnn knows neither windows nor soft-caps nor sinks, which this model uses")
    edges = [(a, b) for a, b in itertools.pairwise(documents.edges) if b > a]
    parts = [_cudnn_one_document(query[:, :, a:b], key[:, :, a:b], value[:, :, a:b], ask.scale) for a, b in edges]
    return (parts[0] if len(parts) == 1 else torch.cat(parts, dim=2)).transpose(1, 2)


def _cudnn_one_document(query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
    length = query.shape[2]
    missing = -length % _CUDNN_LENGTH_MULTIPLE
    if missing:
        query, key, value = (F.pad(states, (0, 0, 0, missing)) for states in (query, key, value))
    with sdpa_kernel([SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION], set_priority=True):
        out = F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scale, enable_gqa=True)
    return out[:, :, :length]


# torch's variable-length flash attention on CUDA: one kernel for all documents.

VARLEN_MAX_HEAD_DIM = 256
"""The head width up to which the kernel is made."""

# torch 2.13 wants to be told of grouped queries, 2.11 rejects the argument and knows by itself
_VARLEN_OPTIONS: dict[str, Any] = (
    {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}
)


def varlen_attention_forward(
    query: Tensor, key: Tensor, value: Tensor, ask: AttentionSpec, documents: Documents
) -> Tensor:
    """Compiled layers compile through this one: nothing in it looks at the edges."""
    if ask.softcap is not None or ask.sinks is not None:
        raise WhetError("model.attention: varlen knows neither soft-caps nor sinks, which this model uses; flex does")
    width = max(query.shape[-1], value.shape[-1])
    width += -width % 8  # the kernel takes one width, in eights; zeros add nothing to a score
    q, k, v = (_to_token_rows(states, width) for states in (query, key, value))
    windowed = ask.window is not None and ask.window < documents.longest
    window = (ask.window - 1, 0) if windowed and ask.window is not None else (-1, 0)
    cu_seqlens, longest = documents.cu_seqlens, documents.longest
    out = varlen_attn(
        q, k, v, cu_seqlens, cu_seqlens, longest, longest, scale=ask.scale, window_size=window, **_VARLEN_OPTIONS
    )
    assert isinstance(out, Tensor)
    return out[None, ..., : value.shape[-1]]


def _to_token_rows(states: Tensor, width: int) -> Tensor:
    """[1 H T E] → [T H width]"""
    rows = states[0].transpose(0, 1)
    return F.pad(rows, (0, width - rows.shape[-1])) if rows.shape[-1] < width else rows.contiguous()


def activate_newest_flash_attention() -> None:
    """Let flash attention 3 or 4 serve where its package is installed for this GPU; otherwise torch's own stays."""
    activate = getattr(torch_attention, "activate_flash_attention_impl", None)
    if activate is None or not torch.cuda.is_available() or active_flash_attention() is not None:
        return
    for name in {9: ("FA3", "FA4"), 10: ("FA4",)}.get(torch.cuda.get_device_capability()[0], ()):
        try:
            activate(name)
        except ImportError:
            continue
        except (RuntimeError, ValueError, OSError, AttributeError) as error:
            warn(f"{name} is installed and cannot be used ({error}); the next best serves")
            continue
        info(f"attention: {name} serves varlen")
        return


def active_flash_attention() -> str | None:
    """FA3 or FA4 where active; None: torch's own."""
    current = getattr(torch_attention, "current_flash_attention_impl", None)
    return current() if current is not None else None


# torch's flex attention on CUDA: windows, soft-caps and sinks in one compiled kernel, in any float type.

_FLEX_BLOCK = 128
_FLEX_MIN_HEAD_DIM = 16  # head width that the kernel takes


@torch.compiler.disable
def flex_attention_forward(
    query: Tensor, key: Tensor, value: Tensor, ask: AttentionSpec, documents: Documents
) -> Tensor:
    """A graph of its own also inside compiled layers, so that masks are made once for all of them."""
    out_width = value.shape[-1]
    query, key, value = (
        F.pad(states, (0, _FLEX_MIN_HEAD_DIM - states.shape[-1])) if states.shape[-1] < _FLEX_MIN_HEAD_DIM else states
        for states in (query, key, value)
    )
    # off CUDA torch's own slow path computes the same, without a gradient
    run = _compiled_flex_attention() if query.is_cuda else cast(Callable[..., Any], flex_attention)
    mask = _cached_block_mask(documents, query.shape[2], ask.window)
    # also where layers are made to run uncompiled: flex without its kernel holds all scores of the row at once
    with torch.compiler.set_stance("default"):
        out, aux = run(
            query, key, value, score_mod=None if ask.softcap is None else _softcap_score_mod(ask.softcap), block_mask=mask,
            scale=ask.scale, enable_gqa=True, return_aux=AuxRequest(lse=True),
        )  # fmt: skip
    if ask.sinks is not None:  # with a further score s, shares shrink by exp(lse) / (exp(lse) + exp(s))
        kept = torch.sigmoid(aux.lse - ask.sinks.to(aux.lse.dtype)[None, :, None])
        out = out * kept[..., None].to(out.dtype)
    return out[..., :out_width].transpose(1, 2)


@functools.cache
def _compiled_flex_attention() -> Callable[..., Any]:
    return torch.compile(flex_attention)


@functools.cache
def _softcap_score_mod(cap: float) -> Callable[..., Tensor]:
    """One function for each cap: another one would be compiled anew."""

    def capped(score: Tensor, batch: Tensor, head: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return cap * torch.tanh(score / cap)

    return capped


def _cached_block_mask(documents: Documents, length: int, window: int | None) -> BlockMask:
    if window is not None and window >= documents.longest:
        window = None
    if window not in documents.block_masks:
        documents.block_masks[window] = document_block_mask(documents.cu_seqlens, length, window)
    return documents.block_masks[window]


def document_block_mask(cu_seqlens: Tensor, length: int, window: int | None) -> BlockMask:
    """Which blocks of keys each block of queries sees. Computed from the first key that a query sees, which never
    goes back from one query to the next: blocks in sight are a range, and no [T, T] mask is built."""
    place = torch.arange(length, dtype=cu_seqlens.dtype, device=cu_seqlens.device)
    first = cu_seqlens[torch.searchsorted(cu_seqlens, place, right=True) - 1]
    if window is not None:
        first = torch.maximum(first, place - window + 1)

    def visible(batch: Tensor, head: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return (k <= q) & (k >= first[q])

    keys = torch.arange(-(-length // _FLEX_BLOCK), device=cu_seqlens.device)
    queries = keys[:, None]
    begin = first[queries * _FLEX_BLOCK] // _FLEX_BLOCK
    last = queries * _FLEX_BLOCK + _FLEX_BLOCK - 1
    full = (
        first[last.clamp(max=length - 1)] + _FLEX_BLOCK - 1
    ) // _FLEX_BLOCK  # from here to the diagonal all is seen by all
    inside = (keys >= begin) & (keys <= queries)
    whole = (keys >= full) & (keys < queries) & (last < length)  # a row's ragged end is left to the mask
    return BlockMask.from_kv_blocks(
        *_ordered_block_indices(inside & ~whole),
        *_ordered_block_indices(whole),
        BLOCK_SIZE=_FLEX_BLOCK,
        mask_mod=visible,
        seq_lengths=(length, length),
    )


def _ordered_block_indices(chosen: Tensor) -> tuple[Tensor, Tensor]:
    """[N N] of choices → how many in each row, and their indices first."""
    order = chosen.to(torch.int32).argsort(dim=-1, descending=True, stable=True)
    return chosen.sum(dim=-1, dtype=torch.int32)[None, None], order.to(torch.int32)[None, None]
