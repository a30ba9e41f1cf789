"""The middle of a gated MLP, h = silu(gate) · up, rounded to 8 bits without being written in 16.

Its numbers are those of 16 bits, rounded again: what the middle is does not depend on who computes it.

Shape letters: T tokens, F width of the middle. All that comes in is [T, F], contiguous.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from whet.model import fp8_round
from whet.model.fp8_round import BACKWARD, FORWARD, rounded
from whet.model.swiglu import gated, gated_backward

Rounded = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


@torch.library.custom_op("whet::gated_largest", mutates_args=(), schema="(Tensor gate, Tensor up) -> Tensor")
def gated_largest(gate: Tensor, up: Tensor) -> Tensor:
    """The largest number of h without its sign, in fp32."""
    kernels = _kernels_for(gate)
    return kernels.gated_largest(gate, up).amax() if kernels else gated(gate, up).abs().amax().float()


@gated_largest.register_fake
def _(gate: Tensor, up: Tensor) -> Tensor:
    return torch.empty((), dtype=torch.float32, device=gate.device)


@torch.library.custom_op(
    "whet::gated_rounded", mutates_args=(), schema="(Tensor gate, Tensor up, Tensor scale) -> Tensor"
)
def gated_rounded(gate: Tensor, up: Tensor, scale: Tensor) -> Tensor:
    """h [T, F] in 8 bits."""
    kernels = _kernels_for(gate)
    if kernels is None:
        return rounded(gated(gate, up), scale, FORWARD)
    h_tf = torch.empty(gate.shape, dtype=FORWARD, device=gate.device)
    kernels.gated_round(gate, up, scale, h_tf)
    return h_tf


@gated_rounded.register_fake
def _(gate: Tensor, up: Tensor, scale: Tensor) -> Tensor:
    return torch.empty(gate.shape, dtype=FORWARD, device=gate.device)


@torch.library.custom_op(
    "whet::gated_backward_largest", mutates_args=(), schema="(Tensor d_h, Tensor gate, Tensor up) -> Tensor"
)
def gated_backward_largest(d_h: Tensor, gate: Tensor, up: Tensor) -> Tensor:
    """[2]: the largest number of d gate and that of d up, without signs, in fp32."""
    kernels = _kernels_for(gate)
    if kernels is not None:
        return kernels.gated_backward_largest(d_h, gate, up).amax(1)
    return torch.stack([each.abs().amax() for each in gated_backward(d_h, gate, up)[:2]]).float()


@gated_backward_largest.register_fake
def _(d_h: Tensor, gate: Tensor, up: Tensor) -> Tensor:
    return torch.empty(2, dtype=torch.float32, device=gate.device)


@torch.library.custom_op(
    "whet::gated_backward_rounded",
    mutates_args=(),
    schema="(Tensor d_h, Tensor gate, Tensor up, Tensor h_scale, Tensor gate_scale, Tensor up_scale) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor)",
)
def gated_backward_rounded(
    d_h: Tensor, gate: Tensor, up: Tensor, h_scale: Tensor, gate_scale: Tensor, up_scale: Tensor
) -> Rounded:
    """In 8 bits: d gate [T, F] and [F, T], d up likewise, and h [F, T]."""
    kernels = _kernels_for(gate)
    if kernels is not None:
        found = _empty(gate)
        kernels.gated_backward_round(d_h, gate, up, h_scale, gate_scale, up_scale, *found)
        return found
    d_gate, d_up, h = gated_backward(d_h, gate, up)
    d_gate, d_up, h = (
        rounded(d_gate, gate_scale, BACKWARD), rounded(d_up, up_scale, BACKWARD), rounded(h, h_scale, FORWARD)
    )  # fmt: skip
    return d_gate, d_gate.t().contiguous(), d_up, d_up.t().contiguous(), h.t().contiguous()


@gated_backward_rounded.register_fake
def _(d_h: Tensor, gate: Tensor, up: Tensor, h_scale: Tensor, gate_scale: Tensor, up_scale: Tensor) -> Rounded:
    return _empty(gate)


def _kernels_for(gate: Tensor) -> Any:
    """Of 16-bit numbers only: from fp32, triton 3.6 writes what is both straight and turned wrong."""
    return fp8_round.kernels_for(gate) if gate.dtype.itemsize == 2 else None


def _empty(gate: Tensor) -> Rounded:
    tokens, width = gate.shape

    def new(rows: int, columns: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(rows, columns, dtype=dtype, device=gate.device)

    return (
        new(tokens, width, BACKWARD), new(width, tokens, BACKWARD), new(tokens, width, BACKWARD),
        new(width, tokens, BACKWARD), new(width, tokens, FORWARD),
    )  # fmt: skip
