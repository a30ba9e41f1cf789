"""Storage of optimizer states: fp32, bf16 with stochastic rounding, or 8 bits with a scale per block."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from whet.core.distributed import derive_seed
from whet.parallel.dtensor import local_tensor, shard_like

# Blockwise 8-bit quantization: a code from a table × the absolute maximum of its block.
#
# A block is up to 256 neighbours within one row, so a row-sharded weight is quantized like the whole.

_BLOCK_SIZE = 256
_DECADES = 7


@lru_cache
def code_table(signed: bool, device: torch.device) -> Tensor:
    """The 256 representable values, ascending, in [-1, 1] or [0, 1].

    Seven decades below 1, each with twice as many equally spaced values as the one below it: 64 signed or 128 unsigned
    between 0.1 and 1, and 1 or 2 in the last; with 0 and 1 that makes 256.
    """
    values = [0.0, 1.0]
    for decade in range(_DECADES):
        count = 2 ** (_DECADES - 1 - decade) * (1 if signed else 2)
        middles = [0.1 + 0.9 * (number + 0.5) / count for number in range(count)]
        values += [sign * middle * 10.0**-decade for middle in middles for sign in ((1, -1) if signed else (1,))]
    return torch.tensor(sorted(values), dtype=torch.float32, device=device)


def zero_scales(values: Tensor) -> Tensor:
    """One zero for each block."""
    return values.new_zeros(*values.shape[:-1], -(-values.shape[-1] // _BLOCK_SIZE), dtype=torch.float32)


def quantize_blockwise(values: Tensor, signed: bool) -> tuple[Tensor, Tensor]:
    """fp32 → codes of the same shape, and the scale of each block. Rounded to nearest: with stochastic rounding, the
    error of AdamW's updates was 16 % instead of 11 %."""
    blocks = _to_blocks(values)
    scales = blocks.abs().amax(dim=-1)
    parts = blocks / scales.clamp(min=torch.finfo(torch.float32).tiny)[..., None]
    known = code_table(signed, values.device)
    codes = torch.bucketize(parts, (known[1:] + known[:-1]) / 2, out_int32=True)
    if not signed:  # a positive denominator must not become zero: the update would be infinite
        codes = torch.where(parts > 0, codes.clamp(min=1), codes)
    return codes.to(torch.uint8).flatten(-2)[..., : values.shape[-1]], scales


def dequantize_blockwise(codes: Tensor, scales: Tensor, signed: bool) -> Tensor:
    """The inverse of `quantize_blockwise`, up to rounding."""
    blocks = _to_blocks(code_table(signed, codes.device)[codes.int()])
    return (blocks * scales[..., None]).flatten(-2)[..., : codes.shape[-1]]


def _to_blocks(values: Tensor) -> Tensor:
    """[..., n] → [..., blocks, block size], padded with zeros."""
    size = min(_BLOCK_SIZE, values.shape[-1])
    missing = -values.shape[-1] % size
    return (F.pad(values, (0, missing)) if missing else values).unflatten(-1, (-1, size))


# Stochastic rounding to bf16: up or down at random, unbiased, so that small updates are not lost.
#
# bf16 has 8 significant bits: rounded to nearest, an update below 1/512 of a weight never changes it.

_LOW_BITS = 0xFFFF
"""The bits of fp32 that bf16 does not have."""


class RoundingGenerators:
    """Random generators seeded by (seed, step, index of the weight, shard): nothing to save, and equal on all ranks
    that hold the same shard."""

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
    """fp32 → bf16, to either neighbour with a probability proportional to closeness; exact for bf16 values."""
    noise = torch.empty(values.shape, dtype=torch.int32, device=values.device)
    noise.random_(0, _LOW_BITS + 1, generator=generator)
    rounded = noise.add_(values.view(torch.int32)).bitwise_and_(~_LOW_BITS).view(torch.float32)
    return torch.where(values.isfinite(), rounded, values).to(
        torch.bfloat16
    )  # the carry could turn a NaN into a number


def copy_rounded(target: Tensor, values: Tensor, generator: torch.Generator) -> None:
    """Store computed values, with stochastic rounding into bf16. With the same dtype, `values` is the target itself,
    changed in place."""
    if target.dtype == torch.bfloat16:
        target.copy_(stochastic_round(values.float(), generator))
    elif target.dtype != values.dtype:
        target.copy_(values)


# Storage of optimizer states: full precision, bf16, or 8 bits.
#
# All are plain tensors in the optimizer's state, saved and moved like any other. `rows` is a slice of the first
# dimension: a large weight is updated in chunks, so that only a chunk is ever in full precision.

_CHUNK_ELEMENTS = 2**24  # updated at a time
_MIN_QUANTIZED = 4096

RowIndex = Any
"""A slice of the first dimension; `...` for a scalar."""


class StateStorage(Protocol):
    """How a moment is stored: `exp_avg`, or `exp_avg_sq`, which is never negative."""

    def zeros(self, moment: str, weight: Tensor) -> dict[str, Tensor]:
        """New tensors for the optimizer's state."""

    def read(self, state: dict[str, Tensor], moment: str, rows: RowIndex, dtype: torch.dtype) -> Tensor:
        """The moment in `dtype`, to be changed in place and passed to `write`."""

    def write(
        self, state: dict[str, Tensor], moment: str, rows: RowIndex, values: Tensor, generator: torch.Generator
    ) -> None: ...


class FullPrecisionStorage:
    """fp32, or fp64 for fp64 weights."""

    def zeros(self, moment: str, weight: Tensor) -> dict[str, Tensor]:
        return {moment: torch.zeros_like(weight, dtype=update_dtype(weight))}

    def read(self, state: dict[str, Tensor], moment: str, rows: RowIndex, dtype: torch.dtype) -> Tensor:
        return state[moment][rows]

    def write(
        self, state: dict[str, Tensor], moment: str, rows: RowIndex, values: Tensor, generator: torch.Generator
    ) -> None:
        """`read` returned the storage itself."""


class Bf16Storage:
    """bf16 with stochastic rounding: rounded to nearest, a moment would ignore small gradients."""

    def zeros(self, moment: str, weight: Tensor) -> dict[str, Tensor]:
        return {moment: torch.zeros_like(weight, dtype=torch.bfloat16)}

    def read(self, state: dict[str, Tensor], moment: str, rows: RowIndex, dtype: torch.dtype) -> Tensor:
        return state[moment][rows].to(dtype)

    def write(
        self, state: dict[str, Tensor], moment: str, rows: RowIndex, values: Tensor, generator: torch.Generator
    ) -> None:
        copy_rounded(state[moment][rows], values, generator)


class BlockwiseStorage:
    """8-bit codes with a scale per block. For `exp_avg_sq` the square root is stored: the update divides by it, and it
    spans half as many decades."""

    def zeros(self, moment: str, weight: Tensor) -> dict[str, Tensor]:
        return {
            f"{moment}_codes": torch.zeros_like(weight, dtype=torch.uint8),
            f"{moment}_scales": shard_like(weight, zero_scales(local_tensor(weight))),
        }

    def read(self, state: dict[str, Tensor], moment: str, rows: RowIndex, dtype: torch.dtype) -> Tensor:
        signed = moment != "exp_avg_sq"
        values = dequantize_blockwise(state[f"{moment}_codes"][rows], state[f"{moment}_scales"][rows], signed).to(dtype)
        return values if signed else values.square_()

    def write(
        self, state: dict[str, Tensor], moment: str, rows: RowIndex, values: Tensor, generator: torch.Generator
    ) -> None:
        signed = moment != "exp_avg_sq"
        codes, scales = quantize_blockwise(values.float() if signed else values.sqrt().float(), signed)
        state[f"{moment}_codes"][rows] = codes
        state[f"{moment}_scales"][rows] = scales


def choose_storage(bits: int, group: str, weight: Tensor) -> StateStorage:
    """The storage of a weight's moments.

    With 8 bits, vectors and small tensors stay in fp32, because they save nothing, and so do embeddings, as in
    bitsandbytes: the gradient of a rare token is zero in most steps and large in one.
    """
    if bits == 8:
        return (
            FullPrecisionStorage()
            if weight.ndim < 2 or weight.numel() < _MIN_QUANTIZED or group == "embedding"
            else BlockwiseStorage()
        )
    return Bf16Storage() if bits == 16 else FullPrecisionStorage()


def update_dtype(weight: Tensor) -> torch.dtype:
    """The dtype in which a weight's update is computed."""
    return torch.promote_types(weight.dtype, torch.float32)


def row_chunks(weight: Tensor) -> Iterator[RowIndex]:
    """Slices of a weight, each small enough for a full-precision copy."""
    if weight.ndim == 0:
        yield ...
        return
    rows = max(1, _CHUNK_ELEMENTS // max(1, weight[0].numel())) if len(weight) else 1
    for start in range(0, len(weight), rows):
        yield slice(start, start + rows)
