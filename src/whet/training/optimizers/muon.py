"""Muon: matrices are updated by the orthogonalised momentum of their gradients, all other weights by AdamW."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from whet.parallel.dtensor import local_shard_of, local_tensor, shard_like, unsharded
from whet.training.optimizers.adamw import AdamW
from whet.training.optimizers.state import copy_rounded, update_dtype

_NS_A, _NS_B, _NS_C = 3.4445, -4.7750, 2.0315  # steep at zero; singular values end between 0.7 and 1.2, not at 1
_ITERATIONS = 5
_TINY = 1e-7


class Muon(AdamW):
    """Muon with Nesterov momentum for the group `matrices`. Updates are scaled by 0.2 · sqrt(longer side), which gives
    them AdamW's root mean square of 0.2, so that one learning rate serves both."""

    def __init__(
        self, groups: list[dict[str, Any]], *, momentum: float, momentum_start: float, momentum_warmup: int, **rest: Any
    ) -> None:
        self._momentum = (momentum_start, momentum, momentum_warmup)
        super().__init__(groups, **rest)

    def momentum(self, done: int | None = None) -> float:
        """The momentum of the step after `done` steps; by default of the next one."""
        start, end, warmup = self._momentum
        if done is None:
            done = max((int(state["step"]) for state in self.state.values()), default=0)
        return end if done >= warmup else start + (end - start) * done / warmup

    def _initial_state(self, group: dict[str, Any], weight: Tensor) -> dict[str, Tensor]:
        if not _uses_muon(group, weight):
            return super()._initial_state(group, weight)
        return {"momentum": torch.zeros_like(weight, dtype=update_dtype(weight))}

    def _update(self, group: dict[str, Any], weight: Tensor, gradient: Tensor, step: int) -> None:
        if not _uses_muon(group, weight):
            super()._update(group, weight, gradient, step)
            return
        dtype, momentum = update_dtype(weight), self.momentum(step - 1)
        scaled = self._scaled_gradient(local_tensor(gradient), dtype)
        mean = local_tensor(self.state[weight]["momentum"]).lerp_(scaled, 1 - momentum)
        direction = _orthogonalize_shard(scaled.lerp(mean, momentum), weight).to(local_tensor(weight).device, dtype)
        updated = local_tensor(weight).to(dtype).mul_(1 - group["lr"] * group["weight_decay"])
        updated.add_(direction, alpha=-group["lr"] * 0.2 * max(weight.shape[-2:]) ** 0.5)
        copy_rounded(local_tensor(weight), updated, self._generator(weight, step))


def _uses_muon(group: dict[str, Any], weight: Tensor) -> bool:
    """Depthwise convolutions are stacks of single rows, which have nothing to orthogonalise."""
    return group["name"] == "matrices" and min(weight.shape[-2:]) > 1


def _orthogonalize_shard(part: Tensor, weight: Tensor) -> Tensor:
    """This process's shard of an orthogonalised matrix, which is gathered for it and sharded like `weight`.

    With weights offloaded to the host, it is still gathered and computed on the device.
    """
    if not isinstance(weight, DTensor):
        return newton_schulz(part)
    matrix = unsharded(shard_like(weight, part.to(weight.device_mesh.device_type)))
    return local_shard_of(weight, newton_schulz(matrix))


def newton_schulz(matrix: Tensor) -> Tensor:
    """The nearest matrix whose singular values are about 1, by Newton–Schulz iteration; batched over leading axes.

    It needs the unsharded matrix. On CUDA it runs in bf16, which is many times faster and precise enough.
    """
    tall = matrix.shape[-2] > matrix.shape[-1]
    x = matrix.mT if tall else matrix
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp(min=_TINY)
    if x.is_cuda and x.dtype == torch.float32:
        x = x.bfloat16()
    for _ in range(_ITERATIONS):
        gram = x @ x.mT
        x = _NS_A * x + (_NS_B * gram + _NS_C * gram @ gram) @ x
    return x.mT if tall else x
