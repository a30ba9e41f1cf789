"""short: deterministic attention for rows of many short documents on CUDA, by whet's own Triton kernels.

torch's variable-length kernel gives each document its own tiles for each head, and a document of a few hundred tokens
fills them poorly. Here a tile holds a few tokens of all query heads that share a key head, from any documents.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from whet.core.errors import WhetError
from whet.model.attention.interface import AttentionSpec, Documents, document_spans


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


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    query, key, value, spans, ctx.scale, ctx.window = inputs
    ctx.save_for_backward(query, key, value, spans, *output)


def _backward(ctx: Any, d_out: Tensor, d_lse: Tensor | None) -> tuple[Tensor | None, ...]:
    gradients = _short_attention_backward(d_out, *ctx.saved_tensors, ctx.scale, ctx.window)
    return *(gradient.transpose(0, 1)[None] for gradient in gradients), None, None, None


_short_attention.register_autograd(_backward, setup_context=_setup_context)
