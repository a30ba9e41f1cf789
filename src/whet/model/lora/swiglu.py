"""The middle of a gated MLP, with what adapters add to gate and up: the definition, by torch.

    gate = gate0 + xg·Bgᵀ,  up = up0 + xu·Buᵀ,  h = silu(gate) · up

Shape letters: T tokens, F width of the middle, R rank.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from whet.model.lora.low_rank import matmul_precise


class SwigluInputs(NamedTuple):
    """What the middle is made from."""

    gate0: Tensor
    """[T, F] without its adapter's part."""
    up0: Tensor
    thin_gate: Tensor
    """[T, R] what the adapter's B is multiplied with; may be a part of wider rows."""
    thin_up: Tensor
    b_gate: Tensor
    """[F, R]"""
    b_up: Tensor


class SwigluGradients(NamedTuple):
    """What the backward pass finds."""

    d_gate: Tensor
    """[T, F]"""
    d_up: Tensor
    d_thin: Tensor
    """[T, R of both] d gate · b_gate beside d up · b_up."""
    thin_down: Tensor
    """[T, R] h · a_downᵀ"""
    d_a_down: Tensor
    """[R, F] d_thin of down, turned, · h: a sum over tokens, in at least fp32."""


class SwigluForward(Protocol):
    def __call__(self, middle: SwigluInputs, a_down: Tensor) -> tuple[Tensor, Tensor]:
        """h [T, F] in the type that came in, computed in at least fp32, and h · a_downᵀ [T, R]."""


class SwigluBackward(Protocol):
    def __call__(self, d_h0: Tensor, d_thin: Tensor, a_down: Tensor, middle: SwigluInputs) -> SwigluGradients:
        """From d h = d_h0 [T, F] + d_thin [T, R] · a_down [R, F]. May overwrite d_h0."""


def lora_swiglu(middle: SwigluInputs, a_down: Tensor) -> tuple[Tensor, Tensor]:
    """See `Forward`."""
    h = silu_mul(*_gate_up_with_adapters(middle)).to(middle.gate0.dtype)
    return h, h @ a_down.T


def lora_swiglu_backward(d_h0: Tensor, d_thin: Tensor, a_down: Tensor, middle: SwigluInputs) -> SwigluGradients:
    """See `Backward`."""
    dtype = middle.gate0.dtype
    gate, up = _gate_up_with_adapters(middle)
    exact = gate.dtype
    d_h = torch.addmm(d_h0.to(exact), d_thin.to(exact), a_down.to(exact))
    d_gate, d_up, h = (each.to(dtype) for each in silu_mul_backward(d_h, gate, up))
    d_thin_both = torch.cat([d_gate @ middle.b_gate, d_up @ middle.b_up], dim=1)
    return SwigluGradients(d_gate, d_up, d_thin_both, h @ a_down.T, matmul_precise(d_thin.T, h, exact))


def silu_mul(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) · up, in the type that came in, computed in at least fp32."""
    exact = torch.promote_types(gate.dtype, torch.float32)
    return F.silu(gate.to(exact)).mul_(up).to(gate.dtype)


def silu_mul_backward(d_h: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """From the gradient of silu(gate) · up to d gate, d up, and silu(gate) · up."""
    dtype, exact = gate.dtype, torch.promote_types(gate.dtype, torch.float32)
    d_h, gate, up = d_h.to(exact), gate.to(exact), up.to(exact)
    sigmoid = torch.sigmoid(gate)
    silu = gate * sigmoid
    d_gate = d_h * up * (sigmoid + silu * (1 - sigmoid))
    return d_gate.to(dtype), (d_h * silu).to(dtype), (silu * up).to(dtype)


def _gate_up_with_adapters(middle: SwigluInputs) -> tuple[Tensor, Tensor]:
    exact = torch.promote_types(middle.gate0.dtype, torch.float32)
    gate0, up0, thin_gate, thin_up, b_gate, b_up = (tensor.to(exact) for tensor in middle)
    return torch.addmm(gate0, thin_gate, b_gate.T), torch.addmm(up0, thin_up, b_up.T)
