"""Numbers in 8 bits: a code from a table times the largest of its block.

A block is up to 256 neighbours in one row, never parts of two rows: a weight cut by rows is encoded as the whole.
"""

from __future__ import annotations

from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor

_BLOCK = 256
_DECADES = 7


@lru_cache
def table(signed: bool, device: torch.device) -> Tensor:
    """The 256 numbers that there are, ascending, in [-1, 1] or [0, 1].

    Seven powers of ten below 1, each with twice as many numbers, equally spaced, as the one below it: 64 signed or
    128 unsigned between 0.1 and 1, and 1 or 2 in the last, where it matters little; with 0 and 1 that makes 256.
    """
    found = [0.0, 1.0]
    for decade in range(_DECADES):
        count = 2 ** (_DECADES - 1 - decade) * (1 if signed else 2)
        middles = [0.1 + 0.9 * (number + 0.5) / count for number in range(count)]
        found += [sign * middle * 10.0**-decade for middle in middles for sign in ((1, -1) if signed else (1,))]
    return torch.tensor(sorted(found), dtype=torch.float32, device=device)


def scales_for(values: Tensor) -> Tensor:
    """Zeros, one for each block."""
    return values.new_zeros(*values.shape[:-1], -(-values.shape[-1] // _BLOCK), dtype=torch.float32)


def encode(values: Tensor, signed: bool) -> tuple[Tensor, Tensor]:
    """fp32 → codes of the same shape, and the scale of each block. Rounded to the nearest: at random, the steps that
    AdamW makes of it were half as far off again (16 instead of 11 %)."""
    blocks = _in_blocks(values)
    scales = blocks.abs().amax(dim=-1)
    parts = blocks / scales.clamp(min=torch.finfo(torch.float32).tiny)[..., None]
    known = table(signed, values.device)
    codes = torch.bucketize(parts, (known[1:] + known[:-1]) / 2, out_int32=True)
    if not signed:  # what a step is divided by must not become zero, or the step is endless
        codes = torch.where(parts > 0, codes.clamp(min=1), codes)
    return codes.to(torch.uint8).flatten(-2)[..., : values.shape[-1]], scales


def decode(codes: Tensor, scales: Tensor, signed: bool) -> Tensor:
    """What `encode` was given, as near as 8 bits can say it."""
    blocks = _in_blocks(table(signed, codes.device)[codes.int()])
    return (blocks * scales[..., None]).flatten(-2)[..., : codes.shape[-1]]


def _in_blocks(values: Tensor) -> Tensor:
    """[..., n] → [..., blocks, size of a block], the last filled up with zeros."""
    size = min(_BLOCK, values.shape[-1])
    missing = -values.shape[-1] % size
    return (F.pad(values, (0, missing)) if missing else values).unflatten(-1, (-1, size))
