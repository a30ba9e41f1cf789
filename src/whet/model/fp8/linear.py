"""Linear layers that multiply in fp8 during training, with one scale for each matrix (tensorwise scaling).

A matrix is scaled by 448 ÷ its amax (57344 for gradients), cast to fp8, multiplied in the tensor cores, and the scales
are divided out of the 16-bit result. Inputs and weights are e4m3 (4 exponent bits, 3 mantissa bits), gradients e5m2,
because they need range more than precision. The forward product uses fast accumulation, the backward products do not.
Operands that the backward products need transposed are cast by their own kernels (`whet.model.fp8.casting`).

Shape letters: T tokens, I input features, O output features.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from whet.compat.torch_private import scaled_mm
from whet.model.fp8.casting import E4M3, E5M2, cast_to_fp8, cast_to_fp8_both, cast_to_fp8_transposed, compute_scale

FP8_ALIGNMENT = 16
"""fp8 matrix products on CUDA need sizes that are multiples of this."""


class FP8Linear(nn.Linear):
    """A linear layer whose products are fp8 in training mode. Weights keep their dtype and name.

    In eval mode it computes with the weights as they are: what is evaluated is what is exported.
    """

    emulate = False
    """Cast to fp8 and multiply in fp32, for tests on devices without fp8 matrix products."""

    def forward(self, input: Tensor) -> Tensor:
        if not self.training:
            return super().forward(input)
        output = apply_padded(lambda rows: fp8_matmul(rows, self.weight, self.emulate), input)
        return output if self.bias is None else output + self.bias.to(output.dtype)


def apply_padded(function: Callable[[Tensor], Tensor], input: Tensor) -> Tensor:
    """Apply a function of [T, I], T a multiple of FP8_ALIGNMENT, to [..., I] with any number of tokens; in autocast's
    dtype if autocast is on."""
    kind = input.device.type
    if torch.is_autocast_enabled(kind):
        input = input.to(torch.get_autocast_dtype(kind))
    rows = input.reshape(-1, input.shape[-1])
    missing = -len(rows) % FP8_ALIGNMENT
    if missing:  # zeros change neither scales nor sums
        rows = F.pad(rows, (0, 0, 0, missing))
    output = function(rows)
    if missing:
        output = output[:-missing]
    return output.reshape(*input.shape[:-1], output.shape[-1])


def fp8_matmul(input: Tensor, weight: Tensor, emulate: bool = False) -> Tensor:
    """input [T, I] · weight [O, I]ᵀ in fp8, forward and backward. `emulate`: the same roundings, multiplied in fp32."""
    return _FP8Matmul.apply(input, weight, emulate)


@torch.compiler.allow_in_graph
class _FP8Matmul(torch.autograd.Function):
    """Saves what nn.Linear saves, and the scales: casting again is cheaper than a second copy in memory.

    torch.compile sees inside: products with the same input share its cast, and casts are fused with what precedes them.
    Nothing is computed for frozen weights.
    """

    @staticmethod
    def forward(ctx: Any, input: Tensor, weight: Tensor, emulate: bool) -> Tensor:
        input_scale, weight_scale = compute_scale(input, E4M3), compute_scale(weight, E4M3)
        ctx.save_for_backward(input, weight, input_scale, weight_scale)
        ctx.emulate = emulate
        return scaled_matmul(
            cast_to_fp8(input, input_scale, E4M3), cast_to_fp8(weight, weight_scale, E4M3).t(), input_scale,
            weight_scale, input.dtype, emulate, fast=True,
        )  # fmt: skip

    @staticmethod
    def backward(ctx: Any, d_output: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        input, weight, input_scale, weight_scale = ctx.saved_tensors
        d_input = d_weight = None
        scale = compute_scale(d_output, E5M2)
        if ctx.needs_input_grad[1]:
            d_output_8, d_output_t = cast_to_fp8_both(d_output, scale, E5M2)
        else:
            d_output_8, d_output_t = cast_to_fp8(d_output, scale, E5M2), None
        if ctx.needs_input_grad[0]:  # [T, O] · [O, I]
            d_input = scaled_matmul(
                d_output_8, cast_to_fp8_transposed(weight, weight_scale, E4M3).t(), scale, weight_scale, d_output.dtype,
                ctx.emulate,
            )  # fmt: skip
        if d_output_t is not None:  # [O, T] · [T, I]
            d_weight = scaled_matmul(
                d_output_t, cast_to_fp8_transposed(input, input_scale, E4M3).t(), scale, input_scale, d_output.dtype,
                ctx.emulate,
            )  # fmt: skip
        return d_input, d_weight, None


def scaled_matmul(
    left: Tensor, right: Tensor, left_scale: Tensor, right_scale: Tensor, dtype: torch.dtype, emulate: bool,
    fast: bool = False, out: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """left · right with the scales divided out. `right` is column-major; `emulate` multiplies in fp32."""
    if emulate:
        with torch.autocast(left.device.type, enabled=False):
            y = torch.mm(left.float() / left_scale, right.float() / right_scale).to(dtype)
        return y if out is None else out.copy_(y)
    into = {} if out is None else {"out": out}
    return scaled_mm(
        left, right, left_scale.reciprocal(), right_scale.reciprocal(), out_dtype=dtype, use_fast_accum=fast, **into
    )
