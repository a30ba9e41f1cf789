"""A gated MLP with LoRA on all three layers as one autograd function: y = down(silu(gate(x)) · up(x)).

Saved for the backward pass are x, gate and up without their adapters, and x·Aᵀ. The backward kernel recomputes gate and
up with adapters and their product (see `whet.model.lora.swiglu`). The operators are opaque to torch.compile. They
compute in the dtype of x; adapter gradients have the adapters' dtype.

Shape letters: T tokens, E hidden size, F intermediate size, R rank.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from whet.core.resources import has_triton
from whet.model.frozen_weight import (
    MATMUL_CHUNK,
    FrozenMatrix,
    GradientOperand,
    MatmulOperand,
    split_parts,
    sum_of_matmuls,
)
from whet.model.lora import swiglu as by_torch
from whet.model.lora.low_rank import LoraWeights, MatmulAccumulator, cast_stacked, flatten_tokens
from whet.model.lora.swiglu import SwigluBackward, SwigluForward, SwigluInputs

_BACKWARD_CHUNK, _BACKWARD_CHUNK_LOW_MEMORY = 16384, 4096
"""Tokens for which the backward pass holds intermediate activations, two or three [tokens, F] matrices, at a time."""


def lora_mlp(x: Tensor, gate: LoraWeights, up: LoraWeights, down: LoraWeights, low_memory: bool = False) -> Tensor:
    """The MLP's output for x [..., E], computed in the dtype of x; `low_memory` is a little slower."""
    layers = (gate, up, down)
    result: Tensor = _LoraMLPFunction.apply(
        x, _BACKWARD_CHUNK_LOW_MEMORY if low_memory else _BACKWARD_CHUNK, [len(layer.frozen) for layer in layers],
        [layer.scale for layer in layers], gate.bias, up.bias, down.bias,
        *(part for layer in layers for part in (layer.a, layer.b)),
        *(part for layer in layers for part in layer.frozen),
    )  # fmt: skip
    return result.view(*x.shape[:-1], result.shape[-1])  # out here, so that a model may change it in place


class _LoraMLPFunction(torch.autograd.Function):
    """Forward is two operators, of which the backward pass needs the first one's results only: recomputation skips the
    product with down, a quarter of a layer."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, chunk_tokens: int, sizes: list[int], scales: list[float], gate_bias: Tensor | None,
        up_bias: Tensor | None, down_bias: Tensor | None, *tensors: Tensor,
    ) -> Tensor:  # fmt: skip
        adapters, (gate, up, down) = tensors[:6], split_parts(tensors[6:], sizes)
        gate0, up0, xa = _gate_up_forward(x, gate, up, gate_bias, up_bias, adapters[:4], scales[:2])
        y: Tensor = _down_forward(gate0, up0, xa, down, down_bias, adapters, scales[2])
        ctx.save_for_backward(x, gate0, up0, xa, *tensors)
        ctx.chunk_tokens, ctx.sizes, ctx.scales = chunk_tokens, sizes, scales
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, gate0, up0, xa, *tensors = ctx.saved_tensors
        needs_x = ctx.needs_input_grad[0]
        frozen = split_parts(tensors[6:], ctx.sizes)
        d_x, *found = _backward(
            grads[0], x, gate0, up0, xa, *frozen, tensors[:6], ctx.scales, ctx.chunk_tokens, needs_x
        )
        return d_x if needs_x else None, *[None] * 6, *found, *[None] * sum(ctx.sizes)


@torch.library.custom_op(
    "whet::lora_mlp_gate_up",
    mutates_args=(),
    schema="(Tensor x, Tensor[] gate, Tensor[] up, Tensor? gate_bias, Tensor? up_bias, Tensor[] adapters, "
    "float[] scales) -> (Tensor, Tensor, Tensor)",
)
def _gate_up_forward(
    x: Tensor, gate: Sequence[Tensor], up: Sequence[Tensor], gate_bias: Tensor | None, up_bias: Tensor | None,
    adapters: Sequence[Tensor], scales: Sequence[float],
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """gate and up without adapters, and x·[scaled A of gate; of up]ᵀ."""
    with torch.autocast(x.device.type, enabled=False):
        x_te = flatten_tokens(x)
        operand, (a_gate, b_gate, a_up, b_up) = MatmulOperand(x_te), adapters
        gate0 = sum_of_matmuls([(operand, FrozenMatrix(gate, a_gate, b_gate, x.dtype))], bias=gate_bias)
        up0 = sum_of_matmuls([(operand, FrozenMatrix(up, a_up, b_up, x.dtype))], bias=up_bias)
        (a_both,) = cast_stacked([list(zip(adapters[::2], scales, strict=True))], x.dtype)
        return gate0, up0, x_te @ a_both.T


@_gate_up_forward.register_fake
def _(
    x: Tensor, gate: Sequence[Tensor], up: Sequence[Tensor], gate_bias: Tensor | None, up_bias: Tensor | None,
    adapters: Sequence[Tensor], scales: Sequence[float],
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    a_gate, b_gate, a_up, b_up = adapters
    tokens = x.shape[:-1].numel()
    sizes = (len(b_gate), len(b_up), len(a_gate) + len(a_up))
    gate0, up0, xa = (x.new_empty(tokens, size) for size in sizes)
    return gate0, up0, xa


@torch.library.custom_op(
    "whet::lora_mlp_down",
    mutates_args=(),
    schema="(Tensor gate0, Tensor up0, Tensor xa, Tensor[] down, Tensor? down_bias, Tensor[] adapters, "
    "float scale) -> Tensor",
)
def _down_forward(
    gate0: Tensor, up0: Tensor, xa: Tensor, down: Sequence[Tensor], down_bias: Tensor | None,
    adapters: Sequence[Tensor], scale: float,
) -> Tensor:  # fmt: skip
    """y [T, E]"""
    dtype, (_, b_gate, _, b_up, a_down, b_down) = gate0.dtype, adapters
    with torch.autocast(gate0.device.type, enabled=False):
        matrix = FrozenMatrix(down, a_down, b_down, dtype)
        stacks = [[(b_gate, 1.0)], [(b_up, 1.0)], [(a_down, scale)], [(b_down, 1.0)]]
        b_gate, b_up, a_down, b_down = cast_stacked(stacks, dtype)
        h_tf, xa_down = _swiglu_functions(gate0)[0](_swiglu_inputs(gate0, up0, xa, b_gate, b_up), a_down)
        return sum_of_matmuls([(MatmulOperand(h_tf), matrix)], (xa_down, b_down.T), down_bias, chunk=MATMUL_CHUNK)


@_down_forward.register_fake
def _(
    gate0: Tensor, up0: Tensor, xa: Tensor, down: Sequence[Tensor], down_bias: Tensor | None,
    adapters: Sequence[Tensor], scale: float,
) -> Tensor:  # fmt: skip
    return gate0.new_empty(len(gate0), len(adapters[5]))


@torch.library.custom_op(
    "whet::lora_mlp_backward",
    mutates_args=(),
    schema="(Tensor d_y, Tensor x, Tensor gate0, Tensor up0, Tensor xa, Tensor[] gate, Tensor[] up, Tensor[] down, "
    "Tensor[] adapters, float[] scales, int chunk_tokens, bool needs_x) -> Tensor[]",
)
def _backward(
    d_y: Tensor, x: Tensor, gate0: Tensor, up0: Tensor, xa: Tensor,
    gate: Sequence[Tensor], up: Sequence[Tensor], down: Sequence[Tensor],
    adapters: Sequence[Tensor], scales: Sequence[float], chunk_tokens: int, needs_x: bool,
) -> list[Tensor]:  # fmt: skip
    """Gradients of x (empty unless needs_x) and of the adapters."""
    dtype, (a_gate, b_gate, a_up, b_up, a_down, b_down) = x.dtype, adapters
    with torch.autocast(x.device.type, enabled=False):
        a_both, a_down_cast, *bs = cast_stacked(
            [
                [(a_gate, scales[0]), (a_up, scales[1])], [(a_down, scales[2])],
                [(b_gate, 1.0)], [(b_up, 1.0)], [(b_down, 1.0)],
            ],
            dtype,
        )  # fmt: skip
        gate_fe, up_fe = FrozenMatrix(gate, a_gate, b_gate, dtype), FrozenMatrix(up, a_up, b_up, dtype)
        down_ef = FrozenMatrix(down, a_down, b_down, dtype)
        d_x = torch.empty_like(flatten_tokens(x)) if needs_x else x.new_empty(0)
        d_a_both, d_b_gate, d_b_up, d_b_down = (MatmulAccumulator(adapters[0].dtype) for _ in range(4))
        d_a_down = torch.zeros_like(a_down_cast, dtype=torch.promote_types(dtype, torch.float32))
        for start in range(0, max(1, len(gate0)), chunk_tokens):
            part = slice(start, start + chunk_tokens)
            x_te, d_te = flatten_tokens(x)[part], d_y[part]
            inputs = _swiglu_inputs(gate0[part], up0[part], xa[part], bs[0], bs[1])
            d_xa_down = d_te @ bs[2]
            d_h0 = sum_of_matmuls([(GradientOperand(d_te), down_ef)])
            found = _swiglu_functions(x)[1](d_h0, d_xa_down, a_down_cast, inputs)
            d_a_down += found.d_a_down
            d_b_down.add(d_te.T, found.xa_down)
            d_b_gate.add(found.d_gate.T, inputs.xa_gate)
            d_b_up.add(found.d_up.T, inputs.xa_up)
            d_a_both.add(found.d_xa.T, x_te)
            if needs_x:
                sum_of_matmuls(
                    zip(map(GradientOperand, (found.d_gate, found.d_up)), (gate_fe, up_fe), strict=True),
                    (found.d_xa, a_both), chunk=MATMUL_CHUNK, out=d_x[part],
                )  # fmt: skip
            del found, d_h0  # before the next chunk allocates its own
        totals = *d_a_both.total.split([len(a_gate), len(a_up)]), d_a_down.to(a_down.dtype)
        d_as = [d_a * scale for d_a, scale in zip(totals, scales, strict=True)]
        d_bs = d_b_gate.total, d_b_up.total, d_b_down.total
        d_adapters = [part for pair in zip(d_as, d_bs, strict=True) for part in pair]
        return [d_x.view(x.shape) if needs_x else d_x, *d_adapters]


@_backward.register_fake
def _(
    d_y: Tensor, x: Tensor, gate0: Tensor, up0: Tensor, xa: Tensor,
    gate: Sequence[Tensor], up: Sequence[Tensor], down: Sequence[Tensor],
    adapters: Sequence[Tensor], scales: Sequence[float], chunk_tokens: int, needs_x: bool,
) -> list[Tensor]:  # fmt: skip
    return [x.new_empty(x.shape if needs_x else 0), *(torch.empty_like(adapter) for adapter in adapters)]


def _swiglu_inputs(gate0: Tensor, up0: Tensor, xa: Tensor, b_gate: Tensor, b_up: Tensor) -> SwigluInputs:
    xa_gate, xa_up = xa.split([b_gate.shape[1], b_up.shape[1]], dim=1)
    return SwigluInputs(gate0, up0, xa_gate, xa_up, b_gate, b_up)


def _swiglu_functions(x: Tensor) -> tuple[SwigluForward, SwigluBackward]:
    """Triton for 16-bit inputs on CUDA, torch otherwise."""
    fused = _triton_swiglu() if x.is_cuda and x.dtype.itemsize == 2 else None
    return fused or (by_torch.lora_swiglu, by_torch.lora_swiglu_backward)


@functools.cache
def _triton_swiglu() -> tuple[SwigluForward, SwigluBackward] | None:
    if not has_triton():
        return None
    from whet.model.lora.lora_kernels import lora_swiglu_triton, lora_swiglu_triton_backward

    return lora_swiglu_triton, lora_swiglu_triton_backward
