"""Rounding to 8 bits, also into the order in memory that the products of a backward pass take.

Products in 8 bits want their second matrix column by column, so what was rounded for the forward pass has to be rounded
again, turned. A compiler that writes a turned matrix writes single bytes far apart; the kernels turn it in tiles.

Shape letters: T tokens, I features.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from whet.core.imports import has_triton

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
_MIN_AMAX = 1e-12
"""A matrix of zeros is divided by this."""


def compute_scale(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """What makes the largest number of a tensor the largest that `dtype` has."""
    return scale_from_amax(tensor.abs().max(), dtype)


def scale_from_amax(largest: Tensor, dtype: torch.dtype) -> Tensor:
    """The same for a tensor whose largest number, without its sign, is known.

    In fp64, because a compiled quotient of fp32 numbers may be rounded otherwise than one that is not compiled.
    """
    return (torch.finfo(dtype).max / largest.to(torch.float64).clamp(min=_MIN_AMAX)).to(torch.float32)


def cast_to_fp8(tensor: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """To 8 bits. Nothing has to be clamped: by the scale, no number is larger than those that round to the largest."""
    return (tensor.to(torch.float32) * scale).to(dtype)


def compute_amax(matrix: Tensor) -> Tensor:
    """Its largest number without its sign, in one pass where no compiler sees it; 0 of an empty one."""
    return torch.linalg.vector_norm(matrix, torch.inf) if matrix.numel() else matrix.new_zeros(())


def cast_to_fp8_eager(matrix: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """`rounded` row by row, in one pass where no compiler sees it."""
    kernels = triton_kernels_for(matrix)
    if kernels is None:
        return cast_to_fp8(matrix.contiguous(), scale, dtype)
    straight = _empty_like(matrix, dtype)
    kernels.cast(matrix.contiguous(), scale, straight)
    return straight


@torch.library.custom_op(
    "whet::cast_to_fp8_transposed", mutates_args=(), schema="(Tensor matrix, Tensor scale, ScalarType dtype) -> Tensor"
)
def cast_to_fp8_transposed(matrix: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """[T, I] → [I, T] in 8 bits."""
    kernels = triton_kernels_for(matrix)
    if kernels is None:
        return cast_to_fp8(matrix, scale, dtype).t().contiguous()
    turned = _empty_transposed(matrix, dtype)
    kernels.cast_transposed(matrix.contiguous(), scale, turned)
    return turned


@cast_to_fp8_transposed.register_fake
def _(matrix: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    return _empty_transposed(matrix, dtype)


@torch.library.custom_op(
    "whet::cast_to_fp8_both",
    mutates_args=(),
    schema="(Tensor matrix, Tensor scale, ScalarType dtype) -> (Tensor, Tensor)",
)
def cast_to_fp8_both(matrix: Tensor, scale: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """[T, I] → [T, I] and [I, T] in 8 bits."""
    kernels = triton_kernels_for(matrix)
    if kernels is None or matrix.dtype.itemsize != 2:  # of 32 bits, triton 3.6 writes the turned one wrong
        return cast_to_fp8(matrix, scale, dtype).contiguous(), cast_to_fp8_transposed(matrix, scale, dtype)
    straight, turned = _empty_like(matrix, dtype), _empty_transposed(matrix, dtype)
    kernels.cast_transposed(matrix.contiguous(), scale, turned, straight)
    return straight, turned


@cast_to_fp8_both.register_fake
def _(matrix: Tensor, scale: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    return _empty_like(matrix, dtype), _empty_transposed(matrix, dtype)


def triton_kernels_for(tensor: Tensor) -> Any:
    """The module of kernels, where they can be used; None elsewhere, as for cards without 8-bit numbers."""
    return (
        _load_triton_kernels() if tensor.is_cuda and torch.cuda.get_device_capability(tensor.device) >= (8, 9) else None
    )


@functools.cache
def _load_triton_kernels() -> Any:
    if not has_triton():
        return None
    from whet.model.fp8 import fp8_kernels

    return fp8_kernels


def _empty_like(matrix: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.empty(matrix.shape, dtype=dtype, device=matrix.device)


def _empty_transposed(matrix: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.empty(matrix.shape[1], matrix.shape[0], dtype=dtype, device=matrix.device)
