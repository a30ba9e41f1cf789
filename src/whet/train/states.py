"""How an optimizer keeps what it remembers of each weight: in full, in bf16, in 8 bits.

All are plain tensors in the optimizer's state, so they are saved, and moved, like any other. `rows` is a slice of the
first dimension: a large weight is updated part by part, so that only a part is ever held in full.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

import torch
from torch import Tensor

from whet.parallel.shard import divided_as, local
from whet.train.codes import decode, encode, scales_for
from whet.train.rounding import put

_PART = 2**24  # numbers updated at a time
_SMALL = 4096

Rows = Any
"""A slice of the first dimension; `...` of a single number."""


class Keep(Protocol):
    """One way to keep a moment (`exp_avg`, or `exp_avg_sq`, which is never negative)."""

    def start(self, moment: str, weight: Tensor) -> dict[str, Tensor]:
        """Zeros."""

    def read(self, state: dict[str, Tensor], moment: str, rows: Rows, dtype: torch.dtype) -> Tensor:
        """The moment in the type of the arithmetic, to be changed in place and given to `write`."""

    def write(
        self, state: dict[str, Tensor], moment: str, rows: Rows, values: Tensor, chance: torch.Generator
    ) -> None: ...


class InFull:
    """As computed: fp32, or fp64 for weights in fp64."""

    def start(self, moment: str, weight: Tensor) -> dict[str, Tensor]:
        return {moment: torch.zeros_like(weight, dtype=arithmetic_of(weight))}

    def read(self, state: dict[str, Tensor], moment: str, rows: Rows, dtype: torch.dtype) -> Tensor:
        return state[moment][rows]

    def write(self, state: dict[str, Tensor], moment: str, rows: Rows, values: Tensor, chance: torch.Generator) -> None:
        """It was changed in place."""


class InBf16:
    """Rounded at random: rounded to the nearest, a moment would stop following small gradients."""

    def start(self, moment: str, weight: Tensor) -> dict[str, Tensor]:
        return {moment: torch.zeros_like(weight, dtype=torch.bfloat16)}

    def read(self, state: dict[str, Tensor], moment: str, rows: Rows, dtype: torch.dtype) -> Tensor:
        return state[moment][rows].to(dtype)

    def write(self, state: dict[str, Tensor], moment: str, rows: Rows, values: Tensor, chance: torch.Generator) -> None:
        put(state[moment][rows], values, chance)


class In8Bits:
    """Codes with a scale for each block (`codes.py`). Of squares the root is kept: it is what the step divides by,
    and it spans half as many powers of ten."""

    def start(self, moment: str, weight: Tensor) -> dict[str, Tensor]:
        return {
            f"{moment}_codes": torch.zeros_like(weight, dtype=torch.uint8),
            f"{moment}_scales": divided_as(weight, scales_for(local(weight))),  # zeros, whatever the codes say
        }

    def read(self, state: dict[str, Tensor], moment: str, rows: Rows, dtype: torch.dtype) -> Tensor:
        signed = moment != "exp_avg_sq"
        values = decode(state[f"{moment}_codes"][rows], state[f"{moment}_scales"][rows], signed).to(dtype)
        return values if signed else values.square_()

    def write(self, state: dict[str, Tensor], moment: str, rows: Rows, values: Tensor, chance: torch.Generator) -> None:
        signed = moment != "exp_avg_sq"
        codes, scales = encode(values.float() if signed else values.sqrt().float(), signed)
        state[f"{moment}_codes"][rows] = codes
        state[f"{moment}_scales"][rows] = scales


def keep_in(bits: int, group: str, weight: Tensor) -> Keep:
    """How the moments of this weight are kept.

    In 8 bits neither vectors and small tensors, which save nothing, nor embeddings: the gradient of a rare token is
    zero in most steps and large in one, which 8 bits follow badly (bitsandbytes keeps them in 32 bits as well).
    """
    if bits == 8:
        return InFull() if weight.ndim < 2 or weight.numel() < _SMALL or group == "embedding" else In8Bits()
    return InBf16() if bits == 16 else InFull()


def arithmetic_of(weight: Tensor) -> torch.dtype:
    """What a weight's update is computed in."""
    return torch.promote_types(weight.dtype, torch.float32)


def parts(weight: Tensor) -> Iterator[Rows]:
    """Slices of a weight, each small enough to be held in full."""
    if weight.ndim == 0:
        yield ...
        return
    rows = max(1, _PART // max(1, weight[0].numel())) if len(weight) else 1
    for start in range(0, len(weight), rows):
        yield slice(start, start + rows)
