"""A gated MLP whose three products are 8-bit in training, its middle rounded on the way: y = down(silu(gate) · up).

Nothing as wide as the middle is written in 16 bits but what the products give: gate and up, which are kept, and the
gradient of their product. Each is looked through for its largest number, then rounded into what the next products take.
The rules are those of `fp8_linear`.

Shape letters: T tokens, E width, F width of the middle.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from whet.model.fp8_gated import gated_backward_largest, gated_backward_rounded, gated_largest, gated_rounded
from whet.model.fp8_linear import EightBitLinear, in_blocks, multiply
from whet.model.fp8_round import BACKWARD, FORWARD, rounded, rounded_both, rounded_turned, scale_for, scale_of


class EightBitMLP(nn.Module):
    """Of a module that is silu(gate) · up, all three without biases; evaluated, it is what it was."""

    gate_proj: EightBitLinear
    up_proj: EightBitLinear
    down_proj: EightBitLinear
    emulate: bool

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        if not self.training or args or kwargs:
            return super().forward(x, *args, **kwargs)
        gate, up, down = self.gate_proj.weight, self.up_proj.weight, self.down_proj.weight
        return in_blocks(lambda rows: _MLP.apply(rows, gate, up, down, self.emulate), x)


@torch._dynamo.allow_in_graph
class _MLP(torch.autograd.Function):
    """Kept are x, gate, up and scales. Compiled, all but the middle is open to the compiler."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, gate: Tensor, up: Tensor, down: Tensor, emulate: bool) -> Tensor:
        weights = gate, up, down
        scales = [scale_of(matrix, FORWARD) for matrix in (x, *weights)]
        gate_8, up_8, down_8 = (rounded(w, s, FORWARD).t() for w, s in zip(weights, scales[1:], strict=True))
        x_te = rounded(x, scales[0], FORWARD)
        gate_tf = multiply(x_te, gate_8, scales[0], scales[1], x.dtype, emulate, fast=True)
        up_tf = multiply(x_te, up_8, scales[0], scales[2], x.dtype, emulate, fast=True)
        h_scale = scale_for(gated_largest(gate_tf, up_tf), FORWARD)
        ctx.save_for_backward(x, *weights, gate_tf, up_tf, *scales, h_scale)
        ctx.emulate = emulate
        h_tf = gated_rounded(gate_tf, up_tf, h_scale)
        return multiply(h_tf, down_8, h_scale, scales[3], x.dtype, emulate, fast=True)

    @staticmethod
    def backward(ctx: Any, d_y: Tensor) -> tuple[Tensor | None, ...]:
        x, gate, up, down, gate_tf, up_tf, x_scale, gate_scale, up_scale, down_scale, h_scale = ctx.saved_tensors
        needs_x, needs_gate, needs_up, needs_down = ctx.needs_input_grad[:4]
        dtype, emulate = d_y.dtype, ctx.emulate
        d_scale = scale_of(d_y, BACKWARD)
        d_te, d_et = rounded_both(d_y, d_scale, BACKWARD)
        down_8 = rounded_turned(down, down_scale, FORWARD).t()
        d_h = multiply(d_te, down_8, d_scale, down_scale, dtype, emulate)  # [T, E] · [E, F]
        largest = gated_backward_largest(d_h, gate_tf, up_tf)
        dg_scale, du_scale = scale_for(largest[0], BACKWARD), scale_for(largest[1], BACKWARD)
        dg_tf, dg_ft, du_tf, du_ft, h_ft = gated_backward_rounded(d_h, gate_tf, up_tf, h_scale, dg_scale, du_scale)
        d_x = d_gate = d_up = d_down = None
        if needs_down:  # [E, T] · [T, F]
            d_down = multiply(d_et, h_ft.t(), d_scale, h_scale, dtype, emulate)
        if needs_gate or needs_up:  # [F, T] · [T, E]
            x_8 = rounded_turned(x, x_scale, FORWARD).t()
            d_gate = multiply(dg_ft, x_8, dg_scale, x_scale, dtype, emulate) if needs_gate else None
            d_up = multiply(du_ft, x_8, du_scale, x_scale, dtype, emulate) if needs_up else None
        if needs_x:  # [T, F] · [F, E]
            gate_8, up_8 = rounded_turned(gate, gate_scale, FORWARD).t(), rounded_turned(up, up_scale, FORWARD).t()
            d_x = multiply(dg_tf, gate_8, dg_scale, gate_scale, dtype, emulate)
            d_x = d_x + multiply(du_tf, up_8, du_scale, up_scale, dtype, emulate)
        return d_x, d_gate, d_up, d_down, None
