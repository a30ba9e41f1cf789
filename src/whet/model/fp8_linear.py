"""Linear layers that multiply in 8 bits while they are trained, with one scale for each matrix.

A matrix is multiplied by 448 / its largest number (57344 for gradients), rounded to 8 bits, multiplied with another in
the tensor cores, and the scales are divided out of the 16-bit result. Inputs and weights are e4m3 (4 bits of exponent,
3 of mantissa), gradients e5m2: they need the range more than the digits. The forward product is summed the fast way,
the backward ones exactly. These are torchao's rules for `tensorwise`, bit for bit.

Shape letters: T tokens, I features in, O features out.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Product = Callable[[Tensor, Tensor], Tensor]
"""[T, I] and a weight [O, I] → [T, O]."""

BLOCK = 16
"""The 8-bit products of CUDA take matrices whose sides are multiples of this."""
_FORWARD, _BACKWARD = torch.float8_e4m3fn, torch.float8_e5m2
_LEAST = 1e-12
"""A matrix of zeros is divided by this."""


class EightBitLinear(nn.Linear):
    """A linear layer whose products are 8-bit in training. Weights stay what they were, in type and name.

    Evaluating and generating compute with the weights as they are: what is measured is what will be exported.
    """

    product: Product

    def forward(self, input: Tensor) -> Tensor:
        if not self.training:
            return super().forward(input)
        kind = input.device.type
        if torch.is_autocast_enabled(kind):
            input = input.to(torch.get_autocast_dtype(kind))
        rows = input.reshape(-1, self.in_features)
        missing = -len(rows) % BLOCK
        if missing:  # zeros change neither a scale nor a sum
            rows = F.pad(rows, (0, 0, 0, missing))
        output = self.product(rows, self.weight)
        if missing:
            output = output[:-missing]
        output = output.reshape(*input.shape[:-1], self.out_features)
        return output if self.bias is None else output + self.bias.to(output.dtype)


def tensorwise(input: Tensor, weight: Tensor) -> Tensor:
    """input · weightᵀ, in 8 bits there and back."""
    return _Tensorwise.apply(input, weight, False)


def tensorwise_emulated(input: Tensor, weight: Tensor) -> Tensor:
    """The same roundings, multiplied in fp32 where there are no 8-bit products. For tests."""
    return _Tensorwise.apply(input, weight, True)


@torch._dynamo.allow_in_graph
class _Tensorwise(torch.autograd.Function):
    """What is kept is what nn.Linear keeps, and the scales: rounding again is cheaper than another copy in memory.

    Compiled, all of it is open to the compiler: products with the same input share its rounding, and what comes before
    a rounding is fused with it. Nothing is computed for weights that are not trained.
    """

    @staticmethod
    def forward(ctx: Any, input: Tensor, weight: Tensor, emulate: bool) -> Tensor:
        input_scale, weight_scale = _scale(input, _FORWARD), _scale(weight, _FORWARD)
        ctx.save_for_backward(input, weight, input_scale, weight_scale)
        ctx.emulate = emulate
        return _multiply(
            _round(input, input_scale, _FORWARD), _round(weight, weight_scale, _FORWARD).t(), input_scale,
            weight_scale, input.dtype, emulate, fast=True,
        )  # fmt: skip

    @staticmethod
    def backward(ctx: Any, d_output: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        input, weight, input_scale, weight_scale = ctx.saved_tensors
        d_input = d_weight = None
        scale = _scale(d_output, _BACKWARD)
        rounded = _round(d_output, scale, _BACKWARD)
        if ctx.needs_input_grad[0]:  # [T, O] · [O, I]
            d_input = _multiply(
                rounded, _turned(_round(weight, weight_scale, _FORWARD)), scale, weight_scale, d_output.dtype,
                ctx.emulate,
            )  # fmt: skip
        if ctx.needs_input_grad[1]:  # [O, T] · [T, I]
            d_weight = _multiply(
                rounded.t().contiguous(), _turned(_round(input, input_scale, _FORWARD)), scale, input_scale,
                d_output.dtype, ctx.emulate,
            )  # fmt: skip
        return d_input, d_weight, None


def _scale(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """What makes the largest number of a tensor the largest that `dtype` has.

    In fp64, because a compiled quotient of fp32 numbers may be rounded otherwise than one that is not compiled.
    """
    largest = tensor.abs().max().to(torch.float64)
    return (torch.finfo(dtype).max / largest.clamp(min=_LEAST)).to(torch.float32)


def _round(tensor: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """To 8 bits. Nothing has to be clamped: by the scale, no number is larger than those that round to the largest."""
    return (tensor.to(torch.float32) * scale).to(dtype)


def _turned(matrix: Tensor) -> Tensor:
    """The same matrix, its columns one after the other in memory, as products take their second one."""
    return matrix.t().contiguous().t()


def _multiply(
    left: Tensor, right: Tensor, left_scale: Tensor, right_scale: Tensor, dtype: torch.dtype, emulate: bool,
    fast: bool = False,
) -> Tensor:  # fmt: skip
    if emulate:
        with torch.autocast(left.device.type, enabled=False):
            return torch.mm(left.float() / left_scale, right.float() / right_scale).to(dtype)
    return torch._scaled_mm(
        left, right, left_scale.reciprocal(), right_scale.reciprocal(), out_dtype=dtype, use_fast_accum=fast
    )
