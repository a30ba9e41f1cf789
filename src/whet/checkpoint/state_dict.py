"""The tensors of a checkpoint: trainable parameters and optimizer state, by fully qualified name."""

from __future__ import annotations

import torch
from torch import Tensor, nn


def trainable_parameters(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    return [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]


def model_tensors(model: nn.Module) -> dict[str, Tensor]:
    return {f"model.{name}": parameter.detach() for name, parameter in trainable_parameters(model)}


def optimizer_tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    init_optimizer_state(optimizer)
    return {
        f"optimizer.{name}.{key}": value
        for name, parameter in trainable_parameters(model)
        for key, value in optimizer.state[parameter].items()
    }


def init_optimizer_state(optimizer: torch.optim.Optimizer) -> None:
    """Make an optimizer create the state tensors of weights that it never updated, before the first step those of all,
    by a step with lr 0 and zero gradients that changes nothing."""
    weights = [weight for group in optimizer.param_groups for weight in group["params"]]
    fresh = [weight for weight in weights if not optimizer.state.get(weight)]
    if not fresh:
        return
    gradients, rates = [weight.grad for weight in weights], [group["lr"] for group in optimizer.param_groups]
    for weight in weights:
        weight.grad = None
    for weight in fresh:
        weight.grad = torch.zeros_like(weight, dtype=weight.grad_dtype)
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    optimizer.step()
    for weight in fresh:
        if "step" in optimizer.state[weight]:
            optimizer.state[weight]["step"].zero_()  # this step does not count
    for weight, gradient in zip(weights, gradients, strict=True):
        weight.grad = gradient
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
