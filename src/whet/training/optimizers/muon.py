"""Muon: matrices are updated by the orthogonalised momentum of their gradients, all other weights by AdamW.

Two flavours share the Nesterov momentum and the gathering of sharded matrices:

- `moonlight`: Newton–Schulz iterations; updates × 0.2 · sqrt(longer side), which gives them AdamW's root mean square of
  0.2, so that one learning rate serves both.
- `nanochat`: Polar Express iterations (arXiv:2505.16932), then NorMuon's second moment (arXiv:2510.05491), which evens
  out the rows of a tall matrix or the columns of a wide one; updates × sqrt(max(1, rows / columns)); weight decay only
  where it has the sign of the update (cautious). Learning rates of nanochat carry over.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from whet.parallel.dtensor import local_shard_of, local_tensor, shard_like, unsharded
from whet.training.optimizers.adamw import AdamW
from whet.training.optimizers.state_precision import copy_rounded, update_dtype

_NS_A, _NS_B, _NS_C = 3.4445, -4.7750, 2.0315  # steep at zero; singular values end between 0.7 and 1.2, not at 1
_ITERATIONS = 5
_TINY = 1e-7
_POLAR_EXPRESS = (
    (8.156554524902461, -22.48329292557795, 15.878769915207462),
    (4.042929935166739, -2.808917465908714, 0.5000178451051316),
    (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
    (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
    (2.3465413258596377, -1.7097828382687081, 0.42323551169305323),
)
"""The paper's coefficients for five iterations with a safety factor of 2 %."""
_POLAR_MARGIN, _POLAR_TINY = 1.02, 1e-6
_SECOND_MOMENT_DECAY, _SECOND_MOMENT_TINY = 0.95, 1e-10


class Muon(AdamW):
    """Muon with Nesterov momentum for the group `matrices`."""

    def __init__(
        self, groups: list[dict[str, Any]], *, momentum: float, momentum_start: float, momentum_warmup: int,
        flavour: str = "moonlight", **rest: Any,
    ) -> None:  # fmt: skip
        self._momentum, self._flavour = (momentum_start, momentum, momentum_warmup), flavour
        super().__init__(groups, **rest)

    def momentum(self, done: int | None = None) -> float:
        """The momentum of the step after `done` steps; by default of the next one."""
        start, end, warmup = self._momentum
        if done is None:
            done = max((int(state["step"]) for state in self.state.values()), default=0)
        return end if done >= warmup else start + (end - start) * done / warmup

    def _orthogonalizes(self, group: dict[str, Any], weight: Tensor) -> bool:
        """Depthwise convolutions are stacks of single rows, which have nothing to orthogonalise."""
        least = 1 if self._flavour == "nanochat" and weight.ndim == 2 else 2
        return group["name"] == "matrices" and min(weight.shape[-2:]) >= least

    def _initial_state(self, group: dict[str, Any], weight: Tensor) -> dict[str, Tensor]:
        if not self._orthogonalizes(group, weight):
            return super()._initial_state(group, weight)
        state = {"momentum": torch.zeros_like(weight, dtype=update_dtype(weight))}
        if self._flavour == "nanochat":  # of the whole matrix, on every process: a number for each row or column
            *stack, rows, columns = weight.shape
            shape = (*stack, rows, 1) if rows >= columns else (*stack, 1, columns)
            state["second_moment"] = local_tensor(weight).new_zeros(shape, dtype=update_dtype(weight))
        return state

    def _update(self, group: dict[str, Any], weight: Tensor, gradient: Tensor, step: int) -> None:
        if not self._orthogonalizes(group, weight):
            super()._update(group, weight, gradient, step)
            return
        dtype, momentum = update_dtype(weight), self.momentum(step - 1)
        scaled = self._scaled_gradient(local_tensor(gradient), dtype)
        mean = local_tensor(self.state[weight]["momentum"]).lerp_(scaled, 1 - momentum)
        matrix = _gather(scaled.lerp(mean, momentum), weight)
        if self._flavour == "nanochat":
            whole = even_out(polar_express(matrix).to(dtype), self.state[weight]["second_moment"])
        else:
            whole = newton_schulz(matrix)
        direction = local_shard_of(weight, whole).to(local_tensor(weight).device, dtype)
        updated, rows, columns = local_tensor(weight).to(dtype), *weight.shape[-2:]
        if self._flavour == "nanochat":
            rate = group["lr"] * max(1.0, rows / columns) ** 0.5
            decayed = torch.where(direction * updated >= 0, updated, 0.0).mul_(rate * group["weight_decay"])
            updated.sub_(decayed).sub_(direction, alpha=rate)
        else:
            updated.mul_(1 - group["lr"] * group["weight_decay"])
            updated.add_(direction, alpha=-group["lr"] * 0.2 * max(rows, columns) ** 0.5)
        copy_rounded(local_tensor(weight), updated, self._generator(weight, step))


def _gather(part: Tensor, weight: Tensor) -> Tensor:
    """The whole matrix of which `part` is this process's shard: half a matrix has other singular vectors.

    With weights offloaded to the host, it is still gathered and computed on the device.
    """
    if not isinstance(weight, DTensor):
        return part
    return unsharded(shard_like(weight, part.to(weight.device_mesh.device_type)))


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


def polar_express(matrix: Tensor) -> Tensor:
    """Like `newton_schulz`, with coefficients that change from iteration to iteration, each chosen for the singular
    values that the last one leaves: all from 1/1000 of the norm on end between 0.84 and 1.15."""
    tall = matrix.shape[-2] > matrix.shape[-1]
    x = matrix.mT if tall else matrix
    if x.is_cuda and x.dtype == torch.float32:
        x = x.bfloat16()
    x = x / (x.norm(dim=(-2, -1), keepdim=True) * _POLAR_MARGIN + _POLAR_TINY)
    for a, b, c in _POLAR_EXPRESS:
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.mT if tall else x


def even_out(direction: Tensor, second_moment: Tensor) -> Tensor:
    """NorMuon: divide each row of a tall `direction`, or each column of a wide one, by the root of its running mean
    square, and keep the norm of the whole. Updates `second_moment`, which may be in the host's memory."""
    rows, columns = direction.shape[-2:]
    axis, size = (-1, columns) if rows >= columns else (-2, rows)
    square = direction.square().mean(dim=axis, keepdim=True)
    running = second_moment.to(square.device).lerp(square, 1 - _SECOND_MOMENT_DECAY)
    second_moment.copy_(running)
    factor = running.clamp(min=_SECOND_MOMENT_TINY).rsqrt()
    norm = (square.sum(dim=(-2, -1), keepdim=True) * size).sqrt()
    scaled = (square * size * factor.square()).sum(dim=(-2, -1), keepdim=True).sqrt()
    return direction * (factor * (norm / scaled.clamp(min=_SECOND_MOMENT_TINY)))
