"""SwiGLU with LoRA as Triton kernels, forward and backward: the definition is in `whet.model.lora.swiglu`.

Every [T, F] matrix is read once and written once. The adapters' contribution is computed tile by tile from low-rank
matrices and never written; while a tile is in registers, it is also multiplied with the low-rank matrices that need it.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from whet.model.lora.low_rank import matmul_precise
from whet.model.lora.swiglu import SwigluGradients, SwigluInputs

_MAX_RANK_BLOCK = 64  # ranks of a low-rank product at a time; tensor cores need at least 16
_MAX_RANK_OVER_ROWS = 32  # for higher ranks, the partial sums would be larger than the matrix they save


class _SwigluTiles(NamedTuple):
    """Tile size of the [T, F] matrices, and how tiles are assigned to programs."""

    rows: int
    columns: int
    segments: int
    """Programs that share a row of tiles; 0: one tile for each program."""
    stages: int

    def program_columns(self, columns: int) -> int:
        """Columns for each program."""
        whole = triton.cdiv(columns, self.segments) if self.segments else self.columns
        return triton.cdiv(whole, self.columns) * self.columns


_TILES_BY_RANK = {32: _SwigluTiles(64, 64, 7, 3), _MAX_RANK_BLOCK: _SwigluTiles(64, 64, 7, 2)}
"""By largest rank: tiles of kernels that also compute low-rank products."""
_TILES_HIGH_RANK = _SwigluTiles(32, 64, 0, 1)
"""Without low-rank products: for higher ranks, the accumulators would not fit into registers."""
_SWIGLU_WARPS = 4
_REDUCE_BLOCK = 1024  # elements for each program that sums partial results


@triton.jit
def _load_left(ptr, row_stride, row, rows, start, rank: tl.constexpr, block: tl.constexpr):  # type: ignore[no-untyped-def]
    """[rows, block] of a low-rank matrix [rows, rank]"""
    rank_index = start + tl.arange(0, block)
    mask = (row < rows)[:, None] & (rank_index < rank)[None, :]
    return tl.load(ptr + row[:, None] * row_stride + rank_index[None, :], mask=mask, other=0.0)


@triton.jit
def _load_right(  # type: ignore[no-untyped-def]
    ptr, column_stride, rank_stride, column, columns, start, rank: tl.constexpr, block: tl.constexpr
):
    """[block, columns] of a low-rank matrix [rank, columns] with any strides"""
    rank_index = start + tl.arange(0, block)
    mask = (column < columns)[None, :] & (rank_index < rank)[:, None]
    return tl.load(ptr + column[None, :] * column_stride + rank_index[:, None] * rank_stride, mask=mask, other=0.0)


@triton.jit
def _add_remaining_rank(  # type: ignore[no-untyped-def]
    total, left_ptr, left_row_stride, right_ptr, right_column_stride, right_rank_stride, row, rows, column, columns,
    rank: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    """total + left · right over the ranks after the first `block`"""
    for start in tl.static_range(block, rank, block):
        left = _load_left(left_ptr, left_row_stride, row, rows, start, rank, block)
        right = _load_right(right_ptr, right_column_stride, right_rank_stride, column, columns, start, rank, block)
        total = tl.dot(left, right, total)
    return total


@triton.jit
def _store_partial(ptr, rank_offset, ranks, row, rows, rank: tl.constexpr, block: tl.constexpr, total):  # type: ignore[no-untyped-def]
    """Store this program's partial product into its ranks of [programs of a row, rows, ranks]"""
    rank_index = tl.arange(0, block)
    mask = (row < rows)[:, None] & (rank_index < rank)[None, :]
    offset = (tl.program_id(1).to(tl.int64) * rows + row)[:, None] * ranks + rank_offset + rank_index[None, :]
    tl.store(ptr + offset, total, mask=mask)


@triton.jit
def _store_partial_transposed(ptr, column, columns, rank: tl.constexpr, block: tl.constexpr, total):  # type: ignore[no-untyped-def]
    """Store these rows' partial product [columns, rank] into [programs of a column, rank, columns]"""
    rank_index = tl.arange(0, block)
    mask = (column < columns)[:, None] & (rank_index < rank)[None, :]
    offset = (tl.program_id(0).to(tl.int64) * rank + rank_index)[None, :] * columns + column[:, None]
    tl.store(ptr + offset, total, mask=mask)


@triton.jit
def _swiglu_forward_kernel(  # type: ignore[no-untyped-def]
    gate_ptr, up_ptr, xa_gate_ptr, xa_up_ptr, b_gate_ptr, b_up_ptr, a_down_ptr, h_ptr, partials_ptr,
    xa_gate_row_stride, xa_up_row_stride, rows, columns,
    rank_gate: tl.constexpr, rank_up: tl.constexpr, rank_down: tl.constexpr,
    block_gate: tl.constexpr, block_up: tl.constexpr, block_down: tl.constexpr,
    block_rows: tl.constexpr, block_columns: tl.constexpr, program_columns: tl.constexpr, stages: tl.constexpr,
    with_partials: tl.constexpr,
):  # fmt: skip
    """One program for some tiles of a row. All loads of a tile come first, so that their latencies overlap."""
    row = tl.program_id(0).to(tl.int64) * block_rows + tl.arange(0, block_rows)
    xa_gate = _load_left(xa_gate_ptr, xa_gate_row_stride, row, rows, 0, rank_gate, block_gate)
    xa_up = _load_left(xa_up_ptr, xa_up_row_stride, row, rows, 0, rank_up, block_up)
    if with_partials:
        xa_down = tl.zeros((block_rows, block_down), tl.float32)
    for start in tl.range(0, program_columns, block_columns, num_stages=stages):
        column = tl.program_id(1) * program_columns + start + tl.arange(0, block_columns)
        offset = row[:, None] * columns + column[None, :]
        mask = (row < rows)[:, None] & (column < columns)[None, :]
        gate = tl.load(gate_ptr + offset, mask=mask, other=0.0)
        up = tl.load(up_ptr + offset, mask=mask, other=0.0)
        b_gate = _load_right(b_gate_ptr, rank_gate, 1, column, columns, 0, rank_gate, block_gate)
        b_up = _load_right(b_up_ptr, rank_up, 1, column, columns, 0, rank_up, block_up)
        if with_partials:
            a_down = _load_right(a_down_ptr, 1, columns, column, columns, 0, rank_down, block_down)
        gate = tl.dot(xa_gate, b_gate, gate.to(tl.float32))
        up = tl.dot(xa_up, b_up, up.to(tl.float32))
        gate = _add_remaining_rank(
            gate, xa_gate_ptr, xa_gate_row_stride, b_gate_ptr, rank_gate, 1, row, rows, column, columns, rank_gate,
            block_gate,
        )  # fmt: skip
        up = _add_remaining_rank(
            up, xa_up_ptr, xa_up_row_stride, b_up_ptr, rank_up, 1, row, rows, column, columns, rank_up, block_up
        )
        h = (gate * tl.sigmoid(gate) * up).to(h_ptr.dtype.element_ty)
        tl.store(h_ptr + offset, h, mask=mask)
        if with_partials:
            xa_down = tl.dot(h, tl.trans(a_down), xa_down)
    if with_partials:
        _store_partial(partials_ptr, 0, rank_down, row, rows, rank_down, block_down, xa_down)


@triton.jit
def _swiglu_backward_kernel(  # type: ignore[no-untyped-def]
    d_h_ptr, gate_ptr, up_ptr, xa_gate_ptr, xa_up_ptr, b_gate_ptr, b_up_ptr, d_xa_ptr, a_down_ptr,
    d_gate_ptr, d_up_ptr, h_ptr, d_a_ptr, partials_ptr, xa_gate_row_stride, xa_up_row_stride, rows, columns,
    rank_gate: tl.constexpr, rank_up: tl.constexpr, rank_down: tl.constexpr,
    block_gate: tl.constexpr, block_up: tl.constexpr, block_down: tl.constexpr,
    block_rows: tl.constexpr, block_columns: tl.constexpr, program_columns: tl.constexpr, stages: tl.constexpr,
    with_partials: tl.constexpr, reduce_over_rows: tl.constexpr,
):  # fmt: skip
    """One program for some tiles of a row. d_up may overwrite d_h: a program reads its tile before it writes it.
    `reduce_over_rows`: compute d_a from the tile of h too, so that h is not written."""
    row = tl.program_id(0).to(tl.int64) * block_rows + tl.arange(0, block_rows)
    xa_gate = _load_left(xa_gate_ptr, xa_gate_row_stride, row, rows, 0, rank_gate, block_gate)
    xa_up = _load_left(xa_up_ptr, xa_up_row_stride, row, rows, 0, rank_up, block_up)
    d_xa = _load_left(d_xa_ptr, rank_down, row, rows, 0, rank_down, block_down)
    dtype = d_gate_ptr.dtype.element_ty
    if with_partials:
        d_xa_gate = tl.zeros((block_rows, block_gate), tl.float32)
        d_xa_up = tl.zeros((block_rows, block_up), tl.float32)
        xa_down = tl.zeros((block_rows, block_down), tl.float32)
    for start in tl.range(0, program_columns, block_columns, num_stages=stages):
        column = tl.program_id(1) * program_columns + start + tl.arange(0, block_columns)
        offset = row[:, None] * columns + column[None, :]
        mask = (row < rows)[:, None] & (column < columns)[None, :]
        gate = tl.load(gate_ptr + offset, mask=mask, other=0.0)
        up = tl.load(up_ptr + offset, mask=mask, other=0.0)
        d_h = tl.load(d_h_ptr + offset, mask=mask, other=0.0)
        b_gate = _load_right(b_gate_ptr, rank_gate, 1, column, columns, 0, rank_gate, block_gate)
        b_up = _load_right(b_up_ptr, rank_up, 1, column, columns, 0, rank_up, block_up)
        a_down = _load_right(a_down_ptr, 1, columns, column, columns, 0, rank_down, block_down)
        gate = tl.dot(xa_gate, b_gate, gate.to(tl.float32))
        up = tl.dot(xa_up, b_up, up.to(tl.float32))
        d_h = tl.dot(d_xa, a_down, d_h.to(tl.float32))
        gate = _add_remaining_rank(
            gate, xa_gate_ptr, xa_gate_row_stride, b_gate_ptr, rank_gate, 1, row, rows, column, columns, rank_gate,
            block_gate,
        )  # fmt: skip
        up = _add_remaining_rank(
            up, xa_up_ptr, xa_up_row_stride, b_up_ptr, rank_up, 1, row, rows, column, columns, rank_up, block_up
        )
        d_h = _add_remaining_rank(
            d_h, d_xa_ptr, rank_down, a_down_ptr, 1, columns, row, rows, column, columns, rank_down, block_down
        )
        sigmoid = tl.sigmoid(gate)
        silu = gate * sigmoid
        d_gate = (d_h * up * (sigmoid + silu * (1 - sigmoid))).to(dtype)
        d_up = (d_h * silu).to(dtype)
        h = (silu * up).to(dtype)
        tl.store(d_gate_ptr + offset, d_gate, mask=mask)
        tl.store(d_up_ptr + offset, d_up, mask=mask)
        if reduce_over_rows:
            d_a = tl.dot(tl.trans(h), d_xa)
            _store_partial_transposed(d_a_ptr, column, columns, rank_down, block_down, d_a)
        else:
            tl.store(h_ptr + offset, h, mask=mask)
        if with_partials:
            d_xa_gate = tl.dot(d_gate, tl.trans(b_gate), d_xa_gate)
            d_xa_up = tl.dot(d_up, tl.trans(b_up), d_xa_up)
            xa_down = tl.dot(h, tl.trans(a_down), xa_down)
    if with_partials:
        ranks: tl.constexpr = rank_gate + rank_up + rank_down
        _store_partial(partials_ptr, 0, ranks, row, rows, rank_gate, block_gate, d_xa_gate)
        _store_partial(partials_ptr, rank_gate, ranks, row, rows, rank_up, block_up, d_xa_up)
        _store_partial(partials_ptr, rank_gate + rank_up, ranks, row, rows, rank_down, block_down, xa_down)


@triton.jit
def _reduce_kernel(parts_ptr, total_ptr, count, parts, block: tl.constexpr):  # type: ignore[no-untyped-def]
    """Sum [parts, count] over parts, rounded once"""
    offset = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    mask = offset < count
    total = tl.zeros((block,), tl.float32)
    part_ptr = parts_ptr + offset
    for _ in tl.range(0, parts, loop_unroll_factor=8):
        total += tl.load(part_ptr, mask=mask, other=0.0)
        part_ptr += count
    tl.store(total_ptr + offset, total.to(total_ptr.dtype.element_ty), mask=mask)


def lora_swiglu_triton(inputs: SwigluInputs, a_down: Tensor) -> tuple[Tensor, Tensor]:
    """`lora_swiglu` for 16-bit inputs, computed in fp32."""
    h, rank = torch.empty_like(inputs.gate0), len(a_down)
    tiles, partials = _partition(inputs, a_down, rank)
    if h.numel():
        _swiglu_forward_kernel[_swiglu_grid(h, tiles)](
            *inputs, a_down, h, h if partials is None else partials, inputs.xa_gate.stride(0), inputs.xa_up.stride(0),
            *h.shape, **_swiglu_launch_options(inputs, a_down, tiles, partials),
        )  # fmt: skip
    return h, (h @ a_down.T if partials is None else _reduce_partials(partials, h.dtype))


def lora_swiglu_triton_backward(d_h0: Tensor, d_xa: Tensor, a_down: Tensor, inputs: SwigluInputs) -> SwigluGradients:
    """`lora_swiglu_backward` for 16-bit inputs. d_up overwrites d_h0."""
    d_gate, rank = torch.empty_like(inputs.gate0), len(a_down)
    inner = inputs.b_gate.shape[1] + inputs.b_up.shape[1]
    tiles, partials = _partition(inputs, a_down, inner + rank)
    reduce_over_rows = partials is not None and rank <= _MAX_RANK_OVER_ROWS
    programs = _swiglu_grid(d_gate, tiles)
    h = d_gate if reduce_over_rows else torch.empty_like(d_gate)
    d_a = d_gate.new_empty(programs[0] if reduce_over_rows else 0, rank, d_gate.shape[1], dtype=torch.float32)
    if d_gate.numel():
        _swiglu_backward_kernel[programs](
            d_h0, *inputs, d_xa, a_down, d_gate, d_h0, h, d_a, d_gate if partials is None else partials,
            inputs.xa_gate.stride(0), inputs.xa_up.stride(0), *d_gate.shape,
            **_swiglu_launch_options(inputs, a_down, tiles, partials), reduce_over_rows=reduce_over_rows,
        )  # fmt: skip
    if partials is None:
        xa = torch.cat([d_gate @ inputs.b_gate, d_h0 @ inputs.b_up, h @ a_down.T], dim=1)
    else:
        xa = _reduce_partials(partials, d_gate.dtype)
    d_a_down = _reduce_partials(d_a, torch.float32) if reduce_over_rows else matmul_precise(d_xa.T, h, torch.float32)
    return SwigluGradients(d_gate, d_h0, xa[:, :inner], xa[:, inner:], d_a_down)


def _partition(inputs: SwigluInputs, a_down: Tensor, ranks: int) -> tuple[_SwigluTiles, Tensor | None]:
    """The tiles, and memory for the programs' partial low-rank products, `ranks` wide in all."""
    highest = max(inputs.b_gate.shape[1], inputs.b_up.shape[1], len(a_down))
    tiles = next((tiles for most, tiles in _TILES_BY_RANK.items() if highest <= most), None)
    if tiles is None:
        return _TILES_HIGH_RANK, None
    rows, columns = inputs.gate0.shape
    programs = triton.cdiv(columns, tiles.program_columns(columns))
    return tiles, inputs.gate0.new_empty(programs, rows, ranks, dtype=torch.float32)


def _reduce_partials(parts: Tensor, dtype: torch.dtype) -> Tensor:
    """The sum of the programs' partial results, rounded once."""
    total = torch.empty(parts.shape[1:], dtype=dtype, device=parts.device)
    if total.numel():
        _reduce_kernel[(triton.cdiv(total.numel(), _REDUCE_BLOCK),)](
            parts, total, total.numel(), len(parts), block=_REDUCE_BLOCK
        )
    return total


def _swiglu_grid(h: Tensor, tiles: _SwigluTiles) -> tuple[int, int]:
    return triton.cdiv(h.shape[0], tiles.rows), triton.cdiv(h.shape[1], tiles.program_columns(h.shape[1]))


def _swiglu_launch_options(
    inputs: SwigluInputs, a_down: Tensor, tiles: _SwigluTiles, partials: Tensor | None
) -> dict[str, int | bool]:
    ranks = {"gate": inputs.b_gate.shape[1], "up": inputs.b_up.shape[1], "down": len(a_down)}
    return {
        **{f"rank_{name}": rank for name, rank in ranks.items()},
        **{f"block_{name}": _rank_block(rank) for name, rank in ranks.items()},
        "block_rows": tiles.rows,
        "block_columns": tiles.columns,
        "program_columns": tiles.program_columns(inputs.gate0.shape[1]),
        "stages": tiles.stages,
        "with_partials": partials is not None,
        "num_warps": _SWIGLU_WARPS,
    }


def _rank_block(rank: int) -> int:
    return min(_MAX_RANK_BLOCK, max(16, triton.next_power_of_2(rank)))
