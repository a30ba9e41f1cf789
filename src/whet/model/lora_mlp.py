"""A gated MLP and its three adapters as one function: y = down(silu(gate(x)) · up(x)).

Kept for the backward pass are x, gate and up without their adapters' parts, and thin matrices; neither gate and up as
they are multiplied, nor their product, which one kernel makes again on its way (see swiglu.py). To the compiler its
operators are opaque. It computes in the type of x; gradients of adapters come in the adapters' type.

Shape letters: T tokens, E width, F width of the middle, R rank.
"""

from __future__ import annotations

import functools
import importlib.util
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from whet.model import swiglu as by_torch
from whet.model.frozen_weight import matrix_from
from whet.model.lora_products import Adapted, add_precise_, rows, scaled
from whet.model.swiglu import Backward, Middle

_AT_A_TIME = 4096
"""Tokens of the backward pass: what is as wide as the middle exists for so many of them at once."""


def lora_mlp(x: Tensor, gate: Adapted, up: Adapted, down: Adapted) -> Tensor:
    """The MLP's output for x [..., E], which is in the type to compute in."""
    layers = (gate, up, down)
    result: Tensor = _LoraMLP.apply(
        x, [len(layer.frozen) for layer in layers], [layer.scale for layer in layers], gate.bias, up.bias, down.bias,
        *(part for layer in layers for part in (layer.a, layer.b)),
        *(part for layer in layers for part in layer.frozen),
    )  # fmt: skip
    return result


class _LoraMLP(torch.autograd.Function):
    """Two operators forward, of which the backward pass needs the first one's results alone: computed again, the
    product with down, a quarter of a layer, is left out."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, sizes: list[int], scales: list[float], gate_bias: Tensor | None, up_bias: Tensor | None,
        down_bias: Tensor | None, *tensors: Tensor,
    ) -> Tensor:  # fmt: skip
        adapters, (gate, up, down) = tensors[:6], _split(tensors[6:], sizes)
        gate0, up0, thin = _inward(x, gate, up, gate_bias, up_bias, adapters[:4], scales[:2])
        y: Tensor = _outward(gate0, up0, thin, down, down_bias, adapters, scales[2])
        ctx.save_for_backward(x, gate0, up0, thin, *tensors)
        ctx.sizes, ctx.scales = sizes, scales
        return y.view(*x.shape[:-1], y.shape[-1])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, gate0, up0, thin, *tensors = ctx.saved_tensors
        needs_x = ctx.needs_input_grad[0]
        frozen = _split(tensors[6:], ctx.sizes)
        d_x, *found = _backward(grads[0], x, gate0, up0, thin, *frozen, tensors[:6], ctx.scales, needs_x)
        return d_x if needs_x else None, *[None] * 5, *found, *[None] * sum(ctx.sizes)


def _split(parts: Sequence[Tensor], sizes: Sequence[int]) -> list[list[Tensor]]:
    ends = list(itertools.accumulate(sizes))
    return [list(parts[end - size : end]) for end, size in zip(ends, sizes, strict=True)]


@torch.library.custom_op(
    "whet::lora_mlp_inward",
    mutates_args=(),
    schema="(Tensor x, Tensor[] gate, Tensor[] up, Tensor? gate_bias, Tensor? up_bias, Tensor[] adapters, "
    "float[] scales) -> (Tensor, Tensor, Tensor)",
)
def _inward(
    x: Tensor, gate: Sequence[Tensor], up: Sequence[Tensor], gate_bias: Tensor | None, up_bias: Tensor | None,
    adapters: Sequence[Tensor], scales: Sequence[float],
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Gate without its adapter's part, up likewise, x·[scaled A of gate; of up]ᵀ."""
    with torch.autocast(x.device.type, enabled=False):
        x_te = rows(x)
        gate0 = _product(x_te, gate, adapters[0:2], gate_bias)
        up0 = _product(x_te, up, adapters[2:4], up_bias)
        return gate0, up0, x_te @ scaled(adapters[::2], scales, x.dtype).T


@_inward.register_fake
def _(
    x: Tensor, gate: Sequence[Tensor], up: Sequence[Tensor], gate_bias: Tensor | None, up_bias: Tensor | None,
    adapters: Sequence[Tensor], scales: Sequence[float],
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    a_gate, b_gate, a_up, b_up = adapters
    tokens = x.shape[:-1].numel()
    sizes = (len(b_gate), len(b_up), len(a_gate) + len(a_up))
    gate0, up0, thin = (x.new_empty(tokens, size) for size in sizes)
    return gate0, up0, thin


@torch.library.custom_op(
    "whet::lora_mlp_outward",
    mutates_args=(),
    schema="(Tensor gate0, Tensor up0, Tensor thin, Tensor[] down, Tensor? down_bias, Tensor[] adapters, "
    "float scale) -> Tensor",
)
def _outward(
    gate0: Tensor, up0: Tensor, thin: Tensor, down: Sequence[Tensor], down_bias: Tensor | None,
    adapters: Sequence[Tensor], scale: float,
) -> Tensor:  # fmt: skip
    """y [T, E]"""
    dtype, a_down, b_down = gate0.dtype, adapters[4], adapters[5]
    with torch.autocast(gate0.device.type, enabled=False):
        h_tf = _swiglu(gate0)[0](_middle(gate0, up0, thin, adapters[1].to(dtype), adapters[3].to(dtype)))
        thin_down, b_here = h_tf @ scaled([a_down], [scale], dtype).T, b_down.to(dtype).T
        y_te = thin_down @ b_here if down_bias is None else torch.addmm(down_bias.to(dtype), thin_down, b_here)
        return y_te.addmm_(h_tf, matrix_from(down, len(b_down), a_down.shape[1], dtype).T)


@_outward.register_fake
def _(
    gate0: Tensor, up0: Tensor, thin: Tensor, down: Sequence[Tensor], down_bias: Tensor | None,
    adapters: Sequence[Tensor], scale: float,
) -> Tensor:  # fmt: skip
    return gate0.new_empty(len(gate0), len(adapters[5]))


@torch.library.custom_op(
    "whet::lora_mlp_backward",
    mutates_args=(),
    schema="(Tensor d_y, Tensor x, Tensor gate0, Tensor up0, Tensor thin, Tensor[] gate, Tensor[] up, Tensor[] down, "
    "Tensor[] adapters, float[] scales, bool needs_x) -> Tensor[]",
)
def _backward(
    d_y: Tensor, x: Tensor, gate0: Tensor, up0: Tensor, thin: Tensor,
    gate: Sequence[Tensor], up: Sequence[Tensor], down: Sequence[Tensor],
    adapters: Sequence[Tensor], scales: Sequence[float], needs_x: bool,
) -> list[Tensor]:  # fmt: skip
    """Gradients of x (empty if it needs none) and of the adapters."""
    dtype, (a_gate, b_gate, a_up, b_up, a_down, b_down) = x.dtype, adapters
    with torch.autocast(x.device.type, enabled=False):
        a_both = scaled([a_gate, a_up], scales[:2], dtype)
        a_down_scaled = scaled([a_down], scales[2:], dtype)
        down_matrix = matrix_from(down, len(b_down), a_down.shape[1], dtype)
        d_x = torch.empty_like(rows(x)) if needs_x else x.new_empty(0)
        if needs_x:
            gate_matrix = matrix_from(gate, len(b_gate), a_gate.shape[1], dtype)
            up_matrix = matrix_from(up, len(b_up), a_up.shape[1], dtype)
        b_gate_here, b_up_here, b_down_here = (b.to(dtype) for b in (b_gate, b_up, b_down))
        both = a_gate.new_zeros(len(a_gate) + len(a_up), a_gate.shape[1])
        found = [both, *(torch.zeros_like(part) for part in (b_gate, b_up, a_down, b_down))]
        for start in range(0, len(gate0), _AT_A_TIME):
            part = slice(start, start + _AT_A_TIME)
            x_te, d_te = rows(x)[part], rows(d_y)[part]
            middle = _middle(gate0[part], up0[part], thin[part], b_gate_here, b_up_here)
            d_thin_down = d_te @ b_down_here
            d_gate, d_up, h_tf = _swiglu(x)[1](d_te @ down_matrix, d_thin_down, a_down_scaled, middle)
            add_precise_(found[4], d_te.T, h_tf @ a_down_scaled.T)
            add_precise_(found[3], d_thin_down.T, h_tf)
            del h_tf
            add_precise_(found[1], d_gate.T, middle.thin_gate)
            add_precise_(found[2], d_up.T, middle.thin_up)
            d_thin = torch.cat([d_gate @ middle.b_gate, d_up @ middle.b_up], dim=1)
            add_precise_(found[0], d_thin.T, x_te)
            if needs_x:
                torch.mm(d_thin, a_both, out=d_x[part])
                d_x[part].addmm_(d_gate, gate_matrix).addmm_(d_up, up_matrix)
        d_both, d_b_gate, d_b_up, d_a_down, d_b_down = found
        d_a_gate, d_a_up = d_both.split([len(a_gate), len(a_up)])
        return [
            d_x.view(x.shape) if needs_x else d_x,
            d_a_gate * scales[0], d_b_gate, d_a_up * scales[1], d_b_up, d_a_down * scales[2], d_b_down,
        ]  # fmt: skip


@_backward.register_fake
def _(
    d_y: Tensor, x: Tensor, gate0: Tensor, up0: Tensor, thin: Tensor,
    gate: Sequence[Tensor], up: Sequence[Tensor], down: Sequence[Tensor],
    adapters: Sequence[Tensor], scales: Sequence[float], needs_x: bool,
) -> list[Tensor]:  # fmt: skip
    return [x.new_empty(x.shape if needs_x else 0), *(torch.empty_like(adapter) for adapter in adapters)]


def _product(x: Tensor, frozen: Sequence[Tensor], adapter: Sequence[Tensor], bias: Tensor | None) -> Tensor:
    """x·Wᵀ + bias; W is as high and wide as the adapter says."""
    a, b = adapter
    matrix = matrix_from(frozen, len(b), a.shape[1], x.dtype)
    return x @ matrix.T if bias is None else torch.addmm(bias.to(x.dtype), x, matrix.T)


def _middle(gate0: Tensor, up0: Tensor, thin: Tensor, b_gate: Tensor, b_up: Tensor) -> Middle:
    thin_gate, thin_up = thin.split([b_gate.shape[1], b_up.shape[1]], dim=1)
    return Middle(gate0, up0, thin_gate, thin_up, b_gate, b_up)


def _swiglu(x: Tensor) -> tuple[Callable[[Middle], Tensor], Backward]:
    """The kernel takes 16-bit numbers on CUDA; all else is torch's."""
    fused = _fused() if x.is_cuda and x.dtype.itemsize == 2 else None
    return fused or (by_torch.swiglu, by_torch.swiglu_backward)


@functools.cache
def _fused() -> tuple[Callable[[Middle], Tensor], Backward] | None:
    if importlib.util.find_spec("triton") is None:
        return None
    from whet.model.fused_swiglu import swiglu_triton, swiglu_triton_backward

    return swiglu_triton, swiglu_triton_backward
