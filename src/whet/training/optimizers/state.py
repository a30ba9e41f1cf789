"""Storage of optimizer states: fp32, bf16 with stochastic rounding, or 8 bits with a scale per block."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from whet.core.seeds import derive_seed
from whet.parallel.dtensor import local_tensor, shard_like

# Numbers in 8 bits: a code from a table times the largest of its block.
#
# A block is up to 256 neighbours in one row, never parts of two rows: a weight cut by rows is encoded as the whole.

_BLOCK_SIZE = 256
_DECADES = 7


@lru_cache
def code_table(signed: bool, device: torch.device) -> Tensor:
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


def zero_scales(values: Tensor) -> Tensor:
    """Zeros, one for each block."""
    return values.new_zeros(*values.shape[:-1], -(-values.shape[-1] // _BLOCK_SIZE), dtype=torch.float32)


def quantize_blockwise(values: Tensor, signed: bool) -> tuple[Tensor, Tensor]:
    """fp32 → codes of the same shape, and the scale of each block. Rounded to the nearest: at random, the steps that
    AdamW makes of it were half as far off again (16 instead of 11 %)."""
    blocks = _to_blocks(values)
    scales = blocks.abs().amax(dim=-1)
    parts = blocks / scales.clamp(min=torch.finfo(torch.float32).tiny)[..., None]
    known = code_table(signed, values.device)
    codes = torch.bucketize(parts, (known[1:] + known[:-1]) / 2, out_int32=True)
    if not signed:  # what a step is divided by must not become zero, or the step is endless
        codes = torch.where(parts > 0, codes.clamp(min=1), codes)
    return codes.to(torch.uint8).flatten(-2)[..., : values.shape[-1]], scales


def dequantize_blockwise(codes: Tensor, scales: Tensor, signed: bool) -> Tensor:
    """What `encode` was given, as near as 8 bits can say it."""
    blocks = _to_blocks(code_table(signed, codes.device)[codes.int()])
    return (blocks * scales[..., None]).flatten(-2)[..., : codes.shape[-1]]


def _to_blocks(values: Tensor) -> Tensor:
    """[..., n] → [..., blocks, size of a block], the last filled up with zeros."""
    size = min(_BLOCK_SIZE, values.shape[-1])
    missing = -values.shape[-1] % size
    return (F.pad(values, (0, missing)) if missing else values).unflatten(-1, (-1, size))


# Stochastic rounding to bf16: up or down at random, so that the mean is right and small updates are not lost.
#
# bf16 keeps 8 bits: an update of less than 1/512 of a weight, rounded to the nearest, changes nothing, ever.

_LOW_BITS = 0xFFFF
"""What fp32 has and bf16 has not."""


class RoundingGenerators:
    """Random numbers as a function of (seed, step, number of the weight, part of it): nothing to save, the same on all
    ranks that hold the same."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._generators: dict[torch.device, torch.Generator] = {}

    def generator(self, step: int, number: int, device: torch.device, part: int = 0) -> torch.Generator:
        if device not in self._generators:
            self._generators[device] = torch.Generator(device)
        return self._generators[device].manual_seed(self.seed(step, number, part))

    def seed(self, step: int, number: int, part: int = 0) -> int:
        return derive_seed("rounding", self._seed, step, number, *([part] if part else []))


def stochastic_round(values: Tensor, generator: torch.Generator) -> Tensor:
    """fp32 → bf16; each of the two neighbours as likely as it is near. What bf16 can say does not move."""
    noise = torch.empty(values.shape, dtype=torch.int32, device=values.device)
    noise.random_(0, _LOW_BITS + 1, generator=generator)
    rounded = noise.add_(values.view(torch.int32)).bitwise_and_(~_LOW_BITS).view(torch.float32)
    return torch.where(values.isfinite(), rounded, values).to(torch.bfloat16)  # a NaN's bits could carry over


def copy_rounded(target: Tensor, values: Tensor, generator: torch.Generator) -> None:
    """Write what was computed into where it is kept, at random where that is bf16. In the same type, `values` is the
    target itself and was changed in place."""
    if target.dtype == torch.bfloat16:
        target.copy_(stochastic_round(values.float(), generator))
    elif target.dtype != values.dtype:
        target.copy_(values)


# How an optimizer keeps what it remembers of each weight: in full, in bf16, in 8 bits.
#
# All are plain tensors in the optimizer's state, so they are saved, and moved, like any other. `rows` is a slice of the
# first dimension: a large weight is updated part by part, so that only a part is ever held in full.

_CHUNK_ELEMENTS = 2**24  # numbers updated at a time
_MIN_QUANTIZED = 4096

RowIndex = Any
"""A slice of the first dimension; `...` of a single number."""


class StateStorage(Protocol):
    """One way to keep a moment (`exp_avg`, or `exp_avg_sq`, which is never negative)."""

    def zeros(self, moment: str, weight: Tensor) -> dict[str, Tensor]:
        """Zeros."""

    def read(self, state: dict[str, Tensor], moment: str, rows: RowIndex, dtype: torch.dtype) -> Tensor:
        """The moment in the type of the dtype, to be changed in place and given to `write`."""

    def write(
        self, state: dict[str, Tensor], moment: str, rows: RowIndex, values: Tensor, chance: torch.Generator
    ) -> None: ...


class FullPrecisionStorage:
    """As computed: fp32, or fp64 for weights in fp64."""

    def zeros(self, moment: str, weight: Tensor) -> dict[str, Tensor]:
        return {moment: torch.zeros_like(weight, dtype=update_dtype(weight))}

    def read(self, state: dict[str, Tensor], moment: str, rows: RowIndex, dtype: torch.dtype) -> Tensor:
        return state[moment][rows]

    def write(
        self, state: dict[str, Tensor], moment: str, rows: RowIndex, values: Tensor, chance: torch.Generator
    ) -> None:
        """It was changed in place."""


class Bf16Storage:
    """Rounded at random: rounded to the nearest, a moment would stop following small gradients."""

    def zeros(self, moment: str, weight: Tensor) -> dict[str, Tensor]:
        return {moment: torch.zeros_like(weight, dtype=torch.bfloat16)}

    def read(self, state: dict[str, Tensor], moment: str, rows: RowIndex, dtype: torch.dtype) -> Tensor:
        return state[moment][rows].to(dtype)

    def write(
        self, state: dict[str, Tensor], moment: str, rows: RowIndex, values: Tensor, chance: torch.Generator
    ) -> None:
        copy_rounded(state[moment][rows], values, chance)


class BlockwiseStorage:
    """Codes with a scale for each block (`codes.py`). Of squares the root is kept: it is what the step divides by,
    and it spans half as many powers of ten."""

    def zeros(self, moment: str, weight: Tensor) -> dict[str, Tensor]:
        return {
            f"{moment}_codes": torch.zeros_like(weight, dtype=torch.uint8),
            f"{moment}_scales": shard_like(weight, zero_scales(local_tensor(weight))),  # zeros, whatever the codes say
        }

    def read(self, state: dict[str, Tensor], moment: str, rows: RowIndex, dtype: torch.dtype) -> Tensor:
        signed = moment != "exp_avg_sq"
        values = dequantize_blockwise(state[f"{moment}_codes"][rows], state[f"{moment}_scales"][rows], signed).to(dtype)
        return values if signed else values.square_()

    def write(
        self, state: dict[str, Tensor], moment: str, rows: RowIndex, values: Tensor, chance: torch.Generator
    ) -> None:
        signed = moment != "exp_avg_sq"
        codes, scales = quantize_blockwise(values.float() if signed else values.sqrt().float(), signed)
        state[f"{moment}_codes"][rows] = codes
        state[f"{moment}_scales"][rows] = scales


def choose_storage(bits: int, group: str, weight: Tensor) -> StateStorage:
    """How the moments of this weight are kept.

    In 8 bits neither vectors and small tensors, which save nothing, nor embeddings: the gradient of a rare token is
    zero in most steps and large in one, which 8 bits follow badly (bitsandbytes keeps them in 32 bits as well).
    """
    if bits == 8:
        return (
            FullPrecisionStorage()
            if weight.ndim < 2 or weight.numel() < _MIN_QUANTIZED or group == "embedding"
            else BlockwiseStorage()
        )
    return Bf16Storage() if bits == 16 else FullPrecisionStorage()


def update_dtype(weight: Tensor) -> torch.dtype:
    """What a weight's update is computed in."""
    return torch.promote_types(weight.dtype, torch.float32)


def row_chunks(weight: Tensor) -> Iterator[RowIndex]:
    """Slices of a weight, each small enough to be held in full."""
    if weight.ndim == 0:
        yield ...
        return
    rows = max(1, _CHUNK_ELEMENTS // max(1, weight[0].numel())) if len(weight) else 1
    for start in range(0, len(weight), rows):
        yield slice(start, start + rows)
