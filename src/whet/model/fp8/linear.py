"""Linear layers that multiply in 8 bits while they are trained, with one scale for each matrix.

A matrix is multiplied by 448 / its largest number (57344 for gradients), rounded to 8 bits, multiplied with another in
the tensor cores, and the scales are divided out of the 16-bit result. Inputs and weights are e4m3 (4 bits of exponent,
3 of mantissa), gradients e5m2: they need the range more than the digits. The forward product is summed the fast way,
the backward ones exactly. What the backward products need transposed is cast into that order by kernels of its own
(`whet.model.fp8.casting`).

Shape letters: T tokens, I features in, O features out.
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
"""The 8-bit products of CUDA take matrices whose sides are multiples of this."""


class FP8Linear(nn.Linear):
    """A linear layer whose products are 8-bit in training. Weights stay what they were, in type and name.

    Evaluating and generating compute with the weights as they are: what is measured is what will be exported.
    """

    emulate = False
    """Cast to fp8 and multiply in fp32, for tests on devices without fp8 matrix products."""

    def forward(self, input: Tensor) -> Tensor:
        if not self.training:
            return super().forward(input)
        output = apply_padded(lambda rows: fp8_matmul(rows, self.weight, self.emulate), input)
        return output if self.bias is None else output + self.bias.to(output.dtype)


def apply_padded(function: Callable[[Tensor], Tensor], input: Tensor) -> Tensor:
    """A function of [T, I], T a multiple of BLOCK, for any number of tokens and whatever stands before the features; in
    the type of mixed precision where that is on."""
    kind = input.device.type
    if torch.is_autocast_enabled(kind):
        input = input.to(torch.get_autocast_dtype(kind))
    rows = input.reshape(-1, input.shape[-1])
    missing = -len(rows) % FP8_ALIGNMENT
    if missing:  # zeros change neither a scale nor a sum
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
    """What is kept is what nn.Linear keeps, and the scales: rounding again is cheaper than another copy in memory.

    Compiled, all of it is open to the compiler: products with the same input share its rounding, and what comes before
    a rounding is fused with it. Nothing is computed for weights that are not trained.
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
            straight, turned = cast_to_fp8_both(d_output, scale, E5M2)
        else:
            straight, turned = cast_to_fp8(d_output, scale, E5M2), None
        if ctx.needs_input_grad[0]:  # [T, O] · [O, I]
            d_input = scaled_matmul(
                straight, cast_to_fp8_transposed(weight, weight_scale, E4M3).t(), scale, weight_scale, d_output.dtype,
                ctx.emulate,
            )  # fmt: skip
        if turned is not None:  # [O, T] · [T, I]
            d_weight = scaled_matmul(
                turned, cast_to_fp8_transposed(input, input_scale, E4M3).t(), scale, input_scale, d_output.dtype,
                ctx.emulate,
            )  # fmt: skip
        return d_input, d_weight, None


def scaled_matmul(
    left: Tensor, right: Tensor, left_scale: Tensor, right_scale: Tensor, dtype: torch.dtype, emulate: bool,
    fast: bool = False, out: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """left · right without their scales. `right` lies in memory column by column; `emulate` multiplies in fp32."""
    if emulate:
        with torch.autocast(left.device.type, enabled=False):
            y = torch.mm(left.float() / left_scale, right.float() / right_scale).to(dtype)
        return y if out is None else out.copy_(y)
    into = {} if out is None else {"out": out}
    return scaled_mm(
        left, right, left_scale.reciprocal(), right_scale.reciprocal(), out_dtype=dtype, use_fast_accum=fast, **into
    )
