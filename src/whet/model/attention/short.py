"""Attention for many short documents in one row on CUDA, deterministic: Triton kernels of whet's own.

torch's variable-length kernel gives each document tiles of its own for each head, of which a document of a few hundred
tokens fills little. Here a tile holds a few tokens of all heads that share a key, whatever documents they belong to.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from whet.core.errors import WhetError
from whet.model.attention.interface import AttentionSpec, Documents, document_spans


def short_attention_forward(
    query: Tensor, key: Tensor, value: Tensor, ask: AttentionSpec, documents: Documents
) -> Tensor:
    """Compiled layers compile through this one, as one operation that the compiler does not look into."""
    if ask.softcap is not None or ask.sinks is not None:
        raise WhetError("model.attention: short knows neither soft-caps nor sinks, which this model uses; flex does")
    if ask.scale <= 0:  # the highest score is looked for before they are scaled
        raise WhetError(f"model.attention: short scales scores by more than 0, not by {ask.scale}; use varlen")
    windowed = ask.window is not None and ask.window < documents.longest
    window = ask.window if windowed and ask.window is not None else 0
    spans = document_spans(documents.cu_seqlens, query.shape[2]) if documents.spans is None else documents.spans
    return _short_attention(query, key, value, spans, ask.scale, window)[0][None]


@torch.library.custom_op("whet::short_attention", mutates_args=())
def _short_attention(
    query: Tensor, key: Tensor, value: Tensor, spans: Tensor, scale: float, window: int
) -> tuple[Tensor, Tensor]:
    """→ [T H V], and [K T group] fp32: log₂ of the sum of 2^(score · scale · log₂ e). Window 0: none."""
    from whet.model.attention import short_kernels  # Triton is not everywhere

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
    short_kernels.d_query(query, key, value, spans, scale, window, out, lse, d_out, delta, dq)
    short_kernels.d_key_value(query, key, value, spans, scale, window, lse, d_out, delta, dk, dv)
    return dq, dk, dv


def _empty_outputs(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    _, heads, tokens, _ = query.shape
    key_heads = key.shape[1]
    out = query.new_empty(tokens, heads, value.shape[-1])
    return out, query.new_empty(key_heads, tokens, heads // key_heads, dtype=torch.float32)


def _empty_gradient(states: Tensor) -> Tensor:
    """Room for as many numbers, token by token as linear layers make them: of one layout, whatever the states' is."""
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
