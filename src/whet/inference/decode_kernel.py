"""A Triton kernel for decoding: each sequence's new token attends to its own part of the KV cache, and to no more.

SDPA would read every slot up to the longest sequence, masked. One program serves one sequence and one key-value head;
the query heads of the group share what it reads. So the device is full once there are as many of them as it has
multiprocessors; below that, SDPA is as fast.

Shape letters as in kv_cache.py: N sequences, H query heads, K key-value heads, S slot length, E head width, V value
head width.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_LOG2_E = 1.4426950408889634
_MIN_DOT_DIM = 16  # the smallest operand of tl.dot
_KEYS = 64


def fills_device(query: Tensor, keys: Tensor) -> bool:
    """Whether the kernel has a program for every multiprocessor. query [N H 1 E], keys [N S K E]."""
    return len(query) * keys.shape[2] >= torch.cuda.get_device_properties(query.device).multi_processor_count


def decode_attention(
    query: Tensor, keys: Tensor, values: Tensor, positions: Tensor, scale: float, window: int | None
) -> Tensor:
    """query [N H 1 E], keys [N S K E], values [N S K V], positions [N] → [N 1 H V].

    Sequence n attends to the keys at `positions[n]` and before, at most `window` of them."""
    query = query if query.stride(-1) == 1 else query.contiguous()
    rows, heads, _, width = query.shape
    key_heads, value_width = values.shape[2:]
    group = heads // key_heads
    out = query.new_empty((rows, 1, heads, value_width))
    _decode_kernel[rows, key_heads](
        query, keys, values, positions, out, scale * _LOG2_E, window or 0,
        query.stride(0), query.stride(1), keys.stride(0), keys.stride(1), keys.stride(2),
        values.stride(0), values.stride(1), values.stride(2), heads * value_width,
        width, value_width, group,
        max(_MIN_DOT_DIM, triton.next_power_of_2(group)), _KEYS,
        max(_MIN_DOT_DIM, triton.next_power_of_2(width)), max(_MIN_DOT_DIM, triton.next_power_of_2(value_width)),
        num_warps=4, num_stages=3,
    )  # fmt: skip
    return out


@triton.jit
def _decode_kernel(  # type: ignore[no-untyped-def]
    query, keys, values, positions, out, scale_log2, window,
    q_row, q_head, k_row, k_key, k_head, v_row, v_key, v_head, o_row,
    width, value_width, group,
    block_group: tl.constexpr, block_keys: tl.constexpr, block_width: tl.constexpr, block_value: tl.constexpr,
):  # fmt: skip
    """One program for one sequence and one key-value head: online softmax over the keys of the sequence."""
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    g, e, v = tl.arange(0, block_group), tl.arange(0, block_width), tl.arange(0, block_value)
    in_group, in_width, in_value = g < group, e < width, v < value_width
    end = tl.load(positions + row).to(tl.int32) + 1
    start = tl.where(window > 0, tl.maximum(end - window, 0), 0)
    q_at = query + row * q_row + (head * group + g[:, None]) * q_head + e[None, :]
    q = tl.load(q_at, mask=in_group[:, None] & in_width[None, :], other=0.0)
    highest = tl.full((block_group,), float("-inf"), tl.float32)
    total = tl.zeros((block_group,), tl.float32)
    sums = tl.zeros((block_group, block_value), tl.float32)
    key_base, value_base = keys + row * k_row + head * k_head, values + row * v_row + head * v_head
    for first in range(start, end, block_keys):
        at = first + tl.arange(0, block_keys)
        visible = at < end
        k = tl.load(key_base + at[None, :] * k_key + e[:, None], mask=visible[None, :] & in_width[:, None], other=0.0)
        scores = tl.dot(q, k, input_precision="ieee") * scale_log2
        scores = tl.where(visible[None, :], scores, float("-inf"))
        new_highest = tl.maximum(highest, tl.max(scores, 1))
        shrink = tl.exp2(highest - new_highest)
        weights = tl.exp2(scores - new_highest[:, None])
        x = tl.load(value_base + at[:, None] * v_key + v[None, :], mask=visible[:, None] & in_value[None, :], other=0.0)
        total = total * shrink + tl.sum(weights, 1)
        sums = sums * shrink[:, None] + tl.dot(weights.to(x.dtype), x, input_precision="ieee")
        highest = new_highest
    o_at = out + row * o_row + (head * group + g[:, None]) * value_width + v[None, :]
    tl.store(o_at, (sums / total[:, None]).to(out.dtype.element_ty), mask=in_group[:, None] & in_value[None, :])
