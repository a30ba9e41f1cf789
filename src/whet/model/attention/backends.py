"""Attention back-ends over packed documents, one signature: eager (the reference), sdpa, cudnn, varlen, fa4, flex,
short.

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

from whet.compat.flash_attention import flash_attention_4_backward, flash_attention_4_forward
from whet.core.console import info, warn
from whet.core.errors import WhetError
from whet.model.attention.interface import AttentionSpec, Documents, document_spans

# eager: the definition, written out


def reference_attention(query: Tensor, key: Tensor, value: Tensor, spec: AttentionSpec, visible: Tensor) -> Tensor:
    """Attention [1 H T V] over the keys that are `visible` [T T] to each query. Materialises all scores."""
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
    scores = query @ key.transpose(2, 3) * spec.scale
    if spec.softcap is not None:
        scores = spec.softcap * torch.tanh(scores / spec.softcap)
    scores = scores.masked_fill(~visible, float("-inf"))
    if spec.sinks is not None:
        sinks = spec.sinks.to(scores.dtype)[None, :, None, None].expand(len(scores), -1, scores.shape[2], 1)
        scores = torch.cat([scores, sinks], dim=-1)
    weights = scores.softmax(dim=-1, dtype=torch.promote_types(scores.dtype, torch.float32)).to(value.dtype)
    return weights[..., : key.shape[2]] @ value


def causal_mask(length: int, window: int | None, device: torch.device) -> Tensor:
    """[T T] the keys that a query attends to within one document."""
    position = torch.arange(length, device=device)
    distance = position[:, None] - position[None, :]
    return (distance >= 0) if window is None else (distance >= 0) & (distance < window)


def eager_attention_forward(
    query: Tensor, key: Tensor, value: Tensor, spec: AttentionSpec, documents: Documents
) -> Tensor:
    """All documents at once under one [T T] mask: the reference for the other back-ends."""
    length, device = query.shape[2], query.device
    position = torch.arange(length, device=device, dtype=documents.cu_seqlens.dtype)
    document = torch.searchsorted(documents.cu_seqlens, position, right=True)
    visible = causal_mask(length, spec.window, device) & (document[:, None] == document[None, :])
    return reference_attention(query, key, value, spec, visible).transpose(1, 2)


# sdpa: torch's scaled_dot_product_attention, one document at a time, on any device


@torch.compiler.disable
def sdpa_attention_forward(
    query: Tensor, key: Tensor, value: Tensor, spec: AttentionSpec, documents: Documents
) -> Tensor:
    """Scaled dot-product attention over each document; the reference for layers with soft-caps or sinks."""
    parts = [
        _sdpa_one_document(query[:, :, a:b], key[:, :, a:b], value[:, :, a:b], spec)
        for a, b in itertools.pairwise(documents.cu_seqlens_host)
        if b > a
    ]
    return torch.cat(parts, dim=2).transpose(1, 2)


def _sdpa_one_document(query: Tensor, key: Tensor, value: Tensor, spec: AttentionSpec) -> Tensor:
    length = query.shape[2]
    if spec.softcap is not None or spec.sinks is not None:
        return reference_attention(query, key, value, spec, causal_mask(length, spec.window, query.device))
    # an explicit mask rules out the flash kernels: only where the document is longer than the window
    windowed = spec.window is not None and spec.window < length
    mask = causal_mask(length, spec.window, query.device) if windowed else None
    return F.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, is_causal=mask is None, scale=spec.scale, enable_gqa=True
    )


# cudnn: one document at a time, the fastest for long documents
#
# cuDNN builds a plan for each length, which takes longer than the attention itself, so documents are padded to a few
# lengths. Padding comes last, where causal attention hides it from all real tokens.

CUDNN_MAX_HEAD_DIM = 128
"""The largest head dimension of its backward pass."""
_CUDNN_LENGTH_MULTIPLE = 1024


@torch.compiler.disable
def cudnn_attention_forward(
    query: Tensor, key: Tensor, value: Tensor, spec: AttentionSpec, documents: Documents
) -> Tensor:
    """Breaks the graph of a compiled layer, because it reads document boundaries on the host."""
    windowed = spec.window is not None and spec.window < documents.max_seqlen
    if windowed or spec.softcap is not None or spec.sinks is not None:
        raise WhetError(
            "model.attention: cudnn supports neither windows nor soft-caps nor sinks, which this model uses. Set "
            "model.attention=auto"
        )
    edges = [(a, b) for a, b in itertools.pairwise(documents.cu_seqlens_host) if b > a]
    parts = [_cudnn_one_document(query[:, :, a:b], key[:, :, a:b], value[:, :, a:b], spec.scale) for a, b in edges]
    return (parts[0] if len(parts) == 1 else torch.cat(parts, dim=2)).transpose(1, 2)


def _cudnn_one_document(query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
    length = query.shape[2]
    missing = -length % _CUDNN_LENGTH_MULTIPLE
    if missing:
        query, key, value = (F.pad(states, (0, 0, 0, missing)) for states in (query, key, value))
    with sdpa_kernel([SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION], set_priority=True):
        out = F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scale, enable_gqa=True)
    return out[:, :, :length]


# varlen: torch's variable-length flash attention on CUDA, one kernel for all documents

VARLEN_MAX_HEAD_DIM = 256
"""The largest head dimension of the kernel."""

# torch 2.13 needs enable_gqa for grouped queries; 2.11 detects them and rejects the argument
_VARLEN_OPTIONS: dict[str, Any] = (
    {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}
)


def varlen_attention_forward(
    query: Tensor, key: Tensor, value: Tensor, spec: AttentionSpec, documents: Documents
) -> Tensor:
    """Does not break the graph of a compiled layer: it reads tensors and constants only."""
    if spec.softcap is not None or spec.sinks is not None:
        raise WhetError(
            "model.attention: varlen supports neither soft-caps nor sinks, which this model uses; flex does"
        )
    width = max(query.shape[-1], value.shape[-1])
    width += -width % 8  # the kernel takes one head dimension, a multiple of 8; zeros do not change scores
    q, k, v = (_to_token_rows(states, width) for states in (query, key, value))
    windowed = spec.window is not None and spec.window < documents.max_seqlen
    window = (spec.window - 1, 0) if windowed and spec.window is not None else (-1, 0)
    cu_seqlens, longest = documents.cu_seqlens, documents.max_seqlen
    out = varlen_attn(
        q, k, v, cu_seqlens, cu_seqlens, longest, longest, scale=spec.scale, window_size=window, **_VARLEN_OPTIONS
    )
    assert isinstance(out, Tensor)
    return out[None, ..., : value.shape[-1]]


def _to_token_rows(states: Tensor, width: int) -> Tensor:
    """[1 H T E] → [T H width]"""
    rows = states[0].transpose(0, 1)
    return F.pad(rows, (0, width - rows.shape[-1])) if rows.shape[-1] < width else rows.contiguous()


def activate_flash_attention_3() -> None:
    """Activate flash attention 3 if its package is installed and the GPU is of the Hopper generation; otherwise torch's
    own stays."""
    activate = getattr(torch_attention, "activate_flash_attention_impl", None)
    if activate is None or not torch.cuda.is_available() or active_flash_attention() is not None:
        return
    if torch.cuda.get_device_capability()[0] != 9:
        return
    try:
        activate("FA3")
    except ImportError:
        return
    except (RuntimeError, ValueError, OSError, AttributeError) as error:
        warn(f"FA3 is installed but cannot be activated ({error}); varlen uses torch's own kernels")
        return
    info("attention: varlen uses FA3")


def active_flash_attention() -> str | None:
    """FA3 if active, or what the user has activated; None for torch's own."""
    current = getattr(torch_attention, "current_flash_attention_impl", None)
    return current() if current is not None else None


# fa4: flash attention 4 (package flash-attn-4) on Hopper GPUs and newer, one kernel for all documents

FA4_HEAD_DIMS = (64, 128)
"""The head dimensions that were measured and compared with the reference."""


def fa4_attention_forward(
    query: Tensor, key: Tensor, value: Tensor, spec: AttentionSpec, documents: Documents
) -> Tensor:
    """Does not break the graph of a compiled layer: it is one opaque operator there."""
    if spec.softcap is not None or spec.sinks is not None:
        raise WhetError("model.attention: fa4 supports neither soft-caps nor sinks, which this model uses; flex does")
    windowed = spec.window is not None and spec.window < documents.max_seqlen
    window = spec.window if windowed and spec.window is not None else 0
    width = max(query.shape[-1], value.shape[-1])  # the kernel takes one head dimension
    q, k, v = (_to_token_rows(states, width) for states in (query, key, value))
    out, _ = _fa4_attention(q, k, v, documents.cu_seqlens, documents.max_seqlen, spec.scale, window)
    return out[None, ..., : value.shape[-1]]


@torch.library.custom_op("whet::fa4_attention", mutates_args=())
def _fa4_attention(
    query: Tensor, key: Tensor, value: Tensor, cu_seqlens: Tensor, longest: int, scale: float, window: int
) -> tuple[Tensor, Tensor]:
    return flash_attention_4_forward(query, key, value, cu_seqlens, longest, scale, window)


@_fa4_attention.register_fake
def _(
    query: Tensor, key: Tensor, value: Tensor, cu_seqlens: Tensor, longest: int, scale: float, window: int
) -> tuple[Tensor, Tensor]:
    tokens, heads, _ = query.shape
    return torch.empty_like(query), query.new_empty(heads, tokens, dtype=torch.float32)


@torch.library.custom_op("whet::fa4_attention_backward", mutates_args=())
def _fa4_attention_backward(
    d_out: Tensor, query: Tensor, key: Tensor, value: Tensor, cu_seqlens: Tensor, out: Tensor, lse: Tensor,
    longest: int, scale: float, window: int,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    return flash_attention_4_backward(
        d_out.contiguous(), query, key, value, cu_seqlens, out, lse, longest, scale, window
    )


@_fa4_attention_backward.register_fake
def _(
    d_out: Tensor, query: Tensor, key: Tensor, value: Tensor, cu_seqlens: Tensor, out: Tensor, lse: Tensor,
    longest: int, scale: float, window: int,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)


def _fa4_setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    query, key, value, cu_seqlens, ctx.longest, ctx.scale, ctx.window = inputs
    ctx.save_for_backward(query, key, value, cu_seqlens, *output)


def _fa4_backward(ctx: Any, d_out: Tensor, d_lse: Tensor | None) -> tuple[Tensor | None, ...]:
    gradients = _fa4_attention_backward(d_out, *ctx.saved_tensors, ctx.longest, ctx.scale, ctx.window)
    return *gradients, None, None, None, None


_fa4_attention.register_autograd(_fa4_backward, setup_context=_fa4_setup_context)


# flex: torch's flex attention on CUDA, with windows, soft-caps and sinks in one compiled kernel, up to fp32

_FLEX_BLOCK = 128
_FLEX_MIN_HEAD_DIM = 16  # smaller heads are padded


@torch.compiler.disable
def flex_attention_forward(
    query: Tensor, key: Tensor, value: Tensor, spec: AttentionSpec, documents: Documents
) -> Tensor:
    """Compiled by itself, outside the graphs of compiled layers, so that all layers share one block mask."""
    out_width = value.shape[-1]
    query, key, value = (
        F.pad(states, (0, _FLEX_MIN_HEAD_DIM - states.shape[-1])) if states.shape[-1] < _FLEX_MIN_HEAD_DIM else states
        for states in (query, key, value)
    )
    # off CUDA, torch's eager path computes the same without a gradient
    run = _compiled_flex_attention() if query.is_cuda else cast(Callable[..., Any], flex_attention)
    mask = _cached_block_mask(documents, query.shape[2], spec.window)
    # even under force_eager: uncompiled flex materialises all scores of the row
    with torch.compiler.set_stance("default"):
        out, aux = run(
            query, key, value, block_mask=mask, scale=spec.scale,
            score_mod=None if spec.softcap is None else _softcap_score_mod(spec.softcap),
            enable_gqa=True, return_aux=AuxRequest(lse=True),
        )  # fmt: skip
    if spec.sinks is not None:  # an additional logit s scales the weights by exp(lse) / (exp(lse) + exp(s))
        kept = torch.sigmoid(aux.lse - spec.sinks.to(aux.lse.dtype)[None, :, None])
        out = out * kept[..., None].to(out.dtype)
    return out[..., :out_width].transpose(1, 2)


@functools.cache
def _compiled_flex_attention() -> Callable[..., Any]:
    return torch.compile(flex_attention)


@functools.cache
def _softcap_score_mod(cap: float) -> Callable[..., Tensor]:
    """One function object for each cap: a new one would trigger a recompilation."""

    def capped(score: Tensor, batch: Tensor, head: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return cap * torch.tanh(score / cap)

    return capped


def _cached_block_mask(documents: Documents, length: int, window: int | None) -> BlockMask:
    if window is not None and window >= documents.max_seqlen:
        window = None
    if window not in documents.block_masks:
        documents.block_masks[window] = document_block_mask(documents.cu_seqlens, length, window)
    return documents.block_masks[window]


def document_block_mask(cu_seqlens: Tensor, length: int, window: int | None) -> BlockMask:
    """The blocks of keys that each block of queries attends to.

    The first visible key never decreases from one query to the next, so visible blocks form a range: no [T, T] mask is
    built.
    """
    position = torch.arange(length, dtype=cu_seqlens.dtype, device=cu_seqlens.device)
    first = cu_seqlens[torch.searchsorted(cu_seqlens, position, right=True) - 1]
    if window is not None:
        first = torch.maximum(first, position - window + 1)

    def visible(batch: Tensor, head: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return (k <= q) & (k >= first[q])

    keys = torch.arange(-(-length // _FLEX_BLOCK), device=cu_seqlens.device)
    queries = keys[:, None]
    begin = first[queries * _FLEX_BLOCK] // _FLEX_BLOCK
    last = queries * _FLEX_BLOCK + _FLEX_BLOCK - 1
    # from block `full` to the diagonal, every query of the block sees every key
    full = (first[last.clamp(max=length - 1)] + _FLEX_BLOCK - 1) // _FLEX_BLOCK
    inside = (keys >= begin) & (keys <= queries)
    whole = (keys >= full) & (keys < queries) & (last < length)  # a partial last block needs the mask
    return BlockMask.from_kv_blocks(
        *_ordered_block_indices(inside & ~whole),
        *_ordered_block_indices(whole),
        BLOCK_SIZE=_FLEX_BLOCK,
        mask_mod=visible,
        seq_lengths=(length, length),
    )


def _ordered_block_indices(selected: Tensor) -> tuple[Tensor, Tensor]:
    """[N N] bool → the number selected in each row, and their indices before the others'."""
    order = selected.to(torch.int32).argsort(dim=-1, descending=True, stable=True)
    return selected.sum(dim=-1, dtype=torch.int32)[None, None], order.to(torch.int32)[None, None]


# short: deterministic attention for rows of many short documents on CUDA, by whet's own Triton kernels
#
# torch's variable-length kernel gives each document its own tiles for each head, and a document of a few hundred tokens
# fills them poorly. Here a tile holds a few tokens of all query heads that share a key head, from any documents.


def short_attention_forward(
    query: Tensor, key: Tensor, value: Tensor, spec: AttentionSpec, documents: Documents
) -> Tensor:
    """Does not break the graph of a compiled layer: it is one opaque operator there."""
    if spec.softcap is not None or spec.sinks is not None:
        raise WhetError("model.attention: short supports neither soft-caps nor sinks, which this model uses; flex does")
    if spec.scale <= 0:  # the kernel takes the maximum before scaling
        raise WhetError(f"model.attention: short needs a positive scale, not {spec.scale}. Set model.attention=varlen")
    windowed = spec.window is not None and spec.window < documents.max_seqlen
    window = spec.window if windowed and spec.window is not None else 0
    spans = document_spans(documents.cu_seqlens, query.shape[2]) if documents.spans is None else documents.spans
    return _short_attention(query, key, value, spans, spec.scale, window)[0][None]


@torch.library.custom_op("whet::short_attention", mutates_args=())
def _short_attention(
    query: Tensor, key: Tensor, value: Tensor, spans: Tensor, scale: float, window: int
) -> tuple[Tensor, Tensor]:
    """→ [T H V], and [K T group] fp32: log₂ of the sum of 2^(score · scale · log₂ e). Window 0: none."""
    from whet.model.attention import short_kernels  # Triton may not be installed

    out, lse = _empty_outputs(query, key, value)
    short_kernels.forward(query, key, value, spans, scale, window, out, lse)
    return out, lse


@torch.library.custom_op("whet::short_attention_backward", mutates_args=())
def _short_attention_backward(
    d_out: Tensor, query: Tensor, key: Tensor, value: Tensor, spans: Tensor, out: Tensor, lse: Tensor,
    scale: float, window: int,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """→ [T H E], [T K E], [T K V]"""
    from whet.model.attention import short_kernels

    dq, dk, dv = (_empty_gradient(states) for states in (query, key, value))
    delta = torch.empty_like(lse)
    short_kernels.backward_query(query, key, value, spans, scale, window, out, lse, d_out, delta, dq)
    short_kernels.backward_key_value(query, key, value, spans, scale, window, lse, d_out, delta, dk, dv)
    return dq, dk, dv


def _empty_outputs(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    _, heads, tokens, _ = query.shape
    key_heads = key.shape[1]
    out = query.new_empty(tokens, heads, value.shape[-1])
    return out, query.new_empty(key_heads, tokens, heads // key_heads, dtype=torch.float32)


def _empty_gradient(states: Tensor) -> Tensor:
    """[T H E], contiguous by token as linear layers produce it, whatever the strides of the states."""
    _, heads, tokens, width = states.shape
    return states.new_empty(tokens, heads, width)


@_short_attention.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, spans: Tensor, scale: float, window: int) -> tuple[Tensor, Tensor]:
    return _empty_outputs(query, key, value)


@_short_attention_backward.register_fake
def _(
    d_out: Tensor, query: Tensor, key: Tensor, value: Tensor, spans: Tensor, out: Tensor, lse: Tensor,
    scale: float, window: int,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    return _empty_gradient(query), _empty_gradient(key), _empty_gradient(value)


def _short_setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    query, key, value, spans, ctx.scale, ctx.window = inputs
    ctx.save_for_backward(query, key, value, spans, *output)


def _short_backward(ctx: Any, d_out: Tensor, d_lse: Tensor | None) -> tuple[Tensor | None, ...]:
    gradients = _short_attention_backward(d_out, *ctx.saved_tensors, ctx.scale, ctx.window)
    return *(gradient.transpose(0, 1)[None] for gradient in gradients), None, None, None


_short_attention.register_autograd(_short_backward, setup_context=_short_setup_context)
