"""Casting to fp8 with a scale, also transposed, as the products of the backward pass need it.

fp8 matrix products take their second operand column-major, so what was cast for the forward pass has to be cast again,
transposed. torch.compile would write a transposed matrix byte by byte at large strides; the kernels transpose tiles.

Shape letters: T tokens, I features.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from whet.core.resources import has_triton

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
_MIN_AMAX = 1e-12
"""Used as the amax of a zero matrix."""


def compute_scale(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """The factor that maps the largest magnitude of a tensor to the largest value of `dtype`."""
    return scale_from_amax(tensor.abs().max(), dtype)


def scale_from_amax(amax: Tensor, dtype: torch.dtype) -> Tensor:
    """The same for a known largest magnitude.

    Computed in fp64: compiled and eager division of fp32 numbers may round differently.
    """
    return (torch.finfo(dtype).max / amax.to(torch.float64).clamp(min=_MIN_AMAX)).to(torch.float32)


def cast_to_fp8(tensor: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Cast tensor · scale. Needs no clamp: with the right scale, nothing exceeds the largest value after rounding."""
    return (tensor.to(torch.float32) * scale).to(dtype)


def compute_amax(matrix: Tensor) -> Tensor:
    """The largest magnitude, in one pass also without torch.compile; 0 for an empty matrix."""
    return torch.linalg.vector_norm(matrix, torch.inf) if matrix.numel() else matrix.new_zeros(())


def cast_to_fp8_eager(matrix: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """`cast_to_fp8` into a row-major matrix, in one pass also without torch.compile."""
    kernels = triton_kernels_for(matrix)
    if kernels is None:
        return cast_to_fp8(matrix.contiguous(), scale, dtype)
    out = _empty_like(matrix, dtype)
    kernels.cast(matrix.contiguous(), scale, out)
    return out


@torch.library.custom_op(
    "whet::cast_to_fp8_transposed", mutates_args=(), schema="(Tensor matrix, Tensor scale, ScalarType dtype) -> Tensor"
)
def cast_to_fp8_transposed(matrix: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Cast [T, I] → [I, T]."""
    kernels = triton_kernels_for(matrix)
    if kernels is None:
        return cast_to_fp8(matrix, scale, dtype).t().contiguous()
    transposed = _empty_transposed(matrix, dtype)
    kernels.cast_transposed(matrix.contiguous(), scale, transposed)
    return transposed


@cast_to_fp8_transposed.register_fake
def _(matrix: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    return _empty_transposed(matrix, dtype)


@torch.library.custom_op(
    "whet::cast_to_fp8_both",
    mutates_args=(),
    schema="(Tensor matrix, Tensor scale, ScalarType dtype) -> (Tensor, Tensor)",
)
def cast_to_fp8_both(matrix: Tensor, scale: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cast [T, I] → [T, I] and [I, T]."""
    kernels = triton_kernels_for(matrix)
    if kernels is None or matrix.dtype.itemsize != 2:  # triton 3.6 miscompiles the transposed store of fp32
        return cast_to_fp8(matrix, scale, dtype).contiguous(), cast_to_fp8_transposed(matrix, scale, dtype)
    out, transposed = _empty_like(matrix, dtype), _empty_transposed(matrix, dtype)
    kernels.cast_transposed(matrix.contiguous(), scale, transposed, out)
    return out, transposed


@cast_to_fp8_both.register_fake
def _(matrix: Tensor, scale: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    return _empty_like(matrix, dtype), _empty_transposed(matrix, dtype)


def triton_kernels_for(tensor: Tensor) -> Any:
    """The module of Triton kernels; None for CPUs, GPUs without fp8, and without Triton."""
    if not tensor.is_cuda or torch.cuda.get_device_capability(tensor.device) < (8, 9):
        return None
    return _load_triton_kernels()


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
