"""The Triton kernels of `short`, and how large their tiles are.

A tile of queries holds the rows of one key-value head: row = token · group + query head within the group, so that keys
and values are loaded once for all heads of the group, and a tile of 128 rows spans no more than 32 tokens where four
heads share. Documents of a few hundred tokens then waste little on pairs that do not see each other. Rows follow one
another without regard to tokens and documents; any group, also 3 or 7, fills its tiles.

A token sees the keys from its document's begin, or its window's, up to itself. Both ends of that range never go back
from a token to the next: what the first token of a tile sees first and its last one sees last bounds the loop. Keys
are counted from the very first one, not from a multiple of the tile.

Scores are kept in base 2: 2^(s · factor), factor = scale · log₂ e. `lse` and `delta` are fp32 [K, T, group], as rows.
Nothing is added atomically: results are the same bit by bit from run to run.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

_LOG2_E = 1.4426950408889634
_MIN_DOT_DIM = 16  # that a matrix product of Triton takes


class AttentionTile(NamedTuple):
    """How much one program computes at a time, by how many warps, with loads how many steps ahead."""

    rows: int
    keys: int
    warps: int
    stages: int
    spare: bool = False
    """Leave the mask out where all of a tile see each other."""
    registers: int | None = None
    """The most that a thread may use, so that more programs share a processor; None: as many as the compiler likes."""


KernelName = Literal["forward", "d_query", "d_key_value"]

ATTENTION_TILES: dict[KernelName, dict[int, AttentionTile]] = {
    "forward": {
        64: AttentionTile(64, 64, 4, 3, spare=True, registers=128),
        128: AttentionTile(64, 32, 4, 3, spare=True, registers=168),
        256: AttentionTile(64, 32, 4, 2),
    },
    "d_query": {
        64: AttentionTile(64, 32, 4, 3, spare=True),
        128: AttentionTile(128, 32, 8, 3, spare=True, registers=128),
        256: AttentionTile(64, 16, 4, 2),
    },
    "d_key_value": {
        64: AttentionTile(64, 64, 4, 3),
        128: AttentionTile(32, 64, 4, 3),
        256: AttentionTile(16, 64, 8, 2),
    },
}
"""By kernel and the widest head that they are for. `bench/attention.py` tries others."""
_FP32_TILE = AttentionTile(32, 32, 4, 1)
"""For fp32, whose products run without tensor cores."""


@triton.jit
def _tile_offsets(first, second, first_step, second_step, unit_step, wide: tl.constexpr, far: tl.constexpr):  # type: ignore[no-untyped-def]
    """[rows wide] where states lie behind the first of a tile; the same for all tiles, so that none counts anew."""
    unit = tl.arange(0, wide)
    if far:  # a tensor so large that 32 bits do not reach from its first head to its last
        first, second, unit = first.to(tl.int64), second.to(tl.int64), unit.to(tl.int64)
    return (first * first_step + second * second_step)[:, None] + unit[None, :] * unit_step


@triton.jit
def _tile_mask(known, width: tl.constexpr, wide: tl.constexpr):  # type: ignore[no-untyped-def]
    """[rows wide], or [rows 1] where heads are as wide as their tile: which numbers exist."""
    here = known[:, None]
    if width < wide:
        here = here & (tl.arange(0, wide) < width)[None, :]
    return here


@triton.jit(do_not_specialize=["window"])  # layers have several
def _forward_kernel(  # type: ignore[no-untyped-def]
    q_at, k_at, v_at, spans_at, out_at, lse_at,
    q_head, q_token, q_unit, k_head, k_token, k_unit, v_head, v_token, v_unit,
    tokens, key_heads, factor, window,
    group: tl.constexpr, width: tl.constexpr, value_width: tl.constexpr, has_window: tl.constexpr, far: tl.constexpr,
    exact: tl.constexpr, rows: tl.constexpr, keys: tl.constexpr, wide: tl.constexpr, value_wide: tl.constexpr,
    spare: tl.constexpr,
):  # fmt: skip
    """One program, one tile of queries: softmax by the online way over the keys that they see."""
    precision: tl.constexpr = "ieee" if exact else "tf32"
    places: tl.constexpr = rows // group
    key_head = (tl.program_id(0) % key_heads).to(tl.int64)
    first_place = tl.program_id(0) // key_heads * places
    last_place = tl.minimum(first_place + places, tokens) - 1
    row = tl.arange(0, rows)
    place = first_place + row // group
    known = (row < places * group) & (place < tokens)
    start = tl.load(spans_at + first_place)
    all_see = tl.load(spans_at + last_place)
    sees = tl.load(spans_at + place, mask=known, other=0)
    if has_window:
        start = tl.maximum(start, first_place - window + 1)
        all_see = tl.maximum(all_see, last_place - window + 1)
        sees = tl.maximum(sees, place - window + 1)
    q_at += key_head * group * q_head + first_place.to(tl.int64) * q_token
    q_spots = _tile_offsets(row // group, row % group, q_token, q_head, q_unit, wide, far)
    q = tl.load(q_at + q_spots, mask=_tile_mask(known, width, wide), other=0.0)
    lane = tl.arange(0, keys)
    k_at += key_head * k_head + start.to(tl.int64) * k_token
    v_at += key_head * v_head + start.to(tl.int64) * v_token
    k_spots = _tile_offsets(lane, lane, k_token, 0, k_unit, wide, far)
    v_spots = _tile_offsets(lane, lane, v_token, 0, v_unit, value_wide, far)
    highest = tl.full((rows,), -1e30, tl.float32)  # finite, so that a row without a key adds 0 and not NaN
    total = tl.zeros((rows,), tl.float32)
    out = tl.zeros((rows, value_wide), tl.float32)
    for key_start in range(start, last_place + 1, keys):
        key = key_start + lane
        k = tl.load(k_at + k_spots, mask=_tile_mask(key <= last_place, width, wide), other=0.0)
        v = tl.load(v_at + v_spots, mask=_tile_mask(key <= last_place, value_width, value_wide), other=0.0)
        scores = tl.dot(q, tl.trans(k), input_precision=precision)
        if not spare or (key_start < all_see or key_start + keys - 1 > first_place):
            visible = (key[None, :] >= sees[:, None]) & (key[None, :] <= place[:, None])
            scores = tl.where(visible, scores, float("-inf"))
        higher = tl.maximum(highest, tl.max(scores, 1))
        shares = tl.exp2(scores * factor - (higher * factor)[:, None])
        fade = tl.exp2((highest - higher) * factor)
        total = total * fade + tl.sum(shares, 1)
        out = tl.dot(shares.to(v.dtype), v, out * fade[:, None], input_precision=precision)
        highest = higher
        k_at += tl.cast(k_token, tl.int64) * keys
        v_at += tl.cast(v_token, tl.int64) * keys
    total = tl.where(known, total, 1.0)
    lse_at += (key_head * tokens + first_place) * group
    tl.store(lse_at + row, highest * factor + tl.log2(total), mask=known)
    out_at += (first_place.to(tl.int64) * key_heads + key_head) * group * value_width
    out_spots = _tile_offsets(
        row // group, row % group, key_heads * group * value_width, value_width, 1, value_wide, far
    )
    out = (out / total[:, None]).to(out_at.dtype.element_ty)
    tl.store(out_at + out_spots, out, mask=_tile_mask(known, value_width, value_wide))


@triton.jit(do_not_specialize=["window"])  # layers have several
def _d_query_kernel(  # type: ignore[no-untyped-def]
    q_at, k_at, v_at, spans_at, out_at, lse_at, d_out_at, delta_at, dq_at,
    q_head, q_token, q_unit, k_head, k_token, k_unit, v_head, v_token, v_unit, d_head, d_token, d_unit,
    tokens, key_heads, factor, scale, window,
    group: tl.constexpr, width: tl.constexpr, value_width: tl.constexpr, has_window: tl.constexpr, far: tl.constexpr,
    exact: tl.constexpr, rows: tl.constexpr, keys: tl.constexpr, wide: tl.constexpr, value_wide: tl.constexpr,
    spare: tl.constexpr,
):  # fmt: skip
    """One program, one tile of queries: their gradient, and delta = Σ d_out · out of each row for the other kernel."""
    precision: tl.constexpr = "ieee" if exact else "tf32"
    places: tl.constexpr = rows // group
    key_head = (tl.program_id(0) % key_heads).to(tl.int64)
    first_place = tl.program_id(0) // key_heads * places
    last_place = tl.minimum(first_place + places, tokens) - 1
    row = tl.arange(0, rows)
    place = first_place + row // group
    known = (row < places * group) & (place < tokens)
    start = tl.load(spans_at + first_place)
    all_see = tl.load(spans_at + last_place)
    sees = tl.load(spans_at + place, mask=known, other=0)
    if has_window:
        start = tl.maximum(start, first_place - window + 1)
        all_see = tl.maximum(all_see, last_place - window + 1)
        sees = tl.maximum(sees, place - window + 1)
    q_at += key_head * group * q_head + first_place.to(tl.int64) * q_token
    q_spots = _tile_offsets(row // group, row % group, q_token, q_head, q_unit, wide, far)
    q = tl.load(q_at + q_spots, mask=_tile_mask(known, width, wide), other=0.0)
    d_out_at += key_head * group * d_head + first_place.to(tl.int64) * d_token
    d_out_spots = _tile_offsets(row // group, row % group, d_token, d_head, d_unit, value_wide, far)
    d_out = tl.load(d_out_at + d_out_spots, mask=_tile_mask(known, value_width, value_wide), other=0.0)
    out_at += (first_place.to(tl.int64) * key_heads + key_head) * group * value_width
    out_spots = _tile_offsets(
        row // group, row % group, key_heads * group * value_width, value_width, 1, value_wide, far
    )
    out = tl.load(out_at + out_spots, mask=_tile_mask(known, value_width, value_wide), other=0.0)
    lse_at += (key_head * tokens + first_place) * group
    delta_at += (key_head * tokens + first_place) * group
    lse = tl.load(lse_at + row, mask=known, other=0.0)
    delta = tl.sum(d_out.to(tl.float32) * out.to(tl.float32), 1)
    tl.store(delta_at + row, delta, mask=known)
    lane = tl.arange(0, keys)
    k_at += key_head * k_head + start.to(tl.int64) * k_token
    v_at += key_head * v_head + start.to(tl.int64) * v_token
    k_spots = _tile_offsets(lane, lane, k_token, 0, k_unit, wide, far)
    v_spots = _tile_offsets(lane, lane, v_token, 0, v_unit, value_wide, far)
    dq = tl.zeros((rows, wide), tl.float32)
    for key_start in range(start, last_place + 1, keys):
        key = key_start + lane
        k = tl.load(k_at + k_spots, mask=_tile_mask(key <= last_place, width, wide), other=0.0)
        v = tl.load(v_at + v_spots, mask=_tile_mask(key <= last_place, value_width, value_wide), other=0.0)
        scores = tl.dot(q, tl.trans(k), input_precision=precision)
        d_shares = tl.dot(d_out, tl.trans(v), input_precision=precision)
        if not spare or (key_start < all_see or key_start + keys - 1 > first_place):
            visible = (key[None, :] >= sees[:, None]) & (key[None, :] <= place[:, None])
            scores = tl.where(visible, scores, float("-inf"))
        shares = tl.exp2(scores * factor - lse[:, None])
        d_scores = shares * (d_shares - delta[:, None])
        dq = tl.dot(d_scores.to(k.dtype), k, dq, input_precision=precision)
        k_at += tl.cast(k_token, tl.int64) * keys
        v_at += tl.cast(v_token, tl.int64) * keys
    dq_at += (first_place.to(tl.int64) * key_heads + key_head) * group * width
    dq_spots = _tile_offsets(row // group, row % group, key_heads * group * width, width, 1, wide, far)
    tl.store(dq_at + dq_spots, (dq * scale).to(dq_at.dtype.element_ty), mask=_tile_mask(known, width, wide))


@triton.jit(do_not_specialize=["window"])  # layers have several
def _d_key_value_kernel(  # type: ignore[no-untyped-def]
    q_at, k_at, v_at, spans_at, lse_at, d_out_at, delta_at, dk_at, dv_at,
    q_head, q_token, q_unit, k_head, k_token, k_unit, v_head, v_token, v_unit, d_head, d_token, d_unit,
    tokens, key_heads, factor, scale, window,
    group: tl.constexpr, width: tl.constexpr, value_width: tl.constexpr, has_window: tl.constexpr, far: tl.constexpr,
    exact: tl.constexpr, rows: tl.constexpr, keys: tl.constexpr, wide: tl.constexpr, value_wide: tl.constexpr,
    spare: tl.constexpr,
):  # fmt: skip
    """One program, one tile of keys: the gradients of key and value, from all rows of the group that see them."""
    precision: tl.constexpr = "ieee" if exact else "tf32"
    places: tl.constexpr = rows // group
    key_head = (tl.program_id(0) % key_heads).to(tl.int64)
    first_key = tl.program_id(0) // key_heads * keys
    last_key = tl.minimum(first_key + keys, tokens) - 1
    lane = tl.arange(0, keys)
    key = first_key + lane
    there = key < tokens
    stop = tl.load(spans_at + tokens + last_key)
    seen_by_all = tl.load(spans_at + tokens + first_key)
    seen_until = tl.load(spans_at + tokens + key, mask=there, other=0)
    if has_window:
        stop = tl.minimum(stop, last_key + window)
        seen_by_all = tl.minimum(seen_by_all, first_key + window)
        seen_until = tl.minimum(seen_until, key + window)
    k_at += key_head * k_head + first_key.to(tl.int64) * k_token
    v_at += key_head * v_head + first_key.to(tl.int64) * v_token
    k_spots = _tile_offsets(lane, lane, k_token, 0, k_unit, wide, far)
    v_spots = _tile_offsets(lane, lane, v_token, 0, v_unit, value_wide, far)
    k = tl.load(k_at + k_spots, mask=_tile_mask(there, width, wide), other=0.0)
    v = tl.load(v_at + v_spots, mask=_tile_mask(there, value_width, value_wide), other=0.0)
    row = tl.arange(0, rows)
    q_at += key_head * group * q_head + first_key.to(tl.int64) * q_token
    d_out_at += key_head * group * d_head + first_key.to(tl.int64) * d_token
    lse_at += (key_head * tokens + first_key) * group
    delta_at += (key_head * tokens + first_key) * group
    q_spots = _tile_offsets(row // group, row % group, q_token, q_head, q_unit, wide, far)
    d_out_spots = _tile_offsets(row // group, row % group, d_token, d_head, d_unit, value_wide, far)
    dk = tl.zeros((keys, wide), tl.float32)
    dv = tl.zeros((keys, value_wide), tl.float32)
    for first_place in range(first_key, stop, places):
        place = first_place + row // group
        known = (row < places * group) & (place < stop)  # all that an unknown row adds is 0
        q = tl.load(q_at + q_spots, mask=_tile_mask(known, width, wide), other=0.0)
        d_out = tl.load(d_out_at + d_out_spots, mask=_tile_mask(known, value_width, value_wide), other=0.0)
        lse = tl.load(lse_at + row, mask=known, other=0.0)
        delta = tl.load(delta_at + row, mask=known, other=0.0)
        scores = tl.dot(k, tl.trans(q), input_precision=precision)
        d_shares = tl.dot(v, tl.trans(d_out), input_precision=precision)
        if not spare or (first_place < last_key or first_place + places > seen_by_all):
            visible = (place[None, :] >= key[:, None]) & (place[None, :] < seen_until[:, None])
            scores = tl.where(visible, scores, float("-inf"))
        shares = tl.exp2(scores * factor - lse[None, :])
        dv = tl.dot(shares.to(d_out.dtype), d_out, dv, input_precision=precision)
        d_scores = shares * (d_shares - delta[None, :])
        dk = tl.dot(d_scores.to(q.dtype), q, dk, input_precision=precision)
        q_at += tl.cast(q_token, tl.int64) * places
        d_out_at += tl.cast(d_token, tl.int64) * places
        lse_at += rows // group * group
        delta_at += rows // group * group
    dk_at += (first_key.to(tl.int64) * key_heads + key_head) * width
    dv_at += (first_key.to(tl.int64) * key_heads + key_head) * value_width
    dk_spots = _tile_offsets(lane, lane, key_heads * width, 0, 1, wide, far)
    dv_spots = _tile_offsets(lane, lane, key_heads * value_width, 0, 1, value_wide, far)
    tl.store(dk_at + dk_spots, (dk * scale).to(dk_at.dtype.element_ty), mask=_tile_mask(there, width, wide))
    tl.store(dv_at + dv_spots, dv.to(dv_at.dtype.element_ty), mask=_tile_mask(there, value_width, value_wide))


def tile_for(kernel: KernelName, query: Tensor, value: Tensor, group: int) -> AttentionTile:
    """The tile of a kernel for these states; all heads of a group at one token are in the same tile."""
    if query.dtype == torch.float32:
        tile = _FP32_TILE
    else:
        width = max(query.shape[-1], value.shape[-1])
        tile = next(tile for widest, tile in ATTENTION_TILES[kernel].items() if width <= widest)
    if group > tile.rows:  # rare; what it takes more of shared memory and registers, it takes less of elsewhere
        return tile._replace(rows=triton.next_power_of_2(group), warps=8, stages=1, registers=None)
    return tile


def forward(
    query: Tensor, key: Tensor, value: Tensor, spans: Tensor, scale: float, window: int, out: Tensor, lse: Tensor
) -> None:
    """Writes `out` [T H V] and `lse` [K T group]."""
    settings, tile = _launch_options("forward", query, key, value, out, window)
    places = tile.rows // settings["group"]
    _forward_kernel[(_grid_size(query.shape[2], places, key.shape[1]),)](
        query, key, value, spans, out, lse, *_strides(query), *_strides(key), *_strides(value),
        query.shape[2], key.shape[1], scale * _LOG2_E, window, **settings,
    )  # fmt: skip


def d_query(
    query: Tensor, key: Tensor, value: Tensor, spans: Tensor, scale: float, window: int,
    out: Tensor, lse: Tensor, d_out: Tensor, delta: Tensor, dq: Tensor,
) -> None:  # fmt: skip
    """Writes `dq` [T H E] and `delta` [K T group], which `d_key_value` reads. `d_out` is [T H V] of any strides."""
    settings, tile = _launch_options("d_query", query, key, value, d_out, window)
    places = tile.rows // settings["group"]
    _d_query_kernel[(_grid_size(query.shape[2], places, key.shape[1]),)](
        query, key, value, spans, out, lse, d_out, delta, dq,
        *_strides(query), *_strides(key), *_strides(value), d_out.stride(1), d_out.stride(0), d_out.stride(2),
        query.shape[2], key.shape[1], scale * _LOG2_E, scale, window, **settings,
    )  # fmt: skip


def d_key_value(
    query: Tensor, key: Tensor, value: Tensor, spans: Tensor, scale: float, window: int,
    lse: Tensor, d_out: Tensor, delta: Tensor, dk: Tensor, dv: Tensor,
) -> None:  # fmt: skip
    """Writes `dk` [T K E] and `dv` [T K V]."""
    settings, tile = _launch_options("d_key_value", query, key, value, d_out, window)
    _d_key_value_kernel[(_grid_size(query.shape[2], tile.keys, key.shape[1]),)](
        query, key, value, spans, lse, d_out, delta, dk, dv,
        *_strides(query), *_strides(key), *_strides(value), d_out.stride(1), d_out.stride(0), d_out.stride(2),
        query.shape[2], key.shape[1], scale * _LOG2_E, scale, window, **settings,
    )  # fmt: skip


def _strides(states: Tensor) -> tuple[int, ...]:
    """From head to head, token to token, number to number."""
    return states.stride()[1:]


def _grid_size(tokens: int, places: int, key_heads: int) -> int:
    return triton.cdiv(tokens, places) * key_heads


def _launch_options(
    kernel: KernelName, query: Tensor, key: Tensor, value: Tensor, other: Tensor, window: int
) -> tuple[dict[str, Any], AttentionTile]:
    """What a kernel is compiled for."""
    group = query.shape[1] // key.shape[1]
    tile = tile_for(kernel, query, value, group)
    width, value_width = query.shape[-1], value.shape[-1]
    # from a tile's first number to its last, in any of the tensors
    reach = max(max(states.stride()) for states in (query[0], key[0], value[0], other))
    settings = {
        "group": group, "width": width, "value_width": value_width, "has_window": window > 0,
        "far": reach * max(tile.rows, tile.keys) >= 2**31, "exact": query.dtype == torch.float32,
        "rows": tile.rows, "keys": tile.keys, "spare": tile.spare,
        "wide": max(_MIN_DOT_DIM, triton.next_power_of_2(width)),
        "value_wide": max(_MIN_DOT_DIM, triton.next_power_of_2(value_width)),
        "num_warps": tile.warps, "num_stages": tile.stages,
    }  # fmt: skip
    if tile.registers is not None:
        settings["maxnreg"] = tile.registers
    return settings, tile
