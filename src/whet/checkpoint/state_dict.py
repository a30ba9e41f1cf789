"""The tensors of a checkpoint: trainable parameters and optimizer state, by fully qualified name."""

from __future__ import annotations

import torch
from torch import Tensor, nn


def trainable_parameters(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    return [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]


def model_tensors(model: nn.Module) -> dict[str, Tensor]:
    return {f"model.{name}": parameter.detach() for name, parameter in trainable_parameters(model)}


def optimizer_tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    if not optimizer.state:  # before the first step
        init_optimizer_state(optimizer)
    unknown = [name for name, parameter in trainable_parameters(model) if parameter not in optimizer.state]
    assert not unknown, f"the optimizer has no state for {unknown[0]}"
    return {
        f"optimizer.{name}.{key}": value
        for name, parameter in trainable_parameters(model)
        for key, value in optimizer.state[parameter].items()
    }


def init_optimizer_state(optimizer: torch.optim.Optimizer) -> None:
    """Make a fresh optimizer create its state tensors, by a step with lr 0 and zero gradients that changes nothing."""
    rates = [group["lr"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["lr"] = 0.0
        for parameter in group["params"]:
            parameter.grad = torch.zeros_like(parameter, dtype=parameter.grad_dtype)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    for state in optimizer.state.values():
        if "step" in state:
            state["step"].zero_()  # this step does not count
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
