"""Triton kernels of the fused LoRA operators: SwiGLU with adapters, forward and backward."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from whet.model.lora.low_rank import matmul_precise
from whet.model.lora.swiglu import SwigluGradients, SwigluInputs

# The same as `swiglu` in a Triton kernel each way: every wide matrix is read once and written once.
#
# What adapters add is made tile by tile from thin matrices, so it is never written; and while a tile is there, it is
# multiplied with the thin matrices that wait for it, so it is not read again for that.

_MAX_RANK_BLOCK = 64  # of a thin product at a time; the least that tensor cores take is 16
_MAX_RANK_OVER_ROWS = 32  # parts of higher ranks would be larger than the matrix that need not be written


class _SwigluTiles(NamedTuple):
    """How the middle is divided among programs."""

    rows: int
    columns: int
    segments: int
    """Programs that share a row of tiles; 0: each has one tile."""
    stages: int

    def width(self, columns: int) -> int:
        """Columns of one program."""
        whole = triton.cdiv(columns, self.segments) if self.segments else self.columns
        return triton.cdiv(whole, self.columns) * self.columns


_TILES_BY_RANK = {32: _SwigluTiles(64, 64, 7, 3), _MAX_RANK_BLOCK: _SwigluTiles(64, 64, 7, 2)}
"""With products of each tile, up to this rank."""
_TILES_HIGH_RANK = _SwigluTiles(32, 64, 0, 1)
"""Without: of ranks so high that their sums would not fit."""
_SWIGLU_WARPS = 4
_REDUCE_BLOCK = 1024  # numbers of a program that adds up parts


@triton.jit
def _load_left(at, row_step, row, rows, start, rank: tl.constexpr, block: tl.constexpr):  # type: ignore[no-untyped-def]
    """[rows, block] of a thin matrix [rows, rank]"""
    lane = start + tl.arange(0, block)
    known = (row < rows)[:, None] & (lane < rank)[None, :]
    return tl.load(at + row[:, None] * row_step + lane[None, :], mask=known, other=0.0)


@triton.jit
def _load_right(  # type: ignore[no-untyped-def]
    at, column_step, lane_step, column, columns, start, rank: tl.constexpr, block: tl.constexpr
):
    """[block, columns] of a thin matrix [rank, columns], which may lie in memory either way"""
    lane = start + tl.arange(0, block)
    known = (column < columns)[None, :] & (lane < rank)[:, None]
    return tl.load(at + column[None, :] * column_step + lane[:, None] * lane_step, mask=known, other=0.0)


@triton.jit
def _add_remaining_rank(  # type: ignore[no-untyped-def]
    total, left_at, left_row, right_at, right_column, right_lane, row, rows, column, columns,
    rank: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    """total + left · right beyond the first `block` of their rank"""
    for start in tl.static_range(block, rank, block):
        left = _load_left(left_at, left_row, row, rows, start, rank, block)
        right = _load_right(right_at, right_column, right_lane, column, columns, start, rank, block)
        total = tl.dot(left, right, total)
    return total


@triton.jit
def _store_partial(at, lane_first, ranks, row, rows, rank: tl.constexpr, block: tl.constexpr, total):  # type: ignore[no-untyped-def]
    """This program's part of a product, into its columns of [programs of a row, rows, ranks]"""
    lane = tl.arange(0, block)
    known = (row < rows)[:, None] & (lane < rank)[None, :]
    place = (tl.program_id(1).to(tl.int64) * rows + row)[:, None] * ranks + lane_first + lane[None, :]
    tl.store(at + place, total, mask=known)


@triton.jit
def _store_partial_transposed(at, column, columns, rank: tl.constexpr, block: tl.constexpr, total):  # type: ignore[no-untyped-def]
    """These rows' part of a product, [columns, rank] here, into [programs of a column, rank, columns]"""
    lane = tl.arange(0, block)
    known = (column < columns)[:, None] & (lane < rank)[None, :]
    place = (tl.program_id(0).to(tl.int64) * rank + lane)[None, :] * columns + column[:, None]
    tl.store(at + place, total, mask=known)


@triton.jit
def _swiglu_forward_kernel(  # type: ignore[no-untyped-def]
    gate_at, up_at, thin_gate_at, thin_up_at, b_gate_at, b_up_at, a_down_at, h_at, sums_at,
    thin_gate_row, thin_up_row, rows, columns,
    rank_gate: tl.constexpr, rank_up: tl.constexpr, rank_down: tl.constexpr,
    block_gate: tl.constexpr, block_up: tl.constexpr, block_down: tl.constexpr,
    block_rows: tl.constexpr, block_columns: tl.constexpr, width: tl.constexpr, stages: tl.constexpr,
    sums: tl.constexpr,
):  # fmt: skip
    """One program, some tiles of a row. All that a tile needs is asked for at first, so that memory is waited for
    once."""
    row = tl.program_id(0).to(tl.int64) * block_rows + tl.arange(0, block_rows)
    thin_gate = _load_left(thin_gate_at, thin_gate_row, row, rows, 0, rank_gate, block_gate)
    thin_up = _load_left(thin_up_at, thin_up_row, row, rows, 0, rank_up, block_up)
    if sums:
        thin_down = tl.zeros((block_rows, block_down), tl.float32)
    for start in tl.range(0, width, block_columns, num_stages=stages):
        column = tl.program_id(1) * width + start + tl.arange(0, block_columns)
        here = row[:, None] * columns + column[None, :]
        inside = (row < rows)[:, None] & (column < columns)[None, :]
        gate = tl.load(gate_at + here, mask=inside, other=0.0)
        up = tl.load(up_at + here, mask=inside, other=0.0)
        b_gate = _load_right(b_gate_at, rank_gate, 1, column, columns, 0, rank_gate, block_gate)
        b_up = _load_right(b_up_at, rank_up, 1, column, columns, 0, rank_up, block_up)
        if sums:
            a_down = _load_right(a_down_at, 1, columns, column, columns, 0, rank_down, block_down)
        gate = tl.dot(thin_gate, b_gate, gate.to(tl.float32))
        up = tl.dot(thin_up, b_up, up.to(tl.float32))
        gate = _add_remaining_rank(
            gate, thin_gate_at, thin_gate_row, b_gate_at, rank_gate, 1, row, rows, column, columns, rank_gate,
            block_gate,
        )  # fmt: skip
        up = _add_remaining_rank(
            up, thin_up_at, thin_up_row, b_up_at, rank_up, 1, row, rows, column, columns, rank_up, block_up
        )
        h = (gate * tl.sigmoid(gate) * up).to(h_at.dtype.element_ty)
        tl.store(h_at + here, h, mask=inside)
        if sums:
            thin_down = tl.dot(h, tl.trans(a_down), thin_down)
    if sums:
        _store_partial(sums_at, 0, rank_down, row, rows, rank_down, block_down, thin_down)


@triton.jit
def _swiglu_backward_kernel(  # type: ignore[no-untyped-def]
    d_h_at, gate_at, up_at, thin_gate_at, thin_up_at, b_gate_at, b_up_at, d_thin_at, a_down_at,
    d_gate_at, d_up_at, h_at, d_a_at, sums_at, thin_gate_row, thin_up_row, rows, columns,
    rank_gate: tl.constexpr, rank_up: tl.constexpr, rank_down: tl.constexpr,
    block_gate: tl.constexpr, block_up: tl.constexpr, block_down: tl.constexpr,
    block_rows: tl.constexpr, block_columns: tl.constexpr, width: tl.constexpr, stages: tl.constexpr,
    sums: tl.constexpr, over_rows: tl.constexpr,
):  # fmt: skip
    """One program, some tiles of a row. d_up may be written where d_h stands: a program reads its tile before.
    `over_rows`: what h is needed for is made of its tile too, so that h is not written."""
    row = tl.program_id(0).to(tl.int64) * block_rows + tl.arange(0, block_rows)
    thin_gate = _load_left(thin_gate_at, thin_gate_row, row, rows, 0, rank_gate, block_gate)
    thin_up = _load_left(thin_up_at, thin_up_row, row, rows, 0, rank_up, block_up)
    d_thin = _load_left(d_thin_at, rank_down, row, rows, 0, rank_down, block_down)
    kind = d_gate_at.dtype.element_ty
    if sums:
        d_thin_gate = tl.zeros((block_rows, block_gate), tl.float32)
        d_thin_up = tl.zeros((block_rows, block_up), tl.float32)
        thin_down = tl.zeros((block_rows, block_down), tl.float32)
    for start in tl.range(0, width, block_columns, num_stages=stages):
        column = tl.program_id(1) * width + start + tl.arange(0, block_columns)
        here = row[:, None] * columns + column[None, :]
        inside = (row < rows)[:, None] & (column < columns)[None, :]
        gate = tl.load(gate_at + here, mask=inside, other=0.0)
        up = tl.load(up_at + here, mask=inside, other=0.0)
        d_h = tl.load(d_h_at + here, mask=inside, other=0.0)
        b_gate = _load_right(b_gate_at, rank_gate, 1, column, columns, 0, rank_gate, block_gate)
        b_up = _load_right(b_up_at, rank_up, 1, column, columns, 0, rank_up, block_up)
        a_down = _load_right(a_down_at, 1, columns, column, columns, 0, rank_down, block_down)
        gate = tl.dot(thin_gate, b_gate, gate.to(tl.float32))
        up = tl.dot(thin_up, b_up, up.to(tl.float32))
        d_h = tl.dot(d_thin, a_down, d_h.to(tl.float32))
        gate = _add_remaining_rank(
            gate, thin_gate_at, thin_gate_row, b_gate_at, rank_gate, 1, row, rows, column, columns, rank_gate,
            block_gate,
        )  # fmt: skip
        up = _add_remaining_rank(
            up, thin_up_at, thin_up_row, b_up_at, rank_up, 1, row, rows, column, columns, rank_up, block_up
        )
        d_h = _add_remaining_rank(
            d_h, d_thin_at, rank_down, a_down_at, 1, columns, row, rows, column, columns, rank_down, block_down
        )
        sigmoid = tl.sigmoid(gate)
        silu = gate * sigmoid
        d_gate = (d_h * up * (sigmoid + silu * (1 - sigmoid))).to(kind)
        d_up = (d_h * silu).to(kind)
        h = (silu * up).to(kind)
        tl.store(d_gate_at + here, d_gate, mask=inside)
        tl.store(d_up_at + here, d_up, mask=inside)
        if over_rows:
            d_a = tl.dot(tl.trans(h), d_thin)
            _store_partial_transposed(d_a_at, column, columns, rank_down, block_down, d_a)
        else:
            tl.store(h_at + here, h, mask=inside)
        if sums:
            d_thin_gate = tl.dot(d_gate, tl.trans(b_gate), d_thin_gate)
            d_thin_up = tl.dot(d_up, tl.trans(b_up), d_thin_up)
            thin_down = tl.dot(h, tl.trans(a_down), thin_down)
    if sums:
        ranks: tl.constexpr = rank_gate + rank_up + rank_down
        _store_partial(sums_at, 0, ranks, row, rows, rank_gate, block_gate, d_thin_gate)
        _store_partial(sums_at, rank_gate, ranks, row, rows, rank_up, block_up, d_thin_up)
        _store_partial(sums_at, rank_gate + rank_up, ranks, row, rows, rank_down, block_down, thin_down)


@triton.jit
def _reduce_kernel(parts_at, total_at, count, parts, block: tl.constexpr):  # type: ignore[no-untyped-def]
    """The sum of [parts, count], rounded once"""
    place = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    known = place < count
    total = tl.zeros((block,), tl.float32)
    part_at = parts_at + place
    for _ in tl.range(0, parts, loop_unroll_factor=8):
        total += tl.load(part_at, mask=known, other=0.0)
        part_at += count
    tl.store(total_at + place, total.to(total_at.dtype.element_ty), mask=known)


def lora_swiglu_triton(middle: SwigluInputs, a_down: Tensor) -> tuple[Tensor, Tensor]:
    """See `swiglu`; for 16-bit numbers, computed in fp32."""
    h, rank = torch.empty_like(middle.gate0), len(a_down)
    tiles, sums = _partition(middle, a_down, rank)
    if h.numel():
        _swiglu_forward_kernel[_swiglu_grid(h, tiles)](
            *middle, a_down, h, h if sums is None else sums, middle.thin_gate.stride(0), middle.thin_up.stride(0),
            *h.shape, **_swiglu_launch_options(middle, a_down, tiles, sums),
        )  # fmt: skip
    return h, (h @ a_down.T if sums is None else _reduce_partials(sums, h.dtype))


def lora_swiglu_triton_backward(d_h0: Tensor, d_thin: Tensor, a_down: Tensor, middle: SwigluInputs) -> SwigluGradients:
    """See `Backward`; d up stands where d_h0 stood."""
    d_gate, rank = torch.empty_like(middle.gate0), len(a_down)
    inner = middle.b_gate.shape[1] + middle.b_up.shape[1]
    tiles, sums = _partition(middle, a_down, inner + rank)
    over_rows = sums is not None and rank <= _MAX_RANK_OVER_ROWS
    programs = _swiglu_grid(d_gate, tiles)
    h = d_gate if over_rows else torch.empty_like(d_gate)
    d_a = d_gate.new_empty(programs[0] if over_rows else 0, rank, d_gate.shape[1], dtype=torch.float32)
    if d_gate.numel():
        _swiglu_backward_kernel[programs](
            d_h0, *middle, d_thin, a_down, d_gate, d_h0, h, d_a, d_gate if sums is None else sums,
            middle.thin_gate.stride(0), middle.thin_up.stride(0), *d_gate.shape,
            **_swiglu_launch_options(middle, a_down, tiles, sums), over_rows=over_rows,
        )  # fmt: skip
    if sums is None:
        thin = torch.cat([d_gate @ middle.b_gate, d_h0 @ middle.b_up, h @ a_down.T], dim=1)
    else:
        thin = _reduce_partials(sums, d_gate.dtype)
    d_a_down = _reduce_partials(d_a, torch.float32) if over_rows else matmul_precise(d_thin.T, h, torch.float32)
    return SwigluGradients(d_gate, d_h0, thin[:, :inner], thin[:, inner:], d_a_down)


def _partition(middle: SwigluInputs, a_down: Tensor, ranks: int) -> tuple[_SwigluTiles, Tensor | None]:
    """How the middle is divided, and room for the programs' parts of thin products, `ranks` wide altogether."""
    highest = max(middle.b_gate.shape[1], middle.b_up.shape[1], len(a_down))
    tiles = next((tiles for most, tiles in _TILES_BY_RANK.items() if highest <= most), None)
    if tiles is None:
        return _TILES_HIGH_RANK, None
    rows, columns = middle.gate0.shape
    programs = triton.cdiv(columns, tiles.width(columns))
    return tiles, middle.gate0.new_empty(programs, rows, ranks, dtype=torch.float32)


def _reduce_partials(parts: Tensor, dtype: torch.dtype) -> Tensor:
    """What the programs have found, together, added and rounded by one kernel."""
    total = torch.empty(parts.shape[1:], dtype=dtype, device=parts.device)
    if total.numel():
        _reduce_kernel[(triton.cdiv(total.numel(), _REDUCE_BLOCK),)](
            parts, total, total.numel(), len(parts), block=_REDUCE_BLOCK
        )
    return total


def _swiglu_grid(h: Tensor, tiles: _SwigluTiles) -> tuple[int, int]:
    return triton.cdiv(h.shape[0], tiles.rows), triton.cdiv(h.shape[1], tiles.width(h.shape[1]))


def _swiglu_launch_options(
    middle: SwigluInputs, a_down: Tensor, tiles: _SwigluTiles, sums: Tensor | None
) -> dict[str, int | bool]:
    ranks = {"gate": middle.b_gate.shape[1], "up": middle.b_up.shape[1], "down": len(a_down)}
    return {
        **{f"rank_{name}": rank for name, rank in ranks.items()},
        **{f"block_{name}": _rank_block(rank) for name, rank in ranks.items()},
        "block_rows": tiles.rows,
        "block_columns": tiles.columns,
        "width": tiles.width(middle.gate0.shape[1]),
        "stages": tiles.stages,
        "sums": sums is not None,
        "num_warps": _SWIGLU_WARPS,
    }


def _rank_block(rank: int) -> int:
    return min(_MAX_RANK_BLOCK, max(16, triton.next_power_of_2(rank)))
