"""The optimizer of a run."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from whet.parallel.shard import local
from whet.train.adamw import AdamW
from whet.train.config import OptimizerConfig
from whet.train.groups import make_groups
from whet.train.muon import Muon

_BITS = {"adamw": 32, "adamw16bit": 16, "adamw8bit": 8}


def make_optimizer(model: nn.Module, config: OptimizerConfig, seed: int, away: bool = False) -> torch.optim.Optimizer:
    """The rule over the trainable weights, in groups. AdamW is torch's fused one unless something has few bits.

    `away`: what it remembers will be kept in the host's memory, and must not be made on the device all at once.
    """
    groups = make_groups(model, config)
    adamw: dict[str, Any] = {"lr": config.lr, "betas": config.betas, "eps": config.eps}
    if config.name == "muon":
        return Muon(
            groups, momentum=config.momentum, momentum_start=config.momentum_start,
            momentum_warmup=config.momentum_warmup, seed=seed, away=away, **adamw,
        )  # fmt: skip
    if config.name == "adamw" and all(w.dtype.itemsize >= 4 for group in groups for w in group["params"]):
        return torch.optim.AdamW(groups, fused=True, **adamw)
    return AdamW(groups, bits=_BITS[config.name], seed=seed, away=away, **adamw)


def take_step(optimizer: torch.optim.Optimizer, factor: float) -> None:
    """Move the weights by their gradients times `factor` (of StepResult)."""
    if isinstance(optimizer, AdamW):
        optimizer.factor = factor
    else:
        optimizer.grad_scale = _scale(optimizer, factor)  # type: ignore[attr-defined]
    optimizer.step()


class EarlyMove:
    """A step that the device is asked for before anyone knows whether it is to be taken, which it decides itself."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self.was_asked = False

    def __call__(self, factor: Tensor, fine: Tensor) -> None:
        """Move the weights by their gradients times `factor` if `fine` is not 0; both are on the device."""
        optimizer: Any = self._optimizer
        self.was_asked = True
        if isinstance(optimizer, AdamW):
            optimizer.step_if(factor, fine)
            return
        optimizer.grad_scale, optimizer.found_inf = factor.reciprocal().float(), (fine == 0).float()
        try:
            optimizer.step()
        finally:
            optimizer.grad_scale = optimizer.found_inf = None

    def take_back(self) -> None:
        """The device took no step, so it does not count. torch's optimizers count on the device, and know."""
        if isinstance(self._optimizer, AdamW):
            self._optimizer.count_back()


def early_move(optimizer: torch.optim.Optimizer) -> EarlyMove | None:
    """None where the step takes decisions of the host: elsewhere than on CUDA, for Muon, for states in 8 bits or in the
    host's memory, and for divided weights that torch's AdamW moves."""
    if getattr(optimizer, "steps_in_pieces", False):
        return None
    if isinstance(optimizer, AdamW):
        return EarlyMove(optimizer) if optimizer.can_decide_on_device() else None
    return EarlyMove(optimizer) if _is_plain_on_cuda(optimizer) else None


def _scale(optimizer: torch.optim.Optimizer, factor: float) -> Tensor | None:
    """What torch's AdamW divides gradients by in its one kernel, in fp32. Elsewhere they are multiplied here."""
    if factor == 1:
        return None
    weights = [weight for group in optimizer.param_groups for weight in group["params"]]
    if _is_plain_on_cuda(optimizer):
        return torch.full((), 1 / factor, device=weights[0].device)
    torch._foreach_mul_([local(weight.grad) for weight in weights if weight.grad is not None], factor)
    return None


def _is_plain_on_cuda(optimizer: torch.optim.Optimizer) -> bool:
    """Whether all of its weights are fp32 and whole on CUDA: torch's kernel scales gradients for those."""
    weights = [weight for group in optimizer.param_groups for weight in group["params"]]
    return all(weight.is_cuda and weight.dtype == torch.float32 and local(weight) is weight for weight in weights)


def set_rates(optimizer: torch.optim.Optimizer, factor: float) -> dict[str, float]:
    """Give each group its highest rate × `factor`; returns what metrics.jsonl says of it."""
    usual = optimizer.defaults["lr"]
    rates = {"lr": usual * factor}
    for group in optimizer.param_groups:
        group["lr"] = group["highest"] * factor
        if group["highest"] != usual:
            rates[f"lr/{group['name']}"] = group["lr"]
    if isinstance(optimizer, Muon):
        rates["momentum"] = optimizer.momentum()
    return rates


def state_bytes(optimizer: torch.optim.Optimizer) -> int:
    """What the optimizer keeps, or will keep after its first step, beside the weights."""
    if isinstance(optimizer, AdamW):
        return sum(value.nbytes for state in optimizer.state.values() for value in state.values())
    return sum(2 * weight.nbytes + 4 for group in optimizer.param_groups for weight in group["params"])


def gradient_bytes(optimizer: torch.optim.Optimizer) -> int:
    """What the gradients of weights that are not divided take; those of 16-bit weights may be summed in fp32."""
    weights = [weight for group in optimizer.param_groups for weight in group["params"]]
    return sum(weight.numel() * (weight.grad_dtype or weight.dtype).itemsize for weight in weights)
