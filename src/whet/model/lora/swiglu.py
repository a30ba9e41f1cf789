"""SwiGLU of a gated MLP with LoRA on gate and up: the definition in plain torch.

    gate = gate0 + xa_gate·b_gateᵀ,  up = up0 + xa_up·b_upᵀ,  h = silu(gate) · up

`xa_*` is a layer's input times its A, transposed: x·Aᵀ. Shape letters: T tokens, F intermediate size, R rank.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from whet.model.lora.low_rank import matmul_precise


class SwigluInputs(NamedTuple):
    """Inputs of the activation."""

    gate0: Tensor
    """[T, F] without the adapter."""
    up0: Tensor
    xa_gate: Tensor
    """[T, R], may be a slice of wider rows."""
    xa_up: Tensor
    b_gate: Tensor
    """[F, R]"""
    b_up: Tensor


class SwigluGradients(NamedTuple):
    """Results of the backward pass."""

    d_gate: Tensor
    """[T, F]"""
    d_up: Tensor
    d_xa: Tensor
    """[T, R of gate + R of up] d_gate · b_gate and d_up · b_up, concatenated."""
    xa_down: Tensor
    """[T, R] h · a_downᵀ"""
    d_a_down: Tensor
    """[R, F] d_xa_downᵀ · h, a sum over tokens, in at least fp32."""


class SwigluForward(Protocol):
    def __call__(self, inputs: SwigluInputs, a_down: Tensor) -> tuple[Tensor, Tensor]:
        """h [T, F] in the dtype of the inputs, computed in at least fp32, and h · a_downᵀ [T, R]."""


class SwigluBackward(Protocol):
    def __call__(self, d_h0: Tensor, d_xa: Tensor, a_down: Tensor, inputs: SwigluInputs) -> SwigluGradients:
        """From d h = d_h0 [T, F] + d_xa [T, R] · a_down [R, F]. May overwrite d_h0."""


def lora_swiglu(inputs: SwigluInputs, a_down: Tensor) -> tuple[Tensor, Tensor]:
    """See `SwigluForward`."""
    h = silu_mul(*_gate_up_with_adapters(inputs)).to(inputs.gate0.dtype)
    return h, h @ a_down.T


def lora_swiglu_backward(d_h0: Tensor, d_xa: Tensor, a_down: Tensor, inputs: SwigluInputs) -> SwigluGradients:
    """See `SwigluBackward`."""
    dtype = inputs.gate0.dtype
    gate, up = _gate_up_with_adapters(inputs)
    exact = gate.dtype
    d_h = torch.addmm(d_h0.to(exact), d_xa.to(exact), a_down.to(exact))
    d_gate, d_up, h = (each.to(dtype) for each in silu_mul_backward(d_h, gate, up))
    d_xa_both = torch.cat([d_gate @ inputs.b_gate, d_up @ inputs.b_up], dim=1)
    return SwigluGradients(d_gate, d_up, d_xa_both, h @ a_down.T, matmul_precise(d_xa.T, h, exact))


def silu_mul(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) · up in the dtype of gate, computed in at least fp32."""
    exact = torch.promote_types(gate.dtype, torch.float32)
    return F.silu(gate.to(exact)).mul_(up).to(gate.dtype)


def silu_mul_backward(d_h: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """d_gate and d_up from d_h, and h = silu(gate) · up."""
    dtype, exact = gate.dtype, torch.promote_types(gate.dtype, torch.float32)
    d_h, gate, up = d_h.to(exact), gate.to(exact), up.to(exact)
    sigmoid = torch.sigmoid(gate)
    silu = gate * sigmoid
    d_gate = d_h * up * (sigmoid + silu * (1 - sigmoid))
    return d_gate.to(dtype), (d_h * silu).to(dtype), (silu * up).to(dtype)


def _gate_up_with_adapters(inputs: SwigluInputs) -> tuple[Tensor, Tensor]:
    exact = torch.promote_types(inputs.gate0.dtype, torch.float32)
    gate0, up0, xa_gate, xa_up, b_gate, b_up = (tensor.to(exact) for tensor in inputs)
    return torch.addmm(gate0, xa_gate, b_gate.T), torch.addmm(up0, xa_up, b_up.T)
