"""AdamW for bf16 weights and for states of 16 or 8 bits. For fp32, factory.py uses torch's fused AdamW."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from whet.core.resources import has_triton
from whet.execution.offload import state_to_host
from whet.parallel.dtensor import local_tensor, shard_index
from whet.training.optimizers.state_precision import (
    BlockwiseStorage,
    RoundingGenerators,
    StateStorage,
    choose_storage,
    copy_rounded,
    row_chunks,
    update_dtype,
)


class AdamW(torch.optim.Optimizer):
    """Computes in fp32 (fp64 for fp64 weights), stores its states in `bits`, rounds bf16 weights stochastically.

    States are allocated at once, so their size is known. `step` is on the CPU: reading it does not wait for the device.
    """

    def __init__(
        self, groups: list[dict[str, Any]], *, lr: float, betas: tuple[float, float], eps: float, seed: int,
        bits: int = 32, offloaded: bool = False,
    ) -> None:  # fmt: skip
        """`offloaded`: allocate the states in host memory (execution/offload.py moves them)."""
        super().__init__(groups, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": 0.0})
        self._generators = RoundingGenerators(seed)
        self.gradient_scale = 1.0
        """The factor of the gradients in the next step: clipping without a pass over all gradients."""
        self._decision: Tensor | None = None
        """On the device, during `step_if`: the factor of the gradients, and 0 to skip the step."""
        self._storage: dict[Tensor, StateStorage] = {}
        self._parameter_index: dict[Tensor, int] = {}
        for group in self.param_groups:
            for weight in group["params"]:
                self._storage[weight] = choose_storage(bits, group["name"], weight)
                self._parameter_index[weight] = len(self._parameter_index)
                state = {"step": torch.zeros((), dtype=torch.int64), **self._initial_state(group, weight)}
                self.state[weight] = state_to_host(state) if offloaded else state

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update every weight that has a gradient."""
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is None:
                    continue
                self.state[weight]["step"] += 1
                step = int(self.state[weight]["step"])
                self._update(group, weight, weight.grad, step)

    def step_if(self, scale: Tensor, is_sound: Tensor) -> None:
        """Update with gradients × `scale` unless `is_sound` is 0; both are scalars on the device. The step is counted
        in either case: see `undo_step_count`."""
        self._decision = torch.stack([scale, is_sound]).float()
        try:
            self.step()
        finally:
            self._decision = None

    def undo_step_count(self) -> None:
        """After `step_if` with `is_sound` 0."""
        for weight, state in self.state.items():
            if weight.grad is not None:
                state["step"] -= 1

    def can_decide_on_device(self) -> bool:
        """Whether the Triton kernel updates every weight."""
        return type(self) is AdamW and all(
            self._is_fused(weight) for group in self.param_groups for weight in group["params"]
        )

    def _is_fused(self, weight: Tensor) -> bool:
        here = local_tensor(weight)
        fits = here.is_cuda and here.is_contiguous() and update_dtype(weight) == torch.float32
        return fits and not isinstance(self._storage[weight], BlockwiseStorage) and _fused_kernels() is not None

    def _generator(self, weight: Tensor, step: int) -> torch.Generator:
        """For the stochastic rounding of this weight in this step; every shard has its own."""
        return self._generators.generator(step, self._parameter_index[weight], weight.device, shard_index(weight))

    def _initial_state(self, group: dict[str, Any], weight: Tensor) -> dict[str, Tensor]:
        storage = self._storage[weight]
        return storage.zeros("exp_avg", weight) | storage.zeros("exp_avg_sq", weight)

    def _update(self, group: dict[str, Any], weight: Tensor, gradient: Tensor, step: int) -> None:
        """Element by element, or block by block within a row: each process updates its shard."""
        storage, dtype, whole = self._storage[weight], update_dtype(weight), weight
        state = {key: local_tensor(value) for key, value in self.state[weight].items()}
        weight, gradient = local_tensor(weight), local_tensor(gradient)
        beta1, beta2 = group["betas"]
        rate = group["lr"] / (1 - beta1**step)
        root = (1 - beta2**step) ** 0.5
        decayed = 1 - group["lr"] * group["weight_decay"]
        if self._is_fused(whole):
            scalars = _fused_kernels().AdamWScalars(
                self.gradient_scale, beta1, beta2, group["eps"], rate, root, decayed
            )
            seed = self._generators.seed(step, self._parameter_index[whole], shard_index(whole))
            means = state["exp_avg"], state["exp_avg_sq"]
            _fused_kernels().fused_adamw_(weight, gradient.contiguous(), *means, scalars, seed, self._decision)
            return
        generator = self._generator(whole, step)
        for rows in row_chunks(weight):
            gradients, updated = self._scaled_gradient(gradient[rows], dtype), weight[rows].to(dtype)
            mean = storage.read(state, "exp_avg", rows, dtype).lerp_(gradients, 1 - beta1)
            square = storage.read(state, "exp_avg_sq", rows, dtype).mul_(beta2)
            square.addcmul_(gradients, gradients, value=1 - beta2)
            updated.mul_(decayed)
            updated.addcdiv_(mean, (square.sqrt() / root).add_(group["eps"]), value=-rate)
            storage.write(state, "exp_avg", rows, mean, generator)
            storage.write(state, "exp_avg_sq", rows, square, generator)
            copy_rounded(weight[rows], updated, generator)

    def _scaled_gradient(self, gradient: Tensor, dtype: torch.dtype) -> Tensor:
        """A copy in `dtype`; the gradient itself does not change."""
        exact = gradient.to(dtype)
        return exact if self.gradient_scale == 1 else exact * self.gradient_scale


@functools.cache
def _fused_kernels() -> Any:
    if not has_triton():
        return None
    from whet.training.optimizers import fused_adamw

    return fused_adamw
