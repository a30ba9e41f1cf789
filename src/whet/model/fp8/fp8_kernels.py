"""Triton kernels for fp8 training: casts, also transposed by tiles so that reads and writes are coalesced, and SwiGLU.

Shape letters: T tokens, I features, F intermediate size.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_TILE_ROWS, _TILE_COLUMNS, _TILE_WARPS = 128, 64, 8
"""Tile of a transposing cast."""
_SILU_MUL_ROWS, _SILU_MUL_COLUMNS, _SILU_MUL_WARPS = 32, 64, 4
"""Tile of the SwiGLU backward cast, which reads three matrices and writes five."""
_AMAX_BLOCK, _ELEMENTWISE_BLOCK = 16384, 2048
"""Elements for each program that computes an amax, and elements at a time."""


@triton.jit
def _cast_kernel(matrix_ptr, scale_ptr, out_ptr, count, block: tl.constexpr):  # type: ignore[no-untyped-def]
    offset = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    values = tl.load(matrix_ptr + offset, mask=offset < count, other=0.0).to(tl.float32) * tl.load(scale_ptr)
    tl.store(out_ptr + offset, values.to(out_ptr.dtype.element_ty), mask=offset < count)


@triton.jit
def _cast_transposed_kernel(  # type: ignore[no-untyped-def]
    matrix_ptr, scale_ptr, transposed_ptr, out_ptr, rows, columns,
    both: tl.constexpr, block_rows: tl.constexpr, block_columns: tl.constexpr,
):  # fmt: skip
    tiles_per_row = tl.cdiv(columns, block_columns)
    row = (tl.program_id(0) // tiles_per_row).to(tl.int64) * block_rows + tl.arange(0, block_rows)
    column = (tl.program_id(0) % tiles_per_row).to(tl.int64) * block_columns + tl.arange(0, block_columns)
    mask = (row < rows)[:, None] & (column < columns)[None, :]
    offset = row[:, None] * columns + column[None, :]
    values = tl.load(matrix_ptr + offset, mask=mask, other=0.0).to(tl.float32) * tl.load(scale_ptr)
    rounded = values.to(transposed_ptr.dtype.element_ty)
    if both:
        tl.store(out_ptr + offset, rounded, mask=mask)
    tl.store(transposed_ptr + column[:, None] * rows + row[None, :], tl.trans(rounded), mask=tl.trans(mask))


@triton.jit
def _silu_mul(gate, up, dtype: tl.constexpr):  # type: ignore[no-untyped-def]
    """silu(gate) · up, rounded to 16 bits as if it were stored"""
    return (gate * tl.sigmoid(gate) * up).to(dtype).to(tl.float32)


@triton.jit
def _silu_mul_backward(d_h, gate, up, dtype: tl.constexpr):  # type: ignore[no-untyped-def]
    sigmoid = tl.sigmoid(gate)
    silu = gate * sigmoid
    d_gate = (d_h * up * (sigmoid + silu * (1 - sigmoid))).to(dtype).to(tl.float32)
    return d_gate, (d_h * silu).to(dtype).to(tl.float32), (silu * up).to(dtype).to(tl.float32)


@triton.jit
def _max_with_nan(a, b):  # type: ignore[no-untyped-def]
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _silu_mul_amax_kernel(gate_ptr, up_ptr, amax_ptr, count, block: tl.constexpr, step: tl.constexpr):  # type: ignore[no-untyped-def]
    """amax of silu(gate) · up, one for each program"""
    first = tl.program_id(0).to(tl.int64) * block
    amax = tl.zeros((step,), tl.float32)
    for start in range(0, block, step):
        offset = first + start + tl.arange(0, step)
        gate = tl.load(gate_ptr + offset, mask=offset < count, other=0.0)
        up = tl.load(up_ptr + offset, mask=offset < count, other=0.0)
        h = _silu_mul(gate.to(tl.float32), up.to(tl.float32), gate.dtype)
        amax = _max_with_nan(amax, tl.abs(h))
    tl.store(amax_ptr + tl.program_id(0), tl.reduce(amax, 0, _max_with_nan))


@triton.jit
def _silu_mul_cast_kernel(gate_ptr, up_ptr, scale_ptr, h_ptr, count, block: tl.constexpr):  # type: ignore[no-untyped-def]
    offset = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    gate = tl.load(gate_ptr + offset, mask=offset < count, other=0.0)
    up = tl.load(up_ptr + offset, mask=offset < count, other=0.0)
    h = _silu_mul(gate.to(tl.float32), up.to(tl.float32), gate.dtype) * tl.load(scale_ptr)
    tl.store(h_ptr + offset, h.to(h_ptr.dtype.element_ty), mask=offset < count)


@triton.jit
def _silu_mul_backward_amax_kernel(  # type: ignore[no-untyped-def]
    d_h_ptr, gate_ptr, up_ptr, amax_ptr, count, block: tl.constexpr, step: tl.constexpr
):
    """amax of d_gate for each program, then amax of d_up for each program"""
    first = tl.program_id(0).to(tl.int64) * block
    amax_gate = tl.zeros((step,), tl.float32)
    amax_up = tl.zeros((step,), tl.float32)
    for start in range(0, block, step):
        offset = first + start + tl.arange(0, step)
        gate = tl.load(gate_ptr + offset, mask=offset < count, other=0.0)
        up = tl.load(up_ptr + offset, mask=offset < count, other=0.0)
        d_h = tl.load(d_h_ptr + offset, mask=offset < count, other=0.0)
        d_gate, d_up, _ = _silu_mul_backward(d_h.to(tl.float32), gate.to(tl.float32), up.to(tl.float32), gate.dtype)
        amax_gate = _max_with_nan(amax_gate, tl.abs(d_gate))
        amax_up = _max_with_nan(amax_up, tl.abs(d_up))
    tl.store(amax_ptr + tl.program_id(0), tl.reduce(amax_gate, 0, _max_with_nan))
    tl.store(amax_ptr + tl.num_programs(0) + tl.program_id(0), tl.reduce(amax_up, 0, _max_with_nan))


@triton.jit
def _silu_mul_backward_cast_kernel(  # type: ignore[no-untyped-def]
    d_h_ptr, gate_ptr, up_ptr, h_scale_ptr, gate_scale_ptr, up_scale_ptr,
    d_gate_ptr, d_gate_transposed_ptr, d_up_ptr, d_up_transposed_ptr, h_transposed_ptr, rows, columns,
    block_rows: tl.constexpr, block_columns: tl.constexpr,
):  # fmt: skip
    tiles_per_row = tl.cdiv(columns, block_columns)
    row = (tl.program_id(0) // tiles_per_row).to(tl.int64) * block_rows + tl.arange(0, block_rows)
    column = (tl.program_id(0) % tiles_per_row).to(tl.int64) * block_columns + tl.arange(0, block_columns)
    mask = (row < rows)[:, None] & (column < columns)[None, :]
    offset = row[:, None] * columns + column[None, :]
    transposed_offset = column[:, None] * rows + row[None, :]
    transposed_mask = tl.trans(mask)
    gate = tl.load(gate_ptr + offset, mask=mask, other=0.0)
    up = tl.load(up_ptr + offset, mask=mask, other=0.0)
    d_h = tl.load(d_h_ptr + offset, mask=mask, other=0.0)
    d_gate, d_up, h = _silu_mul_backward(d_h.to(tl.float32), gate.to(tl.float32), up.to(tl.float32), gate.dtype)
    rounded_gate = (d_gate * tl.load(gate_scale_ptr)).to(d_gate_ptr.dtype.element_ty)
    rounded_up = (d_up * tl.load(up_scale_ptr)).to(d_up_ptr.dtype.element_ty)
    rounded_h = (h * tl.load(h_scale_ptr)).to(h_transposed_ptr.dtype.element_ty)
    tl.store(d_gate_ptr + offset, rounded_gate, mask=mask)
    tl.store(d_up_ptr + offset, rounded_up, mask=mask)
    tl.store(d_gate_transposed_ptr + transposed_offset, tl.trans(rounded_gate), mask=transposed_mask)
    tl.store(d_up_transposed_ptr + transposed_offset, tl.trans(rounded_up), mask=transposed_mask)
    tl.store(h_transposed_ptr + transposed_offset, tl.trans(rounded_h), mask=transposed_mask)


def cast(matrix: Tensor, scale: Tensor, out: Tensor) -> None:
    """Cast a contiguous matrix times `scale` into `out`."""
    count = matrix.numel()
    if count:
        _cast_kernel[(triton.cdiv(count, _ELEMENTWISE_BLOCK),)](
            matrix, scale, out, count, block=_ELEMENTWISE_BLOCK, num_warps=4
        )


def cast_transposed(matrix: Tensor, scale: Tensor, transposed: Tensor, out: Tensor | None = None) -> None:
    """Cast a contiguous [T, I] times `scale` into `transposed` [I, T], and into `out` [T, I] if given."""
    if matrix.numel():
        _cast_transposed_kernel[(_count_tiles(matrix, _TILE_ROWS, _TILE_COLUMNS),)](
            matrix, scale, transposed, transposed if out is None else out, *matrix.shape,
            both=out is not None, block_rows=_TILE_ROWS, block_columns=_TILE_COLUMNS, num_warps=_TILE_WARPS,
        )  # fmt: skip


def silu_mul_amax(gate: Tensor, up: Tensor) -> Tensor:
    """[programs] amax of silu(gate) · up; gate and up are contiguous [T, F]."""
    programs = triton.cdiv(gate.numel(), _AMAX_BLOCK)
    amax = torch.empty(programs, dtype=torch.float32, device=gate.device)
    _silu_mul_amax_kernel[(programs,)](
        gate, up, amax, gate.numel(), block=_AMAX_BLOCK, step=_ELEMENTWISE_BLOCK, num_warps=8
    )
    return amax


def silu_mul_cast(gate: Tensor, up: Tensor, scale: Tensor, h: Tensor) -> None:
    """Cast silu(gate) · up times `scale` into `h`."""
    _silu_mul_cast_kernel[(triton.cdiv(gate.numel(), _ELEMENTWISE_BLOCK),)](
        gate, up, scale, h, gate.numel(), block=_ELEMENTWISE_BLOCK, num_warps=8
    )


def silu_mul_backward_amax(d_h: Tensor, gate: Tensor, up: Tensor) -> Tensor:
    """[2, programs] amax of d_gate and of d_up."""
    programs = triton.cdiv(gate.numel(), _AMAX_BLOCK)
    amax = torch.empty(2, programs, dtype=torch.float32, device=gate.device)
    _silu_mul_backward_amax_kernel[(programs,)](
        d_h, gate, up, amax, gate.numel(), block=_AMAX_BLOCK, step=_ELEMENTWISE_BLOCK, num_warps=8
    )
    return amax


def silu_mul_backward_cast(
    d_h: Tensor, gate: Tensor, up: Tensor, h_scale: Tensor, gate_scale: Tensor, up_scale: Tensor,
    d_gate: Tensor, d_gate_transposed: Tensor, d_up: Tensor, d_up_transposed: Tensor, h_transposed: Tensor,
) -> None:  # fmt: skip
    """Cast d_gate and d_up into [T, F] and [F, T], and silu(gate) · up into [F, T]."""
    _silu_mul_backward_cast_kernel[(_count_tiles(gate, _SILU_MUL_ROWS, _SILU_MUL_COLUMNS),)](
        d_h, gate, up, h_scale, gate_scale, up_scale,
        d_gate, d_gate_transposed, d_up, d_up_transposed, h_transposed, *gate.shape,
        block_rows=_SILU_MUL_ROWS, block_columns=_SILU_MUL_COLUMNS, num_warps=_SILU_MUL_WARPS,
    )  # fmt: skip


def _count_tiles(matrix: Tensor, rows: int, columns: int) -> int:
    return triton.cdiv(matrix.shape[0], rows) * triton.cdiv(matrix.shape[1], columns)
