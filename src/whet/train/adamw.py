"""AdamW for weights and states of few bits. Where all is fp32, torch's fused one serves (`optim.py`)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from whet.train.rounding import Chance, put
from whet.train.states import Keep, arithmetic_of, keep_in, parts


class AdamW(torch.optim.Optimizer):
    """Computes in fp32 (fp64 for weights in fp64), keeps its states in `bits`, rounds bf16 weights at random.

    States exist from the start, so their size is known; `step` is kept on the CPU, so that nothing waits for the
    device to know it.
    """

    def __init__(
        self, groups: list[dict[str, Any]], *, lr: float, betas: tuple[float, float], eps: float, seed: int,
        bits: int = 32,
    ) -> None:  # fmt: skip
        super().__init__(groups, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": 0.0})
        self._chance = Chance(seed)
        self._keeps: dict[Tensor, Keep] = {}
        self._numbers: dict[Tensor, int] = {}  # counted once: an offloaded optimizer steps through parts of its groups
        for group in self.param_groups:
            for weight in group["params"]:
                self._keeps[weight] = keep_in(bits, group["name"], weight)
                self._numbers[weight] = len(self._numbers)
                self.state[weight] = {"step": torch.zeros((), dtype=torch.int64), **self._start(group, weight)}

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Move every weight that has a gradient."""
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is None:
                    continue
                self.state[weight]["step"] += 1
                step = int(self.state[weight]["step"])
                chance = self._chance.of(step, self._numbers[weight], weight.device)
                self._move(group, weight, weight.grad, step, chance)

    def _start(self, group: dict[str, Any], weight: Tensor) -> dict[str, Tensor]:
        keep = self._keeps[weight]
        return keep.start("exp_avg", weight) | keep.start("exp_avg_sq", weight)

    def _move(
        self, group: dict[str, Any], weight: Tensor, gradient: Tensor, step: int, chance: torch.Generator
    ) -> None:
        keep, state, arithmetic = self._keeps[weight], self.state[weight], arithmetic_of(weight)
        beta1, beta2 = group["betas"]
        rate = group["lr"] / (1 - beta1**step)
        root = (1 - beta2**step) ** 0.5
        for rows in parts(weight):
            slope, moved = gradient[rows].to(arithmetic), weight[rows].to(arithmetic)
            mean = keep.read(state, "exp_avg", rows, arithmetic).lerp_(slope, 1 - beta1)
            square = keep.read(state, "exp_avg_sq", rows, arithmetic).mul_(beta2)
            square.addcmul_(slope, slope, value=1 - beta2)
            moved.mul_(1 - group["lr"] * group["weight_decay"])
            moved.addcdiv_(mean, (square.sqrt() / root).add_(group["eps"]), value=-rate)
            keep.write(state, "exp_avg", rows, mean, chance)
            keep.write(state, "exp_avg_sq", rows, square, chance)
            put(weight[rows], moved, chance)
