"""The functions of `steps.py` as Triton kernels: every large matrix is read once and written once.

A program takes a tile of rows of one expert; adapters are multiplied tile by tile and never written. It finds its
expert from the ends of the experts' rows, so that the host need not know them. There are at most S / rows of a tile + G
tiles, and programs without one return at once.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from whet.model.experts import steps as by_torch
from whet.model.experts.steps import Activation, ActivationGradients, SortedRows

MAX_RANK = 128
"""For higher ranks the accumulators would not fit into registers."""
_ROWS = 64
_GATHER_COLUMNS, _ACTIVATE_COLUMNS, _LOW_RANK_COLUMNS, _SUM_COLUMNS, _CAST_COLUMNS = 128, 64, 128, 1024, 16
_CAST_ELEMENTS = 2048
_OUTER_COLUMNS = 128


@triton.jit
def _find_tile(ends_ptr, experts, block_experts: tl.constexpr, block_rows: tl.constexpr):  # type: ignore[no-untyped-def]
    """(expert, first row, end of the expert's rows) of this program's tile; without one, expert is not below
    `experts`."""
    number = tl.program_id(0)
    expert = tl.arange(0, block_experts)
    is_expert = expert < experts
    end = tl.load(ends_ptr + expert, mask=is_expert, other=0)
    start = tl.load(ends_ptr + expert - 1, mask=is_expert & (expert > 0), other=0)
    tiles = tl.where(is_expert, (end - start + block_rows - 1) // block_rows, 0)
    own = tl.sum((tl.cumsum(tiles, 0) <= number).to(tl.int32), 0)
    before = tl.sum(tl.where(expert < own, tiles, 0), 0)
    first = tl.sum(tl.where(expert == own, start, 0), 0) + (number - before) * block_rows
    return own, first, tl.sum(tl.where(expert == own, end, 0), 0)


@triton.jit
def _load_rank(ptr, expert, column, columns, rank: tl.constexpr, block: tl.constexpr):  # type: ignore[no-untyped-def]
    """[block, columns] of an expert's matrix in [experts, rank, columns]"""
    index = tl.arange(0, block)
    offset = (expert.to(tl.int64) * rank + index)[:, None] * columns + column[None, :]
    return tl.load(ptr + offset, mask=(index < rank)[:, None] & (column < columns)[None, :], other=0.0)


@triton.jit
def _load_left(ptr, row, end, rank: tl.constexpr, block: tl.constexpr):  # type: ignore[no-untyped-def]
    """[rows, block] of [S, rank]"""
    index = tl.arange(0, block)
    mask = (row < end)[:, None] & (index < rank)[None, :]
    return tl.load(ptr + row[:, None] * rank + index[None, :], mask=mask, other=0.0)


@triton.jit
def _store_left(ptr, row, end, rank: tl.constexpr, block: tl.constexpr, value):  # type: ignore[no-untyped-def]
    index = tl.arange(0, block)
    mask = (row < end)[:, None] & (index < rank)[None, :]
    tl.store(ptr + row[:, None] * rank + index[None, :], value.to(ptr.dtype.element_ty), mask=mask)


@triton.jit
def _gather_kernel(  # type: ignore[no-untyped-def]
    x_ptr, order_ptr, ends_ptr, right_ptr, out_ptr, low_ptr, choices, experts, columns,
    rank: tl.constexpr, block_rank: tl.constexpr, block_experts: tl.constexpr, block_rows: tl.constexpr,
    block_columns: tl.constexpr, stages: tl.constexpr,
):  # fmt: skip
    expert, first, end = _find_tile(ends_ptr, experts, block_experts, block_rows)
    if expert >= experts:
        return
    row = first.to(tl.int64) + tl.arange(0, block_rows)
    token = (tl.load(order_ptr + row, mask=row < end, other=0) // choices).to(tl.int64)
    if rank > 0:
        low = tl.zeros((block_rows, block_rank), tl.float32)
    for start in tl.range(0, columns, block_columns, num_stages=stages):
        column = start + tl.arange(0, block_columns)
        mask = (row < end)[:, None] & (column < columns)[None, :]
        tile = tl.load(x_ptr + token[:, None] * columns + column[None, :], mask=mask, other=0.0)
        tl.store(out_ptr + row[:, None] * columns + column[None, :], tile, mask=mask)
        if rank > 0:
            right = _load_rank(right_ptr, expert, column, columns, rank, block_rank)
            low = tl.dot(tile, tl.trans(right), low)
    if rank > 0:
        _store_left(low_ptr, row, end, rank, block_rank, low)


@triton.jit
def _gate_and_up(  # type: ignore[no-untyped-def]
    up0_ptr, xa, b_ptr, row, end, expert, start, width,
    rank: tl.constexpr, block_rank: tl.constexpr, interleaved: tl.constexpr, block_rows: tl.constexpr,
    block_columns: tl.constexpr,
):  # fmt: skip
    """gate and up [rows, columns] with their adapter, in fp32, for intermediate columns from `start`."""
    if interleaved:
        column = 2 * start + tl.arange(0, 2 * block_columns)
        mask = (row < end)[:, None] & (column < 2 * width)[None, :]
        both = tl.load(up0_ptr + row[:, None] * 2 * width + column[None, :], mask=mask, other=0.0).to(tl.float32)
        if rank > 0:
            both = tl.dot(xa, _load_rank(b_ptr, expert, column, 2 * width, rank, block_rank), both)
        gate, up = tl.split(tl.reshape(both, (block_rows, block_columns, 2)))
    else:
        column = start + tl.arange(0, block_columns)
        mask = (row < end)[:, None] & (column < width)[None, :]
        offset = row[:, None] * 2 * width + column[None, :]
        gate = tl.load(up0_ptr + offset, mask=mask, other=0.0).to(tl.float32)
        up = tl.load(up0_ptr + offset + width, mask=mask, other=0.0).to(tl.float32)
        if rank > 0:
            gate = tl.dot(xa, _load_half(b_ptr, expert, column, width, 0, rank, block_rank), gate)
            up = tl.dot(xa, _load_half(b_ptr, expert, column, width, width, rank, block_rank), up)
    return gate, up


@triton.jit
def _load_half(ptr, expert, column, width, shift, rank: tl.constexpr, block: tl.constexpr):  # type: ignore[no-untyped-def]
    """[block, columns] of the gate's half (shift 0) or the up half of an expert's matrix in [experts, rank, 2 width]"""
    index = tl.arange(0, block)
    offset = (expert.to(tl.int64) * rank + index)[:, None] * 2 * width + shift + column[None, :]
    return tl.load(ptr + offset, mask=(index < rank)[:, None] & (column < width)[None, :], other=0.0)


@triton.jit
def _activate_kernel(  # type: ignore[no-untyped-def]
    up0_ptr, xa_ptr, b_up_ptr, a_down_ptr, ends_ptr, h_ptr, ha_ptr, experts, width, slope, limit, shift,
    up_rank: tl.constexpr, up_block: tl.constexpr, down_rank: tl.constexpr, down_block: tl.constexpr,
    interleaved: tl.constexpr, limited: tl.constexpr, block_experts: tl.constexpr, block_rows: tl.constexpr,
    block_columns: tl.constexpr, stages: tl.constexpr,
):  # fmt: skip
    expert, first, end = _find_tile(ends_ptr, experts, block_experts, block_rows)
    if expert >= experts:
        return
    row = first.to(tl.int64) + tl.arange(0, block_rows)
    xa = _load_left(xa_ptr, row, end, up_rank, up_block) if up_rank > 0 else 0.0
    if down_rank > 0:
        ha = tl.zeros((block_rows, down_block), tl.float32)
    for start in tl.range(0, width, block_columns, num_stages=stages):
        gate, up = _gate_and_up(
            up0_ptr, xa, b_up_ptr, row, end, expert, start, width, up_rank, up_block, interleaved, block_rows,
            block_columns,
        )  # fmt: skip
        if limited:
            gate = tl.minimum(gate, limit)
            up = tl.minimum(tl.maximum(up, -limit), limit)
        h = (gate * tl.sigmoid(slope * gate) * (up + shift)).to(h_ptr.dtype.element_ty)
        column = start + tl.arange(0, block_columns)
        mask = (row < end)[:, None] & (column < width)[None, :]
        tl.store(h_ptr + row[:, None] * width + column[None, :], h, mask=mask)
        if down_rank > 0:
            a = _load_rank(a_down_ptr, expert, column, width, down_rank, down_block)
            ha = tl.dot(h, tl.trans(a), ha)
    if down_rank > 0:
        _store_left(ha_ptr, row, end, down_rank, down_block, ha)


@triton.jit
def _activate_backward_kernel(  # type: ignore[no-untyped-def]
    d_h_ptr, d_ha_ptr, weight_ptr, up0_ptr, xa_ptr, b_up_ptr, a_down_ptr, ends_ptr,
    d_up_ptr, d_xa_ptr, h_ptr, ha_ptr, weighted_d_ha_ptr, d_weight_ptr, experts, width, slope, limit, shift,
    up_rank: tl.constexpr, up_block: tl.constexpr, down_rank: tl.constexpr, down_block: tl.constexpr,
    interleaved: tl.constexpr, limited: tl.constexpr, block_experts: tl.constexpr, block_rows: tl.constexpr,
    block_columns: tl.constexpr, stages: tl.constexpr,
):  # fmt: skip
    expert, first, end = _find_tile(ends_ptr, experts, block_experts, block_rows)
    if expert >= experts:
        return
    row = first.to(tl.int64) + tl.arange(0, block_rows)
    dtype = h_ptr.dtype.element_ty
    weight = tl.load(weight_ptr + row, mask=row < end, other=0.0).to(tl.float32)
    d_weight = tl.zeros((block_rows,), tl.float32)
    xa = _load_left(xa_ptr, row, end, up_rank, up_block) if up_rank > 0 else 0.0
    if up_rank > 0:
        d_xa = tl.zeros((block_rows, up_block), tl.float32)
    if down_rank > 0:
        d_ha = _load_left(d_ha_ptr, row, end, down_rank, down_block)
        ha = tl.zeros((block_rows, down_block), tl.float32)
    for start in tl.range(0, width, block_columns, num_stages=stages):
        column = start + tl.arange(0, block_columns)
        mask = (row < end)[:, None] & (column < width)[None, :]
        offset = row[:, None] * width + column[None, :]
        d_h = tl.load(d_h_ptr + offset, mask=mask, other=0.0).to(tl.float32)
        if down_rank > 0:
            a = _load_rank(a_down_ptr, expert, column, width, down_rank, down_block)
            d_h = tl.dot(d_ha, a, d_h)
        gate0, up0 = _gate_and_up(
            up0_ptr, xa, b_up_ptr, row, end, expert, start, width, up_rank, up_block, interleaved, block_rows,
            block_columns,
        )  # fmt: skip
        gate, up = gate0, up0
        if limited:
            gate = tl.minimum(gate0, limit)
            up = tl.minimum(tl.maximum(up0, -limit), limit)
        sigmoid = tl.sigmoid(slope * gate)
        silu = gate * sigmoid
        h = (silu * (up + shift)).to(dtype)
        tl.store(h_ptr + offset, h, mask=mask)
        d_weight += tl.sum(d_h * h.to(tl.float32), axis=1)
        d_h = d_h * weight[:, None]
        d_gate = d_h * (up + shift) * (sigmoid + slope * silu * (1 - sigmoid))
        d_up = d_h * silu
        if limited:
            d_gate = tl.where(gate0 <= limit, d_gate, 0.0)
            d_up = tl.where((up0 >= -limit) & (up0 <= limit), d_up, 0.0)
        d_gate, d_up = d_gate.to(dtype), d_up.to(dtype)
        if interleaved:
            both = tl.reshape(tl.join(d_gate, d_up), (block_rows, 2 * block_columns))
            wide = 2 * start + tl.arange(0, 2 * block_columns)
            wide_mask = (row < end)[:, None] & (wide < 2 * width)[None, :]
            tl.store(d_up_ptr + row[:, None] * 2 * width + wide[None, :], both, mask=wide_mask)
            if up_rank > 0:
                b = _load_rank(b_up_ptr, expert, wide, 2 * width, up_rank, up_block)
                d_xa = tl.dot(both, tl.trans(b), d_xa)
        else:
            pair = row[:, None] * 2 * width + column[None, :]
            tl.store(d_up_ptr + pair, d_gate, mask=mask)
            tl.store(d_up_ptr + pair + width, d_up, mask=mask)
            if up_rank > 0:
                d_xa = tl.dot(d_gate, tl.trans(_load_half(b_up_ptr, expert, column, width, 0, up_rank, up_block)), d_xa)
                d_xa = tl.dot(
                    d_up, tl.trans(_load_half(b_up_ptr, expert, column, width, width, up_rank, up_block)), d_xa
                )
        if down_rank > 0:
            ha = tl.dot(h, tl.trans(a), ha)
    tl.store(d_weight_ptr + row, d_weight, mask=row < end)
    if up_rank > 0:
        _store_left(d_xa_ptr, row, end, up_rank, up_block, d_xa)
    if down_rank > 0:
        _store_left(ha_ptr, row, end, down_rank, down_block, ha * weight[:, None])
        _store_left(weighted_d_ha_ptr, row, end, down_rank, down_block, d_ha.to(tl.float32) * weight[:, None])


@triton.jit
def _add_low_rank_kernel(  # type: ignore[no-untyped-def]
    y_ptr, xa_ptr, b_ptr, ends_ptr, experts, columns, rank: tl.constexpr, block_rank: tl.constexpr,
    block_experts: tl.constexpr, block_rows: tl.constexpr, block_columns: tl.constexpr, stages: tl.constexpr,
):  # fmt: skip
    expert, first, end = _find_tile(ends_ptr, experts, block_experts, block_rows)
    if expert >= experts:
        return
    row = first.to(tl.int64) + tl.arange(0, block_rows)
    xa = _load_left(xa_ptr, row, end, rank, block_rank)
    for start in tl.range(0, columns, block_columns, num_stages=stages):
        column = start + tl.arange(0, block_columns)
        mask = (row < end)[:, None] & (column < columns)[None, :]
        offset = row[:, None] * columns + column[None, :]
        y = tl.load(y_ptr + offset, mask=mask, other=0.0).to(tl.float32)
        y = tl.dot(xa, _load_rank(b_ptr, expert, column, columns, rank, block_rank), y)
        tl.store(y_ptr + offset, y.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _sum_kernel(  # type: ignore[no-untyped-def]
    y_ptr, weights_ptr, inverse_ptr, out_ptr, columns, choices: tl.constexpr, weighted: tl.constexpr,
    block_columns: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * block_columns + tl.arange(0, block_columns)
    mask = column < columns
    total = tl.zeros((block_columns,), tl.float32)
    for choice in tl.static_range(choices):
        row = tl.load(inverse_ptr + token * choices + choice).to(tl.int64)
        y = tl.load(y_ptr + row * columns + column, mask=mask, other=0.0).to(tl.float32)
        if weighted:
            y = y * tl.load(weights_ptr + token * choices + choice).to(tl.float32)
        total += y
    tl.store(out_ptr + token * columns + column, total.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _outer_kernel(  # type: ignore[no-untyped-def]
    left_ptr, right_ptr, order_ptr, ends_ptr, out_ptr, choices, factor, columns, experts,
    expert_stride, rank_stride, column_stride, rank: tl.constexpr, block_rank: tl.constexpr, gathered: tl.constexpr,
    block_experts: tl.constexpr, block_rows: tl.constexpr, block_columns: tl.constexpr, stages: tl.constexpr,
):  # fmt: skip
    """One program for some columns of one expert's matrix. Experts with many rows come first: programs that start last
    should be short."""
    index = tl.arange(0, block_experts)
    ends = tl.load(ends_ptr + index, mask=index < experts, other=0)
    starts = tl.load(ends_ptr + index - 1, mask=(index > 0) & (index < experts), other=0)
    counts = tl.where(index < experts, ends - starts, -1)
    is_before = (counts[None, :] > counts[:, None]) | (
        (counts[None, :] == counts[:, None]) & (index[None, :] < index[:, None])
    )
    is_own = tl.sum(is_before.to(tl.int32), axis=1) == tl.program_id(1)
    expert = tl.sum(tl.where(is_own, index, 0), 0)
    begin, end = tl.sum(tl.where(is_own, starts, 0), 0), tl.sum(tl.where(is_own, ends, 0), 0)
    column = tl.program_id(0) * block_columns + tl.arange(0, block_columns)
    total = tl.zeros((block_rank, block_columns), tl.float32)
    for start in tl.range(begin, end, block_rows, num_stages=stages):
        row = start + tl.arange(0, block_rows).to(tl.int64)
        left = _load_left(left_ptr, row, end, rank, block_rank)
        taken = row
        if gathered:
            taken = (tl.load(order_ptr + row, mask=row < end, other=0) // choices).to(tl.int64)
        mask = (row < end)[:, None] & (column < columns)[None, :]
        right = tl.load(right_ptr + taken[:, None] * columns + column[None, :], mask=mask, other=0.0)
        total = tl.dot(tl.trans(left), right, total)
    ranks = tl.arange(0, block_rank)
    offset = expert.to(tl.int64) * expert_stride + ranks[:, None] * rank_stride + column[None, :] * column_stride
    tl.store(out_ptr + offset, total * factor, mask=(ranks < rank)[:, None] & (column < columns)[None, :])


@triton.jit
def _cast_a_kernel(a_ptr, out_ptr, scale, count, block: tl.constexpr):  # type: ignore[no-untyped-def]
    index = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    a = tl.load(a_ptr + index, mask=index < count, other=0.0).to(tl.float32)
    tl.store(out_ptr + index, (a * scale).to(out_ptr.dtype.element_ty), mask=index < count)


@triton.jit
def _cast_b_kernel(  # type: ignore[no-untyped-def]
    b_ptr, out_ptr, columns, experts, rank, block_experts: tl.constexpr, block_columns: tl.constexpr
):
    """Some columns of one rank: [columns, rank, experts] → [experts, rank, columns]"""
    column = tl.program_id(0) * block_columns + tl.arange(0, block_columns)
    expert = tl.arange(0, block_experts)
    mask = (column < columns)[:, None] & (expert < experts)[None, :]
    tile = tl.load(
        b_ptr + (column[:, None] * rank + tl.program_id(1)) * experts + expert[None, :], mask=mask, other=0.0
    )
    offset = (expert[:, None] * rank + tl.program_id(1)) * columns + column[None, :]
    tl.store(out_ptr + offset, tl.trans(tile.to(out_ptr.dtype.element_ty)), mask=tl.trans(mask))


# The functions of `steps.py`


def gather_rows(x: Tensor, rows: SortedRows, choices: int, right: Tensor | None) -> tuple[Tensor, Tensor | None]:
    x, count = x.contiguous(), len(rows.order)
    gathered, rank = x.new_empty(count, x.shape[1]), 0 if right is None else right.shape[1]
    low = None if right is None else x.new_empty(count, rank)
    if count:
        _gather_kernel[(_tiles(rows),)](
            x, rows.order, rows.ends, _or(right, x), gathered, _or(low, x), choices, len(rows.ends), x.shape[1],
            rank, _rank_block(rank), **_tile_options(rows, _GATHER_COLUMNS, 2), num_warps=4,
        )  # fmt: skip
    return gathered, low


def activate(
    up0: Tensor, xa: Tensor | None, up_b: Tensor | None, down_a: Tensor | None, rows: SortedRows, activation: Activation
) -> tuple[Tensor, Tensor | None]:
    if activation.gated_silu is None:
        return by_torch.activate(up0, xa, up_b, down_a, rows, activation)
    h = up0.new_empty(len(up0), up0.shape[1] // 2)
    ha = None if down_a is None else up0.new_empty(len(up0), down_a.shape[1])
    if len(up0):
        _activate_kernel[(_tiles(rows),)](
            up0, _or(xa, up0), _or(up_b, up0), _or(down_a, up0), rows.ends, h, _or(ha, up0), len(rows.ends), h.shape[1],
            **_activation_options(activation, up_b, down_a),
            **_tile_options(rows, _ACTIVATE_COLUMNS, 3), num_warps=4,
        )  # fmt: skip
    return h, ha


def activate_backward(
    d_h: Tensor, d_ha: Tensor | None, weight: Tensor, up0: Tensor, xa: Tensor | None, up_b: Tensor | None,
    down_a: Tensor | None, rows: SortedRows, activation: Activation,
) -> ActivationGradients:  # fmt: skip
    if activation.gated_silu is None:
        return by_torch.activate_backward(d_h, d_ha, weight, up0, xa, up_b, down_a, rows, activation)
    d_up, h = torch.empty_like(up0), torch.empty_like(d_h)
    d_xa = None if up_b is None else torch.empty_like(xa)  # type: ignore[arg-type]
    ha, weighted = (None, None) if d_ha is None else (torch.empty_like(d_ha), torch.empty_like(d_ha))
    d_weight = torch.empty_like(weight)
    if len(up0):
        _activate_backward_kernel[(_tiles(rows),)](
            d_h, _or(d_ha, up0), weight, up0, _or(xa, up0), _or(up_b, up0), _or(down_a, up0), rows.ends, d_up,
            _or(d_xa, up0), h, _or(ha, up0), _or(weighted, up0), d_weight, len(rows.ends), h.shape[1],
            **_activation_options(activation, up_b, down_a),
            **_tile_options(rows, _ACTIVATE_COLUMNS, 3), num_warps=4,
        )  # fmt: skip
    return ActivationGradients(d_up, d_xa, h, ha, weighted, d_weight)


def add_low_rank_(y: Tensor, xa: Tensor | None, b: Tensor | None, rows: SortedRows) -> Tensor:
    if xa is not None and b is not None and len(y):
        rank = b.shape[1]
        _add_low_rank_kernel[(_tiles(rows),)](
            y, xa, b, rows.ends, len(rows.ends), y.shape[1], rank, _rank_block(rank),
            **_tile_options(rows, _LOW_RANK_COLUMNS, 2), num_warps=4,
        )  # fmt: skip
    return y


def sum_over_choices(y: Tensor, weights: Tensor | None, rows: SortedRows, choices: int) -> Tensor:
    tokens, columns = len(rows.order) // choices, y.shape[1]
    out = y.new_empty(tokens, columns)
    if tokens:
        block = min(_SUM_COLUMNS, triton.next_power_of_2(columns))
        _sum_kernel[(tokens, triton.cdiv(columns, block))](
            y, y if weights is None else weights.contiguous(), rows.inverse, out, columns, choices, weights is not None,
            block, num_warps=4,
        )  # fmt: skip
    return out


def low_rank_outer(
    left: Tensor, right: Tensor, rows: SortedRows, choices: int | None, factor: float = 1.0, is_b: bool = False
) -> Tensor:
    right, experts, rank, columns = right.contiguous(), len(rows.ends), left.shape[1], right.shape[1]
    sizes = (columns, rank, experts) if is_b else (experts, rank, columns)
    out = left.new_empty(sizes, dtype=torch.float32)
    out = out.permute(2, 1, 0) if is_b else out
    block_rows, stages = (_ROWS, 3) if is_b else (2 * _ROWS, 2)
    _outer_kernel[(triton.cdiv(columns, _OUTER_COLUMNS), experts)](
        left, right, rows.order, rows.ends, out, choices or 1, factor, columns, experts, *out.stride(),
        rank, _rank_block(rank), choices is not None, triton.next_power_of_2(experts), block_rows, _OUTER_COLUMNS,
        stages, num_warps=4,
    )  # fmt: skip
    return out


def cast_a(a: Tensor, scale: float, experts: int, dtype: torch.dtype) -> Tensor:
    a = a.contiguous()
    out = a.new_empty(a.shape, dtype=dtype)
    _cast_a_kernel[(triton.cdiv(a.numel(), _CAST_ELEMENTS),)](a, out, scale, a.numel(), _CAST_ELEMENTS, num_warps=4)
    return out.unflatten(0, (experts, -1))


def cast_b(b: Tensor, experts: int, dtype: torch.dtype) -> Tensor:
    columns, rank = len(b), b.shape[1] // experts
    out = b.new_empty(experts, rank, columns, dtype=dtype)
    _cast_b_kernel[(triton.cdiv(columns, _CAST_COLUMNS), rank)](
        b, out, columns, experts, rank, triton.next_power_of_2(experts), _CAST_COLUMNS, num_warps=4
    )
    return out


def _tiles(rows: SortedRows) -> int:
    return triton.cdiv(len(rows.order), _ROWS) + len(rows.ends)


def _tile_options(rows: SortedRows, columns: int, stages: int) -> dict[str, int]:
    block_experts = triton.next_power_of_2(len(rows.ends))
    return {"block_experts": block_experts, "block_rows": _ROWS, "block_columns": columns, "stages": stages}


def _activation_options(activation: Activation, up_b: Tensor | None, down_a: Tensor | None) -> dict[str, Any]:
    gated = activation.gated_silu
    assert gated is not None
    up_rank, down_rank = (0 if matrix is None else matrix.shape[1] for matrix in (up_b, down_a))
    return {
        "slope": gated.slope, "limit": gated.limit, "shift": gated.shift, "interleaved": gated.interleaved,
        "limited": gated.limit != float("inf"), "up_rank": up_rank, "up_block": _rank_block(up_rank),
        "down_rank": down_rank, "down_block": _rank_block(down_rank),
    }  # fmt: skip


def _rank_block(rank: int) -> int:
    return max(16, triton.next_power_of_2(rank))


def _or(tensor: Tensor | None, other: Tensor) -> Tensor:
    """Any tensor for an argument that the kernel does not use."""
    return other if tensor is None else tensor
