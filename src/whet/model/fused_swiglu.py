"""The same as `swiglu` in a Triton kernel each way: every wide matrix is read once and written once.

What adapters add is made tile by tile from thin matrices, so it is never written.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from whet.model.swiglu import Middle

_ROWS, _COLUMNS, _WARPS = 32, 64, 4
_MOST_RANK = 64  # of a thin product at a time; the least that tensor cores take is 16


@triton.jit
def _left(at, row_step, row, rows, start, rank: tl.constexpr, block: tl.constexpr):  # type: ignore[no-untyped-def]
    """[rows, block] of a thin matrix [rows, rank]"""
    lane = start + tl.arange(0, block)
    known = (row < rows)[:, None] & (lane < rank)[None, :]
    return tl.load(at + row[:, None] * row_step + lane[None, :], mask=known, other=0.0)


@triton.jit
def _right(  # type: ignore[no-untyped-def]
    at, column_step, lane_step, column, columns, start, rank: tl.constexpr, block: tl.constexpr
):
    """[block, columns] of a thin matrix [rank, columns], which may lie in memory either way"""
    lane = start + tl.arange(0, block)
    known = (column < columns)[None, :] & (lane < rank)[:, None]
    return tl.load(at + column[None, :] * column_step + lane[:, None] * lane_step, mask=known, other=0.0)


@triton.jit
def _add_rest(  # type: ignore[no-untyped-def]
    total, left_at, left_row, right_at, right_column, right_lane, row, rows, column, columns,
    rank: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    """total + left · right beyond the first `block` of their rank"""
    for start in tl.static_range(block, rank, block):
        left = _left(left_at, left_row, row, rows, start, rank, block)
        right = _right(right_at, right_column, right_lane, column, columns, start, rank, block)
        total = tl.dot(left, right, total)
    return total


@triton.jit
def _forward(  # type: ignore[no-untyped-def]
    gate_at, up_at, thin_gate_at, thin_up_at, b_gate_at, b_up_at, h_at,
    thin_gate_row, thin_up_row, rows, columns,
    rank_gate: tl.constexpr, rank_up: tl.constexpr, block_gate: tl.constexpr, block_up: tl.constexpr,
    block_rows: tl.constexpr, block_columns: tl.constexpr,
):  # fmt: skip
    """One program, one tile of h. All that is read is asked for at first, so that memory is waited for once."""
    across = tl.cdiv(columns, block_columns)
    row = (tl.program_id(0) // across).to(tl.int64) * block_rows + tl.arange(0, block_rows)
    column = (tl.program_id(0) % across) * block_columns + tl.arange(0, block_columns)
    here = row[:, None] * columns + column[None, :]
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    gate = tl.load(gate_at + here, mask=inside, other=0.0)
    up = tl.load(up_at + here, mask=inside, other=0.0)
    thin_gate = _left(thin_gate_at, thin_gate_row, row, rows, 0, rank_gate, block_gate)
    b_gate = _right(b_gate_at, rank_gate, 1, column, columns, 0, rank_gate, block_gate)
    thin_up = _left(thin_up_at, thin_up_row, row, rows, 0, rank_up, block_up)
    b_up = _right(b_up_at, rank_up, 1, column, columns, 0, rank_up, block_up)
    gate = tl.dot(thin_gate, b_gate, gate.to(tl.float32))
    up = tl.dot(thin_up, b_up, up.to(tl.float32))
    gate = _add_rest(
        gate, thin_gate_at, thin_gate_row, b_gate_at, rank_gate, 1, row, rows, column, columns, rank_gate, block_gate
    )
    up = _add_rest(up, thin_up_at, thin_up_row, b_up_at, rank_up, 1, row, rows, column, columns, rank_up, block_up)
    tl.store(h_at + here, (gate * tl.sigmoid(gate) * up).to(h_at.dtype.element_ty), mask=inside)


@triton.jit
def _backward(  # type: ignore[no-untyped-def]
    d_h_at, gate_at, up_at, thin_gate_at, thin_up_at, b_gate_at, b_up_at, d_thin_at, a_down_at,
    d_gate_at, d_up_at, h_at, thin_gate_row, thin_up_row, rows, columns,
    rank_gate: tl.constexpr, rank_up: tl.constexpr, rank_down: tl.constexpr,
    block_gate: tl.constexpr, block_up: tl.constexpr, block_down: tl.constexpr,
    block_rows: tl.constexpr, block_columns: tl.constexpr,
):  # fmt: skip
    """One program, one tile. d_up may be written where d_h stands: a program reads its tile before."""
    across = tl.cdiv(columns, block_columns)
    row = (tl.program_id(0) // across).to(tl.int64) * block_rows + tl.arange(0, block_rows)
    column = (tl.program_id(0) % across) * block_columns + tl.arange(0, block_columns)
    here = row[:, None] * columns + column[None, :]
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    gate = tl.load(gate_at + here, mask=inside, other=0.0)
    up = tl.load(up_at + here, mask=inside, other=0.0)
    d_h = tl.load(d_h_at + here, mask=inside, other=0.0)
    thin_gate = _left(thin_gate_at, thin_gate_row, row, rows, 0, rank_gate, block_gate)
    b_gate = _right(b_gate_at, rank_gate, 1, column, columns, 0, rank_gate, block_gate)
    thin_up = _left(thin_up_at, thin_up_row, row, rows, 0, rank_up, block_up)
    b_up = _right(b_up_at, rank_up, 1, column, columns, 0, rank_up, block_up)
    d_thin = _left(d_thin_at, rank_down, row, rows, 0, rank_down, block_down)
    a_down = _right(a_down_at, 1, columns, column, columns, 0, rank_down, block_down)
    gate = tl.dot(thin_gate, b_gate, gate.to(tl.float32))
    up = tl.dot(thin_up, b_up, up.to(tl.float32))
    d_h = tl.dot(d_thin, a_down, d_h.to(tl.float32))
    gate = _add_rest(
        gate, thin_gate_at, thin_gate_row, b_gate_at, rank_gate, 1, row, rows, column, columns, rank_gate, block_gate
    )
    up = _add_rest(up, thin_up_at, thin_up_row, b_up_at, rank_up, 1, row, rows, column, columns, rank_up, block_up)
    d_h = _add_rest(d_h, d_thin_at, rank_down, a_down_at, 1, columns, row, rows, column, columns, rank_down, block_down)
    sigmoid = tl.sigmoid(gate)
    silu = gate * sigmoid
    kind = d_gate_at.dtype.element_ty
    tl.store(d_gate_at + here, (d_h * up * (sigmoid + silu * (1 - sigmoid))).to(kind), mask=inside)
    tl.store(h_at + here, (silu * up).to(kind), mask=inside)
    tl.store(d_up_at + here, (d_h * silu).to(kind), mask=inside)


def swiglu_triton(middle: Middle) -> Tensor:
    """See `swiglu`; for 16-bit numbers, computed in fp32."""
    h = torch.empty_like(middle.gate0)
    if h.numel():
        _forward[_grid(h)](
            *middle, h, middle.thin_gate.stride(0), middle.thin_up.stride(0), *h.shape,
            rank_gate=middle.b_gate.shape[1], rank_up=middle.b_up.shape[1],
            block_gate=_block(middle.b_gate.shape[1]), block_up=_block(middle.b_up.shape[1]),
            block_rows=_ROWS, block_columns=_COLUMNS, num_warps=_WARPS,
        )  # fmt: skip
    return h


def swiglu_triton_backward(
    d_h0: Tensor, d_thin: Tensor, a_down: Tensor, middle: Middle
) -> tuple[Tensor, Tensor, Tensor]:
    """See `Backward`; d up stands where d_h0 stood."""
    d_gate, h = torch.empty_like(middle.gate0), torch.empty_like(middle.gate0)
    if h.numel():
        _backward[_grid(h)](
            d_h0, *middle, d_thin, a_down, d_gate, d_h0, h,
            middle.thin_gate.stride(0), middle.thin_up.stride(0), *h.shape,
            rank_gate=middle.b_gate.shape[1], rank_up=middle.b_up.shape[1], rank_down=len(a_down),
            block_gate=_block(middle.b_gate.shape[1]), block_up=_block(middle.b_up.shape[1]),
            block_down=_block(len(a_down)), block_rows=_ROWS, block_columns=_COLUMNS, num_warps=_WARPS,
        )  # fmt: skip
    return d_gate, d_h0, h


def _grid(h: Tensor) -> tuple[int]:
    return (triton.cdiv(h.shape[0], _ROWS) * triton.cdiv(h.shape[1], _COLUMNS),)


def _block(rank: int) -> int:
    return min(_MOST_RANK, max(16, triton.next_power_of_2(rank)))
