"""A gated MLP and its three adapters as one operator: y = down(silu(gate(x)) · up(x)).

Kept for the backward pass are x, gate and up without their adapters' parts, and thin matrices; neither gate and up as
they are multiplied, nor their product, which one kernel makes again on its way (see swiglu.py). To the compiler it is
opaque. It computes in the type of x; gradients of adapters come in the adapters' type.

Shape letters: T tokens, E width, F width of the middle, R rank.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from whet.model import swiglu as by_torch
from whet.model.frozen_weight import matrix_from
from whet.model.lora_products import Adapted, precise, rows, scaled
from whet.model.swiglu import Backward, Middle


def lora_mlp(x: Tensor, gate: Adapted, up: Adapted, down: Adapted) -> Tensor:
    """The MLP's output for x [..., E], which is in the type to compute in."""
    outputs: tuple[Tensor, ...] = _forward(
        x, gate.frozen, up.frozen, down.frozen, gate.bias, up.bias, down.bias,
        [gate.a, gate.b, up.a, up.b, down.a, down.b], [gate.scale, up.scale, down.scale],
    )  # fmt: skip
    return outputs[0]


@torch.library.custom_op(
    "whet::lora_mlp",
    mutates_args=(),
    schema="(Tensor x, Tensor[] gate, Tensor[] up, Tensor[] down, Tensor? gate_bias, Tensor? up_bias, "
    "Tensor? down_bias, Tensor[] adapters, float[] scales) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
)
def _forward(
    x: Tensor, gate: Sequence[Tensor], up: Sequence[Tensor], down: Sequence[Tensor],
    gate_bias: Tensor | None, up_bias: Tensor | None, down_bias: Tensor | None,
    adapters: Sequence[Tensor], scales: Sequence[float],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """y, gate without its adapter's part, up likewise, x·[scaled A of gate; of up]ᵀ, h·(scaled A of down)ᵀ."""
    dtype, b_down = x.dtype, adapters[5]
    with torch.autocast(x.device.type, enabled=False):
        x_te, a_both, a_down = rows(x), *_scaled_inputs(adapters, scales, dtype)
        thin = x_te @ a_both.T
        gate0 = _product(x_te, gate, adapters[0:2], gate_bias)
        up0 = _product(x_te, up, adapters[2:4], up_bias)
        h_tf = _swiglu(x)[0](_middle(gate0, up0, thin, adapters))
        y_te = _product(h_tf, down, adapters[4:6], down_bias)
        thin_down = h_tf @ a_down.T
        del h_tf
        y_te.addmm_(thin_down, b_down.to(dtype).T)
        return y_te.view(*x.shape[:-1], len(b_down)), gate0, up0, thin, thin_down


@_forward.register_fake
def _(
    x: Tensor, gate: Sequence[Tensor], up: Sequence[Tensor], down: Sequence[Tensor],
    gate_bias: Tensor | None, up_bias: Tensor | None, down_bias: Tensor | None,
    adapters: Sequence[Tensor], scales: Sequence[float],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    a_gate, b_gate, a_up, b_up, a_down, b_down = adapters
    tokens = x.shape[:-1].numel()
    shapes = (tokens, len(b_gate)), (tokens, len(b_up)), (tokens, len(a_gate) + len(a_up)), (tokens, len(a_down))
    gate0, up0, thin, thin_down = (x.new_empty(shape) for shape in shapes)
    return x.new_empty(*x.shape[:-1], len(b_down)), gate0, up0, thin, thin_down


@torch.library.custom_op(
    "whet::lora_mlp_backward",
    mutates_args=(),
    schema="(Tensor d_y, Tensor x, Tensor gate0, Tensor up0, Tensor thin, Tensor thin_down, Tensor[] gate, "
    "Tensor[] up, Tensor[] down, Tensor[] adapters, float[] scales, bool needs_x) -> Tensor[]",
)
def _backward(
    d_y: Tensor, x: Tensor, gate0: Tensor, up0: Tensor, thin: Tensor, thin_down: Tensor,
    gate: Sequence[Tensor], up: Sequence[Tensor], down: Sequence[Tensor],
    adapters: Sequence[Tensor], scales: Sequence[float], needs_x: bool,
) -> list[Tensor]:  # fmt: skip
    """Gradients of x (empty if it needs none) and of the adapters."""
    dtype, (a_gate, b_gate, a_up, b_up, a_down, b_down) = x.dtype, adapters
    with torch.autocast(x.device.type, enabled=False):
        x_te, d_te, (a_both, a_down_scaled) = rows(x), rows(d_y), _scaled_inputs(adapters, scales, dtype)
        middle = _middle(gate0, up0, thin, adapters)
        d_thin_down = d_te @ b_down.to(dtype)
        d_b_down = precise(d_te.T, thin_down, b_down.dtype)
        d_h0 = d_te @ matrix_from(down, len(b_down), a_down.shape[1], dtype)
        d_gate, d_up, h_tf = _swiglu(x)[1](d_h0, d_thin_down, a_down_scaled, middle)
        del d_h0
        d_a_down = precise(d_thin_down.T, h_tf, a_down.dtype).mul_(scales[2])
        del h_tf
        d_b_gate = precise(d_gate.T, middle.thin_gate, b_gate.dtype)
        d_b_up = precise(d_up.T, middle.thin_up, b_up.dtype)
        d_thin = torch.cat([d_gate @ middle.b_gate, d_up @ middle.b_up], dim=1)
        d_x = x.new_empty(0)
        if needs_x:
            d_x = d_gate @ matrix_from(gate, len(b_gate), a_gate.shape[1], dtype)
            del d_gate
            d_x.addmm_(d_up, matrix_from(up, len(b_up), a_up.shape[1], dtype))
            del d_up
            d_x = d_x.addmm_(d_thin, a_both).view(x.shape)
        d_a_gate, d_a_up = precise(d_thin.T, x_te, a_gate.dtype).split([len(a_gate), len(a_up)])
        return [d_x, d_a_gate * scales[0], d_b_gate, d_a_up * scales[1], d_b_up, d_a_down, d_b_down]


@_backward.register_fake
def _(
    d_y: Tensor, x: Tensor, gate0: Tensor, up0: Tensor, thin: Tensor, thin_down: Tensor,
    gate: Sequence[Tensor], up: Sequence[Tensor], down: Sequence[Tensor],
    adapters: Sequence[Tensor], scales: Sequence[float], needs_x: bool,
) -> list[Tensor]:  # fmt: skip
    return [x.new_empty(x.shape if needs_x else 0), *(torch.empty_like(adapter) for adapter in adapters)]


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, *frozen, _, _, _, adapters, ctx.scales = inputs
    ctx.set_materialize_grads(False)  # nothing depends on the other outputs but y
    ctx.sizes = [len(parts) for parts in frozen]
    ctx.save_for_backward(x, *output[1:], *adapters, *(part for parts in frozen for part in parts))


def _gradients(ctx: Any, d_y: Tensor, *_: None) -> tuple[Any, ...]:
    x, gate0, up0, thin, thin_down, *others = ctx.saved_tensors
    adapters, parts = others[:6], iter(others[6:])
    frozen = [[next(parts) for _ in range(size)] for size in ctx.sizes]
    needs_x = ctx.needs_input_grad[0]
    d_x, *found = _backward(d_y, x, gate0, up0, thin, thin_down, *frozen, adapters, ctx.scales, needs_x)
    return d_x if needs_x else None, *([None] * size for size in ctx.sizes), None, None, None, found, None


_forward.register_autograd(_gradients, setup_context=_keep)


def _product(x: Tensor, frozen: Sequence[Tensor], adapter: Sequence[Tensor], bias: Tensor | None) -> Tensor:
    """x·Wᵀ + bias; W is as high and wide as the adapter says."""
    a, b = adapter
    matrix = matrix_from(frozen, len(b), a.shape[1], x.dtype)
    return x @ matrix.T if bias is None else torch.addmm(bias.to(x.dtype), x, matrix.T)


def _scaled_inputs(adapters: Sequence[Tensor], scales: Sequence[float], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """A of gate and of up, one above the other, and A of down, with their scales in them."""
    both = torch.cat([scaled(adapters[0], scales[0], dtype), scaled(adapters[2], scales[1], dtype)])
    return both, scaled(adapters[4], scales[2], dtype)


def _middle(gate0: Tensor, up0: Tensor, thin: Tensor, adapters: Sequence[Tensor]) -> Middle:
    a_gate, b_gate, a_up, b_up, *_ = adapters
    thin_gate, thin_up = thin.split([len(a_gate), len(a_up)], dim=1)
    return Middle(gate0, up0, thin_gate, thin_up, b_gate.to(thin.dtype), b_up.to(thin.dtype))


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
