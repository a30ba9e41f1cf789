"""Triton kernels for 8-bit training: what a product needs turned is turned in tiles, so that memory is read and written
in long pieces.

Shape letters: T tokens, I features, F width of an MLP's middle.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_TILE_ROWS, _TILE_COLUMNS, _TILE_WARPS = 128, 64, 8
"""A tile of a matrix that is turned."""
_SILU_MUL_ROWS, _SILU_MUL_COLUMNS, _SILU_MUL_WARPS = 32, 64, 4
"""A tile of an MLP's middle, of which five are written for three that are read."""
_AMAX_BLOCK, _ELEMENTWISE_BLOCK = 16384, 2048
"""Numbers that one program looks through for the largest, and so many of them at a time."""


@triton.jit
def _cast_kernel(matrix_at, scale_at, small_at, count, block: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    numbers = tl.load(matrix_at + at, mask=at < count, other=0.0).to(tl.float32) * tl.load(scale_at)
    tl.store(small_at + at, numbers.to(small_at.dtype.element_ty), mask=at < count)


@triton.jit
def _cast_transposed_kernel(  # type: ignore[no-untyped-def]
    matrix_at, scale_at, turned_at, straight_at, rows, columns,
    both: tl.constexpr, block_rows: tl.constexpr, block_columns: tl.constexpr,
):  # fmt: skip
    across = tl.cdiv(columns, block_columns)
    row = (tl.program_id(0) // across).to(tl.int64) * block_rows + tl.arange(0, block_rows)
    column = (tl.program_id(0) % across).to(tl.int64) * block_columns + tl.arange(0, block_columns)
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    here = row[:, None] * columns + column[None, :]
    numbers = tl.load(matrix_at + here, mask=inside, other=0.0).to(tl.float32) * tl.load(scale_at)
    small = numbers.to(turned_at.dtype.element_ty)
    if both:
        tl.store(straight_at + here, small, mask=inside)
    tl.store(turned_at + column[:, None] * rows + row[None, :], tl.trans(small), mask=tl.trans(inside))


@triton.jit
def _silu_mul(gate, up, kind: tl.constexpr):  # type: ignore[no-untyped-def]
    """silu(gate) · up, rounded to 16 bits as it would be if it were kept"""
    return (gate * tl.sigmoid(gate) * up).to(kind).to(tl.float32)


@triton.jit
def _silu_mul_backward(d_h, gate, up, kind: tl.constexpr):  # type: ignore[no-untyped-def]
    sigmoid = tl.sigmoid(gate)
    silu = gate * sigmoid
    d_gate = (d_h * up * (sigmoid + silu * (1 - sigmoid))).to(kind).to(tl.float32)
    return d_gate, (d_h * silu).to(kind).to(tl.float32), (silu * up).to(kind).to(tl.float32)


@triton.jit
def _max_with_nan(a, b):  # type: ignore[no-untyped-def]
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _silu_mul_amax_kernel(gate_at, up_at, largest_at, count, block: tl.constexpr, at_once: tl.constexpr):  # type: ignore[no-untyped-def]
    """The largest of silu(gate) · up without signs, one for each program."""
    first = tl.program_id(0).to(tl.int64) * block
    largest = tl.zeros((at_once,), tl.float32)
    for start in range(0, block, at_once):
        at = first + start + tl.arange(0, at_once)
        gate = tl.load(gate_at + at, mask=at < count, other=0.0)
        up = tl.load(up_at + at, mask=at < count, other=0.0)
        h = _silu_mul(gate.to(tl.float32), up.to(tl.float32), gate.dtype)
        largest = _max_with_nan(largest, tl.abs(h))
    tl.store(largest_at + tl.program_id(0), tl.reduce(largest, 0, _max_with_nan))


@triton.jit
def _silu_mul_cast_kernel(gate_at, up_at, scale_at, h_at, count, block: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    gate = tl.load(gate_at + at, mask=at < count, other=0.0)
    up = tl.load(up_at + at, mask=at < count, other=0.0)
    h = _silu_mul(gate.to(tl.float32), up.to(tl.float32), gate.dtype) * tl.load(scale_at)
    tl.store(h_at + at, h.to(h_at.dtype.element_ty), mask=at < count)


@triton.jit
def _silu_mul_backward_amax_kernel(  # type: ignore[no-untyped-def]
    d_h_at, gate_at, up_at, largest_at, count, block: tl.constexpr, at_once: tl.constexpr
):
    """The largest of d gate, and behind all of those the largest of d up."""
    first = tl.program_id(0).to(tl.int64) * block
    largest_gate = tl.zeros((at_once,), tl.float32)
    largest_up = tl.zeros((at_once,), tl.float32)
    for start in range(0, block, at_once):
        at = first + start + tl.arange(0, at_once)
        gate = tl.load(gate_at + at, mask=at < count, other=0.0)
        up = tl.load(up_at + at, mask=at < count, other=0.0)
        d_h = tl.load(d_h_at + at, mask=at < count, other=0.0)
        d_gate, d_up, _ = _silu_mul_backward(d_h.to(tl.float32), gate.to(tl.float32), up.to(tl.float32), gate.dtype)
        largest_gate = _max_with_nan(largest_gate, tl.abs(d_gate))
        largest_up = _max_with_nan(largest_up, tl.abs(d_up))
    tl.store(largest_at + tl.program_id(0), tl.reduce(largest_gate, 0, _max_with_nan))
    tl.store(largest_at + tl.num_programs(0) + tl.program_id(0), tl.reduce(largest_up, 0, _max_with_nan))


@triton.jit
def _silu_mul_backward_cast_kernel(  # type: ignore[no-untyped-def]
    d_h_at, gate_at, up_at, h_scale_at, gate_scale_at, up_scale_at,
    d_gate_at, d_gate_turned_at, d_up_at, d_up_turned_at, h_turned_at, rows, columns,
    block_rows: tl.constexpr, block_columns: tl.constexpr,
):  # fmt: skip
    across = tl.cdiv(columns, block_columns)
    row = (tl.program_id(0) // across).to(tl.int64) * block_rows + tl.arange(0, block_rows)
    column = (tl.program_id(0) % across).to(tl.int64) * block_columns + tl.arange(0, block_columns)
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    here = row[:, None] * columns + column[None, :]
    there = column[:, None] * rows + row[None, :]
    turned_inside = tl.trans(inside)
    gate = tl.load(gate_at + here, mask=inside, other=0.0)
    up = tl.load(up_at + here, mask=inside, other=0.0)
    d_h = tl.load(d_h_at + here, mask=inside, other=0.0)
    d_gate, d_up, h = _silu_mul_backward(d_h.to(tl.float32), gate.to(tl.float32), up.to(tl.float32), gate.dtype)
    small_gate = (d_gate * tl.load(gate_scale_at)).to(d_gate_at.dtype.element_ty)
    small_up = (d_up * tl.load(up_scale_at)).to(d_up_at.dtype.element_ty)
    small_h = (h * tl.load(h_scale_at)).to(h_turned_at.dtype.element_ty)
    tl.store(d_gate_at + here, small_gate, mask=inside)
    tl.store(d_up_at + here, small_up, mask=inside)
    tl.store(d_gate_turned_at + there, tl.trans(small_gate), mask=turned_inside)
    tl.store(d_up_turned_at + there, tl.trans(small_up), mask=turned_inside)
    tl.store(h_turned_at + there, tl.trans(small_h), mask=turned_inside)


def cast(matrix: Tensor, scale: Tensor, small: Tensor) -> None:
    """A contiguous matrix times `scale`, in 8 bits, into `small`."""
    count = matrix.numel()
    if count:
        _cast_kernel[(triton.cdiv(count, _ELEMENTWISE_BLOCK),)](
            matrix, scale, small, count, block=_ELEMENTWISE_BLOCK, num_warps=4
        )


def cast_transposed(matrix: Tensor, scale: Tensor, turned: Tensor, straight: Tensor | None = None) -> None:
    """A contiguous [T, I] times `scale`, in 8 bits, into `turned` [I, T] and, if wanted, into `straight` [T, I]."""
    if matrix.numel():
        _cast_transposed_kernel[(_count_tiles(matrix, _TILE_ROWS, _TILE_COLUMNS),)](
            matrix, scale, turned, turned if straight is None else straight, *matrix.shape,
            both=straight is not None, block_rows=_TILE_ROWS, block_columns=_TILE_COLUMNS, num_warps=_TILE_WARPS,
        )  # fmt: skip


def silu_mul_amax(gate: Tensor, up: Tensor) -> Tensor:
    """The largest numbers of parts of silu(gate) · up, without signs; all contiguous [T, F]."""
    programs = triton.cdiv(gate.numel(), _AMAX_BLOCK)
    largest = torch.empty(programs, dtype=torch.float32, device=gate.device)
    _silu_mul_amax_kernel[(programs,)](
        gate, up, largest, gate.numel(), block=_AMAX_BLOCK, at_once=_ELEMENTWISE_BLOCK, num_warps=8
    )
    return largest


def silu_mul_cast(gate: Tensor, up: Tensor, scale: Tensor, h: Tensor) -> None:
    """silu(gate) · up times `scale` into `h`, in 8 bits."""
    _silu_mul_cast_kernel[(triton.cdiv(gate.numel(), _ELEMENTWISE_BLOCK),)](
        gate, up, scale, h, gate.numel(), block=_ELEMENTWISE_BLOCK, num_warps=8
    )


def silu_mul_backward_amax(d_h: Tensor, gate: Tensor, up: Tensor) -> Tensor:
    """[2, parts]: the largest numbers of d gate and of d up, without signs."""
    programs = triton.cdiv(gate.numel(), _AMAX_BLOCK)
    largest = torch.empty(2, programs, dtype=torch.float32, device=gate.device)
    _silu_mul_backward_amax_kernel[(programs,)](
        d_h, gate, up, largest, gate.numel(), block=_AMAX_BLOCK, at_once=_ELEMENTWISE_BLOCK, num_warps=8
    )
    return largest


def silu_mul_backward_cast(
    d_h: Tensor, gate: Tensor, up: Tensor, h_scale: Tensor, gate_scale: Tensor, up_scale: Tensor,
    d_gate: Tensor, d_gate_turned: Tensor, d_up: Tensor, d_up_turned: Tensor, h_turned: Tensor,
) -> None:  # fmt: skip
    """d gate and d up in 8 bits, [T, F] and [F, T], and silu(gate) · up, [F, T]."""
    _silu_mul_backward_cast_kernel[(_count_tiles(gate, _SILU_MUL_ROWS, _SILU_MUL_COLUMNS),)](
        d_h, gate, up, h_scale, gate_scale, up_scale, d_gate, d_gate_turned, d_up, d_up_turned, h_turned, *gate.shape,
        block_rows=_SILU_MUL_ROWS, block_columns=_SILU_MUL_COLUMNS, num_warps=_SILU_MUL_WARPS,
    )  # fmt: skip


def _count_tiles(matrix: Tensor, rows: int, columns: int) -> int:
    return triton.cdiv(matrix.shape[0], rows) * triton.cdiv(matrix.shape[1], columns)
