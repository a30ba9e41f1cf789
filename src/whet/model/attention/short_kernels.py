"""Triton kernels of `short`, and their tile sizes.

A tile of queries holds rows of one key-value head: row = token · group + query head within the group. Keys and values
are loaded once for all heads of the group, and a tile of 128 rows spans 32 tokens if four heads share a key, so short
documents waste little work on masked pairs. Rows are consecutive across tokens and documents: any group size, also 3 or
7, fills its tiles.

A token attends to the keys from the start of its document, or of its window, up to itself. Both bounds never decrease
from one token to the next, so the first token of a tile bounds its loop from below and the last one from above. The
loop begins at that first key, not at a multiple of the tile.

Softmax is in base 2: 2^(s · scale_log2), scale_log2 = scale · log₂ e. `lse` and `delta` are fp32 [K, T, group]. There
are no atomic additions: results are bit-identical from run to run.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

_LOG2_E = 1.4426950408889634
_MIN_DOT_DIM = 16  # the smallest operand of tl.dot


class AttentionTile(NamedTuple):
    """Tile size, warps and pipeline stages of a kernel."""

    rows: int
    keys: int
    warps: int
    stages: int
    skip_mask: bool = False
    """Skip the mask for tiles in which every query attends to every key."""
    registers: int | None = None
    """Limit of registers per thread, for more programs per SM; None: no limit."""


KernelName = Literal["forward", "backward_query", "backward_key_value"]

ATTENTION_TILES: dict[KernelName, dict[int, AttentionTile]] = {
    "forward": {
        64: AttentionTile(64, 64, 4, 3, skip_mask=True, registers=128),
        128: AttentionTile(64, 32, 4, 3, skip_mask=True, registers=168),
        256: AttentionTile(64, 32, 4, 2),
    },
    "backward_query": {
        64: AttentionTile(64, 32, 4, 3, skip_mask=True),
        128: AttentionTile(128, 32, 8, 3, skip_mask=True, registers=128),
        256: AttentionTile(64, 16, 4, 2),
    },
    "backward_key_value": {
        64: AttentionTile(64, 64, 4, 3),
        128: AttentionTile(32, 64, 4, 3),
        256: AttentionTile(16, 64, 8, 2),
    },
}
"""By kernel and largest head dimension. `bench/attention.py` tries others."""
_ODD_GROUP_TILE = AttentionTile(128, 32, 4, 3)
"""Of `backward_key_value` for heads of up to 64 in groups of 3, 5, 6 or 7: 1.4 to 2.2 times as fast on an H200 as the
tile for groups of 1, 2, 4 and 8, which is a quarter faster for those."""
_FP32_TILE = AttentionTile(32, 32, 4, 1)
"""For fp32, whose products do not use tensor cores."""


@triton.jit
def _tile_offsets(  # type: ignore[no-untyped-def]
    first, second, first_stride, second_stride, dim_stride, block_dim: tl.constexpr, int64_offsets: tl.constexpr
):
    """[rows block_dim] offsets of a tile's elements from its first; the same for all tiles, so computed once."""
    dim = tl.arange(0, block_dim)
    if int64_offsets:  # the tensor is too large for 32-bit offsets
        first, second, dim = first.to(tl.int64), second.to(tl.int64), dim.to(tl.int64)
    return (first * first_stride + second * second_stride)[:, None] + dim[None, :] * dim_stride


@triton.jit
def _tile_mask(row_mask, head_dim: tl.constexpr, block_dim: tl.constexpr):  # type: ignore[no-untyped-def]
    """[rows block_dim], or [rows 1] if head_dim fills the block: the elements inside the tensor."""
    mask = row_mask[:, None]
    if head_dim < block_dim:
        mask = mask & (tl.arange(0, block_dim) < head_dim)[None, :]
    return mask


@triton.jit(do_not_specialize=["window"])  # its value differs between layers
def _forward_kernel(  # type: ignore[no-untyped-def]
    q_ptr, k_ptr, v_ptr, spans_ptr, out_ptr, lse_ptr,
    q_stride_head, q_stride_token, q_stride_dim, k_stride_head, k_stride_token, k_stride_dim, v_stride_head,
    v_stride_token, v_stride_dim,
    tokens, key_heads, scale_log2, window,
    group: tl.constexpr, head_dim: tl.constexpr, value_dim: tl.constexpr, has_window: tl.constexpr,
    int64_offsets: tl.constexpr,
    is_fp32: tl.constexpr, block_rows: tl.constexpr, block_keys: tl.constexpr, block_dim: tl.constexpr,
    block_value_dim: tl.constexpr,
    skip_mask: tl.constexpr,
):  # fmt: skip
    """One program for one tile of queries: online softmax over the keys that they attend to."""
    precision: tl.constexpr = "ieee" if is_fp32 else "tf32"
    block_tokens: tl.constexpr = block_rows // group
    key_head = (tl.program_id(0) % key_heads).to(tl.int64)
    first_token = tl.program_id(0) // key_heads * block_tokens
    last_token = tl.minimum(first_token + block_tokens, tokens) - 1
    row = tl.arange(0, block_rows)
    token = first_token + row // group
    row_mask = (row < block_tokens * group) & (token < tokens)
    start = tl.load(spans_ptr + first_token)
    common_start = tl.load(spans_ptr + last_token)
    row_start = tl.load(spans_ptr + token, mask=row_mask, other=0)
    if has_window:
        start = tl.maximum(start, first_token - window + 1)
        common_start = tl.maximum(common_start, last_token - window + 1)
        row_start = tl.maximum(row_start, token - window + 1)
    q_ptr += key_head * group * q_stride_head + first_token.to(tl.int64) * q_stride_token
    q_offsets = _tile_offsets(
        row // group, row % group, q_stride_token, q_stride_head, q_stride_dim, block_dim, int64_offsets
    )
    q = tl.load(q_ptr + q_offsets, mask=_tile_mask(row_mask, head_dim, block_dim), other=0.0)
    key_offset = tl.arange(0, block_keys)
    k_ptr += key_head * k_stride_head + start.to(tl.int64) * k_stride_token
    v_ptr += key_head * v_stride_head + start.to(tl.int64) * v_stride_token
    k_offsets = _tile_offsets(key_offset, key_offset, k_stride_token, 0, k_stride_dim, block_dim, int64_offsets)
    v_offsets = _tile_offsets(key_offset, key_offset, v_stride_token, 0, v_stride_dim, block_value_dim, int64_offsets)
    row_max = tl.full((block_rows,), -1e30, tl.float32)  # finite, so that a row without keys gives 0, not NaN
    row_sum = tl.zeros((block_rows,), tl.float32)
    out = tl.zeros((block_rows, block_value_dim), tl.float32)
    for key_start in range(start, last_token + 1, block_keys):
        key = key_start + key_offset
        k = tl.load(k_ptr + k_offsets, mask=_tile_mask(key <= last_token, head_dim, block_dim), other=0.0)
        v = tl.load(v_ptr + v_offsets, mask=_tile_mask(key <= last_token, value_dim, block_value_dim), other=0.0)
        scores = tl.dot(q, tl.trans(k), input_precision=precision)
        if not skip_mask or (key_start < common_start or key_start + block_keys - 1 > first_token):
            visible = (key[None, :] >= row_start[:, None]) & (key[None, :] <= token[:, None])
            scores = tl.where(visible, scores, float("-inf"))
        new_max = tl.maximum(row_max, tl.max(scores, 1))
        probs = tl.exp2(scores * scale_log2 - (new_max * scale_log2)[:, None])
        rescale = tl.exp2((row_max - new_max) * scale_log2)
        row_sum = row_sum * rescale + tl.sum(probs, 1)
        out = tl.dot(probs.to(v.dtype), v, out * rescale[:, None], input_precision=precision)
        row_max = new_max
        k_ptr += tl.cast(k_stride_token, tl.int64) * block_keys
        v_ptr += tl.cast(v_stride_token, tl.int64) * block_keys
    row_sum = tl.where(row_mask, row_sum, 1.0)
    lse_ptr += (key_head * tokens + first_token) * group
    tl.store(lse_ptr + row, row_max * scale_log2 + tl.log2(row_sum), mask=row_mask)
    out_ptr += (first_token.to(tl.int64) * key_heads + key_head) * group * value_dim
    out_offsets = _tile_offsets(
        row // group, row % group, key_heads * group * value_dim, value_dim, 1, block_value_dim, int64_offsets
    )
    out = (out / row_sum[:, None]).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + out_offsets, out, mask=_tile_mask(row_mask, value_dim, block_value_dim))


@triton.jit(do_not_specialize=["window"])  # its value differs between layers
def _backward_query_kernel(  # type: ignore[no-untyped-def]
    q_ptr, k_ptr, v_ptr, spans_ptr, out_ptr, lse_ptr, d_out_ptr, delta_ptr, dq_ptr,
    q_stride_head, q_stride_token, q_stride_dim, k_stride_head, k_stride_token, k_stride_dim, v_stride_head,
    v_stride_token, v_stride_dim, d_out_stride_head, d_out_stride_token, d_out_stride_dim,
    tokens, key_heads, scale_log2, scale, window,
    group: tl.constexpr, head_dim: tl.constexpr, value_dim: tl.constexpr, has_window: tl.constexpr,
    int64_offsets: tl.constexpr,
    is_fp32: tl.constexpr, block_rows: tl.constexpr, block_keys: tl.constexpr, block_dim: tl.constexpr,
    block_value_dim: tl.constexpr,
    skip_mask: tl.constexpr,
):  # fmt: skip
    """One program for one tile of queries: their gradient, and delta = Σ d_out · out for the other kernel."""
    precision: tl.constexpr = "ieee" if is_fp32 else "tf32"
    block_tokens: tl.constexpr = block_rows // group
    key_head = (tl.program_id(0) % key_heads).to(tl.int64)
    first_token = tl.program_id(0) // key_heads * block_tokens
    last_token = tl.minimum(first_token + block_tokens, tokens) - 1
    row = tl.arange(0, block_rows)
    token = first_token + row // group
    row_mask = (row < block_tokens * group) & (token < tokens)
    start = tl.load(spans_ptr + first_token)
    common_start = tl.load(spans_ptr + last_token)
    row_start = tl.load(spans_ptr + token, mask=row_mask, other=0)
    if has_window:
        start = tl.maximum(start, first_token - window + 1)
        common_start = tl.maximum(common_start, last_token - window + 1)
        row_start = tl.maximum(row_start, token - window + 1)
    q_ptr += key_head * group * q_stride_head + first_token.to(tl.int64) * q_stride_token
    q_offsets = _tile_offsets(
        row // group, row % group, q_stride_token, q_stride_head, q_stride_dim, block_dim, int64_offsets
    )
    q = tl.load(q_ptr + q_offsets, mask=_tile_mask(row_mask, head_dim, block_dim), other=0.0)
    d_out_ptr += key_head * group * d_out_stride_head + first_token.to(tl.int64) * d_out_stride_token
    d_out_offsets = _tile_offsets(
        row // group,
        row % group,
        d_out_stride_token,
        d_out_stride_head,
        d_out_stride_dim,
        block_value_dim,
        int64_offsets,
    )
    d_out = tl.load(d_out_ptr + d_out_offsets, mask=_tile_mask(row_mask, value_dim, block_value_dim), other=0.0)
    out_ptr += (first_token.to(tl.int64) * key_heads + key_head) * group * value_dim
    out_offsets = _tile_offsets(
        row // group, row % group, key_heads * group * value_dim, value_dim, 1, block_value_dim, int64_offsets
    )
    out = tl.load(out_ptr + out_offsets, mask=_tile_mask(row_mask, value_dim, block_value_dim), other=0.0)
    lse_ptr += (key_head * tokens + first_token) * group
    delta_ptr += (key_head * tokens + first_token) * group
    lse = tl.load(lse_ptr + row, mask=row_mask, other=0.0)
    delta = tl.sum(d_out.to(tl.float32) * out.to(tl.float32), 1)
    tl.store(delta_ptr + row, delta, mask=row_mask)
    key_offset = tl.arange(0, block_keys)
    k_ptr += key_head * k_stride_head + start.to(tl.int64) * k_stride_token
    v_ptr += key_head * v_stride_head + start.to(tl.int64) * v_stride_token
    k_offsets = _tile_offsets(key_offset, key_offset, k_stride_token, 0, k_stride_dim, block_dim, int64_offsets)
    v_offsets = _tile_offsets(key_offset, key_offset, v_stride_token, 0, v_stride_dim, block_value_dim, int64_offsets)
    dq = tl.zeros((block_rows, block_dim), tl.float32)
    for key_start in range(start, last_token + 1, block_keys):
        key = key_start + key_offset
        k = tl.load(k_ptr + k_offsets, mask=_tile_mask(key <= last_token, head_dim, block_dim), other=0.0)
        v = tl.load(v_ptr + v_offsets, mask=_tile_mask(key <= last_token, value_dim, block_value_dim), other=0.0)
        scores = tl.dot(q, tl.trans(k), input_precision=precision)
        d_probs = tl.dot(d_out, tl.trans(v), input_precision=precision)
        if not skip_mask or (key_start < common_start or key_start + block_keys - 1 > first_token):
            visible = (key[None, :] >= row_start[:, None]) & (key[None, :] <= token[:, None])
            scores = tl.where(visible, scores, float("-inf"))
        probs = tl.exp2(scores * scale_log2 - lse[:, None])
        d_scores = probs * (d_probs - delta[:, None])
        dq = tl.dot(d_scores.to(k.dtype), k, dq, input_precision=precision)
        k_ptr += tl.cast(k_stride_token, tl.int64) * block_keys
        v_ptr += tl.cast(v_stride_token, tl.int64) * block_keys
    dq_ptr += (first_token.to(tl.int64) * key_heads + key_head) * group * head_dim
    dq_offsets = _tile_offsets(
        row // group, row % group, key_heads * group * head_dim, head_dim, 1, block_dim, int64_offsets
    )
    tl.store(
        dq_ptr + dq_offsets, (dq * scale).to(dq_ptr.dtype.element_ty), mask=_tile_mask(row_mask, head_dim, block_dim)
    )


@triton.jit(do_not_specialize=["window"])  # its value differs between layers
def _backward_key_value_kernel(  # type: ignore[no-untyped-def]
    q_ptr, k_ptr, v_ptr, spans_ptr, lse_ptr, d_out_ptr, delta_ptr, dk_ptr, dv_ptr,
    q_stride_head, q_stride_token, q_stride_dim, k_stride_head, k_stride_token, k_stride_dim, v_stride_head,
    v_stride_token, v_stride_dim, d_out_stride_head, d_out_stride_token, d_out_stride_dim,
    tokens, key_heads, scale_log2, scale, window,
    group: tl.constexpr, head_dim: tl.constexpr, value_dim: tl.constexpr, has_window: tl.constexpr,
    int64_offsets: tl.constexpr,
    is_fp32: tl.constexpr, block_rows: tl.constexpr, block_keys: tl.constexpr, block_dim: tl.constexpr,
    block_value_dim: tl.constexpr,
    skip_mask: tl.constexpr,
):  # fmt: skip
    """One program for one tile of keys: gradients of key and value, from all query rows that attend to them."""
    precision: tl.constexpr = "ieee" if is_fp32 else "tf32"
    block_tokens: tl.constexpr = block_rows // group
    key_head = (tl.program_id(0) % key_heads).to(tl.int64)
    first_key = tl.program_id(0) // key_heads * block_keys
    last_key = tl.minimum(first_key + block_keys, tokens) - 1
    key_offset = tl.arange(0, block_keys)
    key = first_key + key_offset
    key_mask = key < tokens
    stop = tl.load(spans_ptr + tokens + last_key)
    common_end = tl.load(spans_ptr + tokens + first_key)
    key_end = tl.load(spans_ptr + tokens + key, mask=key_mask, other=0)
    if has_window:
        stop = tl.minimum(stop, last_key + window)
        common_end = tl.minimum(common_end, first_key + window)
        key_end = tl.minimum(key_end, key + window)
    k_ptr += key_head * k_stride_head + first_key.to(tl.int64) * k_stride_token
    v_ptr += key_head * v_stride_head + first_key.to(tl.int64) * v_stride_token
    k_offsets = _tile_offsets(key_offset, key_offset, k_stride_token, 0, k_stride_dim, block_dim, int64_offsets)
    v_offsets = _tile_offsets(key_offset, key_offset, v_stride_token, 0, v_stride_dim, block_value_dim, int64_offsets)
    k = tl.load(k_ptr + k_offsets, mask=_tile_mask(key_mask, head_dim, block_dim), other=0.0)
    v = tl.load(v_ptr + v_offsets, mask=_tile_mask(key_mask, value_dim, block_value_dim), other=0.0)
    row = tl.arange(0, block_rows)
    q_ptr += key_head * group * q_stride_head + first_key.to(tl.int64) * q_stride_token
    d_out_ptr += key_head * group * d_out_stride_head + first_key.to(tl.int64) * d_out_stride_token
    lse_ptr += (key_head * tokens + first_key) * group
    delta_ptr += (key_head * tokens + first_key) * group
    q_offsets = _tile_offsets(
        row // group, row % group, q_stride_token, q_stride_head, q_stride_dim, block_dim, int64_offsets
    )
    d_out_offsets = _tile_offsets(
        row // group,
        row % group,
        d_out_stride_token,
        d_out_stride_head,
        d_out_stride_dim,
        block_value_dim,
        int64_offsets,
    )
    dk = tl.zeros((block_keys, block_dim), tl.float32)
    dv = tl.zeros((block_keys, block_value_dim), tl.float32)
    for first_token in range(first_key, stop, block_tokens):
        token = first_token + row // group
        row_mask = (row < block_tokens * group) & (token < stop)  # masked rows add 0
        q = tl.load(q_ptr + q_offsets, mask=_tile_mask(row_mask, head_dim, block_dim), other=0.0)
        d_out = tl.load(d_out_ptr + d_out_offsets, mask=_tile_mask(row_mask, value_dim, block_value_dim), other=0.0)
        lse = tl.load(lse_ptr + row, mask=row_mask, other=0.0)
        delta = tl.load(delta_ptr + row, mask=row_mask, other=0.0)
        scores = tl.dot(k, tl.trans(q), input_precision=precision)
        d_probs = tl.dot(v, tl.trans(d_out), input_precision=precision)
        if not skip_mask or (first_token < last_key or first_token + block_tokens > common_end):
            visible = (token[None, :] >= key[:, None]) & (token[None, :] < key_end[:, None])
            scores = tl.where(visible, scores, float("-inf"))
        probs = tl.exp2(scores * scale_log2 - lse[None, :])
        dv = tl.dot(probs.to(d_out.dtype), d_out, dv, input_precision=precision)
        d_scores = probs * (d_probs - delta[None, :])
        dk = tl.dot(d_scores.to(q.dtype), q, dk, input_precision=precision)
        q_ptr += tl.cast(q_stride_token, tl.int64) * block_tokens
        d_out_ptr += tl.cast(d_out_stride_token, tl.int64) * block_tokens
        lse_ptr += block_rows // group * group
        delta_ptr += block_rows // group * group
    dk_ptr += (first_key.to(tl.int64) * key_heads + key_head) * head_dim
    dv_ptr += (first_key.to(tl.int64) * key_heads + key_head) * value_dim
    dk_offsets = _tile_offsets(key_offset, key_offset, key_heads * head_dim, 0, 1, block_dim, int64_offsets)
    dv_offsets = _tile_offsets(key_offset, key_offset, key_heads * value_dim, 0, 1, block_value_dim, int64_offsets)
    tl.store(
        dk_ptr + dk_offsets, (dk * scale).to(dk_ptr.dtype.element_ty), mask=_tile_mask(key_mask, head_dim, block_dim)
    )
    tl.store(dv_ptr + dv_offsets, dv.to(dv_ptr.dtype.element_ty), mask=_tile_mask(key_mask, value_dim, block_value_dim))


def tile_for(kernel: KernelName, query: Tensor, value: Tensor, group: int) -> AttentionTile:
    """The tile of a kernel for these states. All heads of a group at one token are in the same tile."""
    if query.dtype == torch.float32:
        tile = _FP32_TILE
    else:
        head_dim = max(query.shape[-1], value.shape[-1])
        tile = next(tile for largest, tile in ATTENTION_TILES[kernel].items() if head_dim <= largest)
        if kernel == "backward_key_value" and head_dim <= 64 and group & (group - 1):
            tile = _ODD_GROUP_TILE
    if group > tile.rows:  # rare: more rows, so fewer stages to fit into shared memory
        return tile._replace(rows=triton.next_power_of_2(group), warps=8, stages=1, registers=None)
    return tile


def forward(
    query: Tensor, key: Tensor, value: Tensor, spans: Tensor, scale: float, window: int, out: Tensor, lse: Tensor
) -> None:
    """Writes `out` [T H V] and `lse` [K T group]."""
    options, tile = _launch_options("forward", query, key, value, out, window)
    block_tokens = tile.rows // options["group"]
    _forward_kernel[(_grid_size(query.shape[2], block_tokens, key.shape[1]),)](
        query, key, value, spans, out, lse, *_strides(query), *_strides(key), *_strides(value),
        query.shape[2], key.shape[1], scale * _LOG2_E, window, **options,
    )  # fmt: skip


def backward_query(
    query: Tensor, key: Tensor, value: Tensor, spans: Tensor, scale: float, window: int,
    out: Tensor, lse: Tensor, d_out: Tensor, delta: Tensor, dq: Tensor,
) -> None:  # fmt: skip
    """Writes `dq` [T H E] and `delta` [K T group] for `backward_key_value`. `d_out` is [T H V] with any strides."""
    options, tile = _launch_options("backward_query", query, key, value, d_out, window)
    block_tokens = tile.rows // options["group"]
    _backward_query_kernel[(_grid_size(query.shape[2], block_tokens, key.shape[1]),)](
        query, key, value, spans, out, lse, d_out, delta, dq,
        *_strides(query), *_strides(key), *_strides(value), d_out.stride(1), d_out.stride(0), d_out.stride(2),
        query.shape[2], key.shape[1], scale * _LOG2_E, scale, window, **options,
    )  # fmt: skip


def backward_key_value(
    query: Tensor, key: Tensor, value: Tensor, spans: Tensor, scale: float, window: int,
    lse: Tensor, d_out: Tensor, delta: Tensor, dk: Tensor, dv: Tensor,
) -> None:  # fmt: skip
    """Writes `dk` [T K E] and `dv` [T K V]."""
    options, tile = _launch_options("backward_key_value", query, key, value, d_out, window)
    _backward_key_value_kernel[(_grid_size(query.shape[2], tile.keys, key.shape[1]),)](
        query, key, value, spans, lse, d_out, delta, dk, dv,
        *_strides(query), *_strides(key), *_strides(value), d_out.stride(1), d_out.stride(0), d_out.stride(2),
        query.shape[2], key.shape[1], scale * _LOG2_E, scale, window, **options,
    )  # fmt: skip


def _strides(states: Tensor) -> tuple[int, ...]:
    """Of heads, tokens and head dimension."""
    return states.stride()[1:]


def _grid_size(tokens: int, block_tokens: int, key_heads: int) -> int:
    return triton.cdiv(tokens, block_tokens) * key_heads


def _launch_options(
    kernel: KernelName, query: Tensor, key: Tensor, value: Tensor, other: Tensor, window: int
) -> tuple[dict[str, Any], AttentionTile]:
    """The constexpr arguments and launch options of a kernel, and its tile."""
    group = query.shape[1] // key.shape[1]
    tile = tile_for(kernel, query, value, group)
    head_dim, value_dim = query.shape[-1], value.shape[-1]
    largest_stride = max(max(states.stride()) for states in (query[0], key[0], value[0], other))
    options = {
        "group": group, "head_dim": head_dim, "value_dim": value_dim, "has_window": window > 0,
        "int64_offsets": largest_stride * max(tile.rows, tile.keys) >= 2**31, "is_fp32": query.dtype == torch.float32,
        "block_rows": tile.rows, "block_keys": tile.keys, "skip_mask": tile.skip_mask,
        "block_dim": max(_MIN_DOT_DIM, triton.next_power_of_2(head_dim)),
        "block_value_dim": max(_MIN_DOT_DIM, triton.next_power_of_2(value_dim)),
        "num_warps": tile.warps, "num_stages": tile.stages,
    }  # fmt: skip
    if tile.registers is not None:
        options["maxnreg"] = tile.registers
    return options, tile
