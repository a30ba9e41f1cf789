"""Muon: matrices move along the orthogonalised momentum of their gradients; all else by AdamW."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from whet.parallel.shard import divided_as, local, my_part
from whet.train.adamw import AdamW
from whet.train.rounding import put
from whet.train.states import arithmetic_of

_A, _B, _C = 3.4445, -4.7750, 2.0315  # steep at zero; singular values end between 0.7 and 1.2, not at 1
_ITERATIONS = 5
_TINY = 1e-7


class Muon(AdamW):
    """The group `matrices` by Muon, with Nesterov's momentum. An orthogonal update has the root mean square of
    AdamW's, 0.2, once multiplied by 0.2 · sqrt(the longer side), so that one rate serves both."""

    def __init__(
        self, groups: list[dict[str, Any]], *, momentum: float, momentum_start: float, momentum_warmup: int, **rest: Any
    ) -> None:
        self._momentum = (momentum_start, momentum, momentum_warmup)
        super().__init__(groups, **rest)

    def momentum(self, done: int | None = None) -> float:
        """Of the step after `done` steps; without a number, of the next one."""
        start, end, warmup = self._momentum
        if done is None:
            done = max((int(state["step"]) for state in self.state.values()), default=0)
        return end if done >= warmup else start + (end - start) * done / warmup

    def _start(self, group: dict[str, Any], weight: Tensor) -> dict[str, Tensor]:
        if not _is_for_muon(group, weight):
            return super()._start(group, weight)
        return {"momentum": torch.zeros_like(weight, dtype=arithmetic_of(weight))}

    def _move(self, group: dict[str, Any], weight: Tensor, gradient: Tensor, step: int) -> None:
        if not _is_for_muon(group, weight):
            super()._move(group, weight, gradient, step)
            return
        arithmetic, momentum = arithmetic_of(weight), self.momentum(step - 1)
        slope = self._slope(local(gradient), arithmetic)
        mean = local(self.state[weight]["momentum"]).lerp_(slope, 1 - momentum)
        direction = _orthogonal(slope.lerp(mean, momentum), weight).to(arithmetic)
        moved = local(weight).to(arithmetic).mul_(1 - group["lr"] * group["weight_decay"])
        moved.add_(direction, alpha=-group["lr"] * 0.2 * max(weight.shape[-2:]) ** 0.5)
        put(local(weight), moved, self._generator(weight, step))


def _is_for_muon(group: dict[str, Any], weight: Tensor) -> bool:
    """Convolutions of single channels are stacks of rows: nothing in them can be orthogonal."""
    return group["name"] == "matrices" and min(weight.shape[-2:]) > 1


def _orthogonal(part: Tensor, weight: Tensor) -> Tensor:
    """This process's part of an orthogonalised matrix that is divided as `weight` is: it takes the whole to know it."""
    if not isinstance(weight, DTensor):
        return orthogonalise(part)
    whole: Any = divided_as(weight, part)
    direction = orthogonalise(whole.full_tensor())
    return my_part(weight, direction)


def orthogonalise(matrix: Tensor) -> Tensor:
    """The nearest matrix whose singular values are about 1, by Newton–Schulz; stacked matrices each on their own.

    It needs the whole matrix. In bf16 on CUDA, where that is many times faster and precise enough.
    """
    tall = matrix.shape[-2] > matrix.shape[-1]
    x = matrix.mT if tall else matrix
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp(min=_TINY)
    if x.is_cuda and x.dtype == torch.float32:
        x = x.bfloat16()
    for _ in range(_ITERATIONS):
        gram = x @ x.mT
        x = _A * x + (_B * gram + _C * gram @ gram) @ x
    return x.mT if tall else x
