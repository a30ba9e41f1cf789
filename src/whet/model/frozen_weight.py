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

# A frozen weight as a list of tensors: [weight], [weight, fp8 scale], or NF4 values with their scales
#
# Fused operators take these tensors and dequantize inside, in the forward and again in the backward pass. So a
# dequantized weight is never saved, and torch.compile sees the same operator for every layer.


def is_supported_linear(layer: nn.Module) -> bool:
    """Whether it is a plain nn.Linear, an FP8Linear, or double-quantized NF4; other subclasses may compute something
    else."""
    if type(layer) is nn.Linear or isinstance(layer, FP8Linear):
        return True
    state = quant_state(getattr(layer, "weight", None))
    return state is not None and is_double_quantized_nf4(state)


def is_fp8_weight(parts: Sequence[Tensor]) -> bool:
    """Whether the weight is to be multiplied in fp8."""
    return len(parts) == 2


def weight_parts(layer: Any) -> list[Tensor]:
    """The tensors of the weight; with an fp8 scale in training mode only: FP8Linear evaluates in 16 bits."""
    if isinstance(layer, FP8Linear) and layer.training:
        return [layer.weight, scale_from_amax(compute_amax(layer.weight), E4M3)]
    return [layer.weight] if quant_state(layer.weight) is None else nf4_parts(layer.weight)


def weight_compute_dtype(layer: Any) -> torch.dtype:
    """The dtype that the layer's weight is multiplied in."""
    state = quant_state(layer.weight)
    return layer.weight.dtype if state is None else (layer.compute_dtype or state.dtype)


def materialize_weight(parts: Sequence[Tensor], out_features: int, in_features: int, dtype: torch.dtype) -> Tensor:
    """The weight [out, in] in `dtype`, not for fp8. Not copied if it has that dtype already."""
    if len(parts) == 1:
        return parts[0].to(dtype)
    return dequantize_nf4(parts, (out_features, in_features), dtype)


# Matrix products with frozen weights

MATMUL_CHUNK = 4096
"""Tokens at a time in products with MLP-sized weights: a few percent faster than 16 384 at once (L2 cache reuse)."""


class FrozenMatrix:
    """A frozen weight [O, I], dequantized or cast on first use. Its shape comes from the adapter's A and B."""

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
        """[I, O] fp8, column-major."""
        return cast_to_fp8_eager(self._parts[0], self.scale, E4M3).t()

    @functools.cached_property
    def fp8_for_backward(self) -> Tensor:
        """[O, I] fp8, column-major."""
        return cast_to_fp8_transposed(self._parts[0], self.scale, E4M3).t()


def split_parts(parts: Sequence[Tensor], sizes: Sequence[int]) -> list[list[Tensor]]:
    """Split a flat list of tensors into those of each weight."""
    ends = list(itertools.accumulate(sizes))
    return [list(parts[end - size : end]) for end, size in zip(ends, sizes, strict=True)]


class MatmulOperand:
    """An input of products with frozen weights, cast to fp8 once, if at all."""

    is_gradient = False

    def __init__(self, matrix: Tensor) -> None:
        self.matrix = matrix

    @functools.cached_property
    def fp8(self) -> tuple[Tensor, Tensor]:
        """Cast to fp8, and its scale."""
        dtype = E5M2 if self.is_gradient else E4M3
        scale = scale_from_amax(compute_amax(self.matrix), dtype)
        return cast_to_fp8_eager(self.matrix, scale, dtype), scale


class GradientOperand(MatmulOperand):
    """The gradient of an output, to be multiplied with W instead of Wᵀ."""

    is_gradient = True


MatmulTerm = tuple[MatmulOperand, FrozenMatrix]
"""x [T, I] · Wᵀ, or for a gradient d [T, O] · W."""


def sum_of_matmuls(
    terms: Iterable[MatmulTerm], low_rank: tuple[Tensor, Tensor] | None = None, bias: Tensor | None = None, *,
    chunk: int | None = None, out: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """The sum of `terms`, a low-rank product [T, R] · [R, …] and a bias, `chunk` tokens at a time, into `out` if given.

    addmm accumulates without another pass over memory, so the low-rank product comes before the full ones; fp8 products
    cannot accumulate, so they come first. A dequantized weight is freed before the next one is made.
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
    """y + left · right in place; without y, bias + left · right."""
    if y is None:
        if bias is None:
            return torch.mm(left, right, out=out)
        return torch.addmm(bias.to(left.dtype), left, right, out=out)
    size = chunk or max(1, len(left))
    for part, of_left in zip(y.split(size), left.split(size), strict=True):
        part.addmm_(of_left, right)
    return y


def _fp8_matmul(x: MatmulOperand, frozen: FrozenMatrix, out: Tensor | None = None) -> Tensor:
    """fp8 product by the rules of `whet.model.fp8.linear`; emulated except on CUDA."""
    left, scale = x.fp8
    right = frozen.fp8_for_backward if x.is_gradient else frozen.fp8_for_forward
    return scaled_matmul(
        left, right, scale, frozen.scale, x.matrix.dtype, emulate=not left.is_cuda, fast=not x.is_gradient, out=out
    )
