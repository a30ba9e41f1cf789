"""Sums of squares of many large tensors, each number read once, in a Triton kernel.

torch's own norms of many tensors reach half of what memory gives: on an 8B model 8 ms for gradients that 4 suffice for.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK, _AT_ONCE = 16384, 4096
"""Numbers that one program sums, and so many of them at a time."""


@triton.jit
def _sum_squares(at, sums_at, count, block: tl.constexpr, at_once: tl.constexpr):  # type: ignore[no-untyped-def]
    first = tl.program_id(0).to(tl.int64) * block
    total = tl.zeros((at_once,), tl.float32)
    for start in range(0, block, at_once):
        place = first + start + tl.arange(0, at_once)
        number = tl.load(at + place, mask=place < count, other=0.0).to(tl.float32)
        total += number * number
    tl.store(sums_at + tl.program_id(0), tl.sum(total))


def sum_squares(tensors: Sequence[Tensor]) -> Tensor:
    """Of all numbers of all tensors, contiguous and of at most 32 bits each: parts in fp32, their sum in fp64."""
    parts = [triton.cdiv(tensor.numel(), _BLOCK) for tensor in tensors]
    sums = torch.empty(sum(parts), dtype=torch.float32, device=tensors[0].device)
    for tensor, own in zip(tensors, sums.split(parts), strict=True):
        if tensor.numel():
            _sum_squares[(len(own),)](tensor, own, tensor.numel(), block=_BLOCK, at_once=_AT_ONCE, num_warps=8)
    return sums.sum(dtype=torch.float64)
