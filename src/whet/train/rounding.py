"""Stochastic rounding to bf16: up or down at random, so that the mean is right and small updates are not lost.

bf16 keeps 8 bits: an update of less than 1/512 of a weight, rounded to the nearest, changes nothing, ever.
"""

from __future__ import annotations

import torch
from torch import Tensor

from whet.train.passes import seed_of

_LOW_BITS = 0xFFFF
"""What fp32 has and bf16 has not."""


class Chance:
    """Random numbers as a function of (seed, step, number of the weight, part of it): nothing to save, the same on all
    ranks that hold the same."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._generators: dict[torch.device, torch.Generator] = {}

    def of(self, step: int, number: int, device: torch.device, part: int = 0) -> torch.Generator:
        if device not in self._generators:
            self._generators[device] = torch.Generator(device)
        return self._generators[device].manual_seed(self.seed(step, number, part))

    def seed(self, step: int, number: int, part: int = 0) -> int:
        return seed_of("rounding", self._seed, step, number, *([part] if part else []))


def round_at_random(values: Tensor, generator: torch.Generator) -> Tensor:
    """fp32 → bf16; each of the two neighbours as likely as it is near. What bf16 can say does not move."""
    noise = torch.empty(values.shape, dtype=torch.int32, device=values.device)
    noise.random_(0, _LOW_BITS + 1, generator=generator)
    rounded = noise.add_(values.view(torch.int32)).bitwise_and_(~_LOW_BITS).view(torch.float32)
    return torch.where(values.isfinite(), rounded, values).to(torch.bfloat16)  # a NaN's bits could carry over


def put(target: Tensor, values: Tensor, generator: torch.Generator) -> None:
    """Write what was computed into where it is kept, at random where that is bf16. In the same type, `values` is the
    target itself and was changed in place."""
    if target.dtype == torch.bfloat16:
        target.copy_(round_at_random(values.float(), generator))
    elif target.dtype != values.dtype:
        target.copy_(values)
