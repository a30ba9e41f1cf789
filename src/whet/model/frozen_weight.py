"""Frozen weights as fused operators take them (16-bit, fp8 or NF4), and matrix products with them.

Shape letters: T tokens, I input features, O output features, R rank."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from whet.compat.bitsandbytes_private import dequantize_nf4, is_double_quantized_nf4, nf4_parts, quant_state
from whet.model.fp8.casting import E4M3, E5M2, cast_to_fp8_eager, cast_to_fp8_transposed, compute_amax, scale_from_amax
from whet.model.fp8.linear import FP8Linear, scaled_matmul

# The frozen matrix of a linear layer, as the tensors it is kept in: itself, itself and the scale that it gets in 8
# bits, or 4-bit numbers and their scales.
#
# A fused operator takes the tensors and makes the matrix inside, in the forward and again in the backward pass, so that
# the matrix of a 4-bit layer is never kept and the compiler sees the same operator for every layer.


def is_supported_linear(layer: nn.Module) -> bool:
    """Whether it is an ordinary linear layer, in 16 bits and more or in NF4, or multiplies in 8 bits with one scale for
    each matrix; other subclasses compute something else."""
    if type(layer) is nn.Linear or isinstance(layer, FP8Linear):
        return True
    state = quant_state(getattr(layer, "weight", None))
    return state is not None and is_double_quantized_nf4(state)


def is_fp8_weight(parts: Sequence[Tensor]) -> bool:
    """Whether the matrix is to be multiplied in 8 bits."""
    return len(parts) == 2


def weight_parts(layer: Any) -> list[Tensor]:
    """What the matrix is kept in. A layer that multiplies in 8 bits does so while it is trained only."""
    if isinstance(layer, FP8Linear) and layer.training:
        return [layer.weight, scale_from_amax(compute_amax(layer.weight), E4M3)]
    return [layer.weight] if quant_state(layer.weight) is None else nf4_parts(layer.weight)


def weight_compute_dtype(layer: Any) -> torch.dtype:
    """The type of its matrix."""
    state = quant_state(layer.weight)
    return layer.weight.dtype if state is None else (layer.compute_dtype or state.dtype)


def materialize_weight(parts: Sequence[Tensor], out_features: int, in_features: int, dtype: torch.dtype) -> Tensor:
    """[out, in] in `dtype`, of one that is not for 8 bits; a matrix that has that type already is not copied."""
    if len(parts) == 1:
        return parts[0].to(dtype)
    return dequantize_nf4(parts, (out_features, in_features), dtype)


# Products with frozen matrices, in whatever they are kept, and with what adapters add to them.
#
# Shape letters: T tokens, I features in, O features out, R rank.

MATMUL_CHUNK = 4096
"""Tokens that are multiplied with a large matrix at a time: with 16 384 tokens and a matrix as large as those of an MLP
it is a few hundredths faster so, because more of what is read stays in the cache."""


class FrozenMatrix:
    """A frozen matrix [O, I], as high and wide as the adapter beside it says; made from its parts when it is needed."""

    def __init__(self, parts: Sequence[Tensor], a: Tensor, b: Tensor, dtype: torch.dtype) -> None:
        self._parts = parts
        self._shape = len(b), a.shape[1]
        self._dtype = dtype

    @property
    def is_fp8(self) -> bool:
        return is_fp8_weight(self._parts)

    @property
    def scale(self) -> Tensor:
        return self._parts[1]

    @functools.cached_property
    def matrix(self) -> Tensor:
        return materialize_weight(self._parts, *self._shape, self._dtype)

    @functools.cached_property
    def fp8_for_forward(self) -> Tensor:
        """[I, O] in 8 bits, column by column."""
        return cast_to_fp8_eager(self._parts[0], self.scale, E4M3).t()

    @functools.cached_property
    def fp8_for_backward(self) -> Tensor:
        """[O, I] in 8 bits, column by column."""
        return cast_to_fp8_transposed(self._parts[0], self.scale, E4M3).t()


def split_parts(parts: Sequence[Tensor], sizes: Sequence[int]) -> list[list[Tensor]]:
    """The parts of each of several matrices."""
    ends = list(itertools.accumulate(sizes))
    return [list(parts[end - size : end]) for end, size in zip(ends, sizes, strict=True)]


class MatmulOperand:
    """An input, to meet frozen matrices. For those that are multiplied in 8 bits it is rounded once."""

    is_gradient = False

    def __init__(self, matrix: Tensor) -> None:
        self.matrix = matrix

    @functools.cached_property
    def fp8(self) -> tuple[Tensor, Tensor]:
        """In 8 bits, and its scale."""
        kind = E5M2 if self.is_gradient else E4M3
        scale = scale_from_amax(compute_amax(self.matrix), kind)
        return cast_to_fp8_eager(self.matrix, scale, kind), scale


class GradientOperand(MatmulOperand):
    """The gradient of an output, to meet the same matrices from the other side."""

    is_gradient = True


MatmulTerm = tuple[MatmulOperand, FrozenMatrix]
"""x [T, I] · Wᵀ, or of a gradient d [T, O] · W."""


def sum_of_matmuls(
    terms: Iterable[MatmulTerm], low_rank: tuple[Tensor, Tensor] | None = None, bias: Tensor | None = None, *,
    chunk: int | None = None, out: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """The sum of `terms`, of the product of two `thin` matrices [T, R] and [R, …] and of a bias; by so many tokens at a
    time, and into `out`, if given.

    A product can be added to what is there at no further pass over memory, so the thin one is made first; but not one
    in 8 bits, so those come before it. What is made of one term is gone before the next one's is made, if nobody else
    holds it.
    """
    y, later = None, []
    for x, frozen in terms:
        if frozen.is_fp8:
            y = _fp8_matmul(x, frozen, out) if y is None else y.add_(_fp8_matmul(x, frozen))
        else:
            later.append((x, frozen))
    if y is not None and bias is not None:
        y += bias
    if low_rank is not None:
        y = _add_matmul(y, *low_rank, bias, out)
    while later:
        x, frozen = later.pop(0)
        y = _add_matmul(y, x.matrix, frozen.matrix if x.is_gradient else frozen.matrix.T, bias, out, chunk)
    assert y is not None
    return y


def _add_matmul(
    y: Tensor | None, left: Tensor, right: Tensor, bias: Tensor | None, out: Tensor | None, chunk: int | None = None
) -> Tensor:
    """y + left · right in y's place; if there is none yet, bias + left · right."""
    if y is None:
        if bias is None:
            return torch.mm(left, right, out=out)
        return torch.addmm(bias.to(left.dtype), left, right, out=out)
    size = chunk or max(1, len(left))
    for part, of_left in zip(y.split(size), left.split(size), strict=True):
        part.addmm_(of_left, right)
    return y


def _fp8_matmul(x: MatmulOperand, frozen: FrozenMatrix, out: Tensor | None = None) -> Tensor:
    """By the rules of `fp8_linear`; elsewhere than on CUDA emulated."""
    left, scale = x.fp8
    right = frozen.fp8_for_backward if x.is_gradient else frozen.fp8_for_forward
    return scaled_matmul(
        left, right, scale, frozen.scale, x.matrix.dtype, emulate=not left.is_cuda, fast=not x.is_gradient, out=out
    )
