"""Builds the optimizer of a run: parameter groups, learning rates, and the update with clipped gradients."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from whet.compat.torch_private import foreach_mul_
from whet.core.errors import WhetError
from whet.model.loss.loss_model import LossModel
from whet.parallel.dtensor import local_tensor
from whet.training.config import OptimizerConfig
from whet.training.optimizers.adamw import AdamW
from whet.training.optimizers.muon import Muon

# Which weights are learned at which rate, and which are pulled towards zero.

_GROUP_DESCRIPTIONS = {
    "embedding": "the input embedding",
    "head": "an output head of its own (a head tied to the embedding counts as embedding)",
    "matrices": "a matrix",
    "scalars": "a vector or a single number",
}


def build_param_groups(model: nn.Module, config: OptimizerConfig) -> list[dict[str, Any]]:
    """The trainable weights in groups with `name`, highest rate and weight decay; empty groups are left out."""
    given = {
        "embedding": ("embedding_lr", config.embedding_lr),
        "head": ("head_lr", config.head_lr),
        "matrices": ("matrix_lr", config.matrix_lr),
        "scalars": ("scalar_lr", config.scalar_lr),
    }
    groups: list[dict[str, Any]] = []
    for name, parameters in _sort_parameters(model).items():
        key, rate = given[name]
        if parameters:
            decay = 0.0 if name == "scalars" else config.weight_decay
            highest = config.lr if rate is None else rate
            rule = {"name": name, "highest": highest, "weight_decay": decay}
            groups.extend({"params": alike, **rule} for alike in _group_by_mesh(parameters))
        elif rate is not None:
            raise WhetError(
                f"train.optimizer.{key}: {rate}, but this run does not train {_GROUP_DESCRIPTIONS[name]}. Remove it"
            )
    return groups


def _group_by_mesh(parameters: list[nn.Parameter]) -> list[list[nn.Parameter]]:
    """Torch's optimizers take many weights at once, if they are divided over the same axes. All are, unless processes
    compute layers together: then norms are not divided among them, and biases may be."""
    found: dict[Any, list[nn.Parameter]] = {}
    for parameter in parameters:
        mesh = parameter.device_mesh if isinstance(parameter, DTensor) else None
        found.setdefault(mesh, []).append(parameter)
    return list(found.values())


def _sort_parameters(model: nn.Module) -> dict[str, list[nn.Parameter]]:
    """Each trainable weight in its group; stacked experts and the matrices of adapters are matrices."""
    embedding, head = (
        _module_parameter_ids(model, "get_input_embeddings"),
        _module_parameter_ids(model, "get_output_embeddings"),
    )
    sorted_: dict[str, list[nn.Parameter]] = {"embedding": [], "head": [], "matrices": [], "scalars": []}
    for full_name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        if parameter.ndim < 2 or full_name.endswith("bias"):  # stacked experts have stacked biases
            name = "scalars"
        elif id(parameter) in embedding:
            name = "embedding"
        else:
            name = "head" if id(parameter) in head else "matrices"
        sorted_[name].append(parameter)
    return sorted_


def _module_parameter_ids(model: nn.Module, getter: str) -> set[int]:
    """The weights of the module that a language model names its embedding or head, without adapters inside it."""
    inner = model.language_model if isinstance(model, LossModel) else model
    module = getattr(inner, getter)() if hasattr(inner, getter) else None
    if module is None:
        return set()
    return {id(parameter) for name, parameter in module.named_parameters() if not name.startswith("lora_")}


# The optimizer of a run.

_STATE_BITS = {"adamw": 32, "adamw16bit": 16, "adamw8bit": 8}


def build_optimizer(model: nn.Module, config: OptimizerConfig, seed: int, away: bool = False) -> torch.optim.Optimizer:
    """The rule over the trainable weights, in groups. AdamW is torch's fused one unless something has few bits.

    `away`: what it remembers will be kept in the host's memory, and must not be made on the device all at once.
    """
    groups = build_param_groups(model, config)
    adamw: dict[str, Any] = {"lr": config.lr, "betas": config.betas, "eps": config.eps}
    if config.name == "muon":
        return Muon(
            groups, momentum=config.momentum, momentum_start=config.momentum_start,
            momentum_warmup=config.momentum_warmup, seed=seed, away=away, **adamw,
        )  # fmt: skip
    if config.name == "adamw" and all(w.dtype.itemsize >= 4 for group in groups for w in group["params"]):
        return torch.optim.AdamW(groups, fused=True, **adamw)
    return AdamW(groups, bits=_STATE_BITS[config.name], seed=seed, away=away, **adamw)


def optimizer_step(optimizer: torch.optim.Optimizer, factor: float) -> None:
    """Move the weights by their gradients times `factor` (of StepResult)."""
    if isinstance(optimizer, AdamW):
        optimizer.gradient_scale = factor
    else:
        optimizer.grad_scale = _inverse_scale(optimizer, factor)  # type: ignore[attr-defined]
    optimizer.step()


class ConditionalStep:
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
            self._optimizer.undo_step_count()


def build_conditional_step(optimizer: torch.optim.Optimizer) -> ConditionalStep | None:
    """None where the step takes decisions of the host: elsewhere than on CUDA, for Muon, for states in 8 bits or in the
    host's memory, and for divided weights that torch's AdamW moves."""
    if getattr(optimizer, "steps_in_chunks", False):
        return None
    if isinstance(optimizer, AdamW):
        return ConditionalStep(optimizer) if optimizer.can_decide_on_device() else None
    return ConditionalStep(optimizer) if _is_unsharded_fp32_cuda(optimizer) else None


def _inverse_scale(optimizer: torch.optim.Optimizer, factor: float) -> Tensor | None:
    """What torch's AdamW divides gradients by in its one kernel, in fp32. Elsewhere they are multiplied here."""
    if factor == 1:
        return None
    weights = [weight for group in optimizer.param_groups for weight in group["params"]]
    if _is_unsharded_fp32_cuda(optimizer):
        return torch.full((), 1 / factor, device=weights[0].device)
    foreach_mul_([local_tensor(weight.grad) for weight in weights if weight.grad is not None], factor)
    return None


def _is_unsharded_fp32_cuda(optimizer: torch.optim.Optimizer) -> bool:
    """Whether all of its weights are fp32 and whole on CUDA: torch's kernel scales gradients for those."""
    weights = [weight for group in optimizer.param_groups for weight in group["params"]]
    return all(
        weight.is_cuda and weight.dtype == torch.float32 and local_tensor(weight) is weight for weight in weights
    )


def set_learning_rates(optimizer: torch.optim.Optimizer, factor: float) -> dict[str, float]:
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


def optimizer_state_bytes(optimizer: torch.optim.Optimizer) -> int:
    """What the optimizer keeps, or will keep after its first step, beside the weights."""
    if isinstance(optimizer, AdamW):
        return sum(value.nbytes for state in optimizer.state.values() for value in state.values())
    return sum(2 * weight.nbytes + 4 for group in optimizer.param_groups for weight in group["params"])


def gradient_bytes(optimizer: torch.optim.Optimizer) -> int:
    """What the gradients of weights that are not divided take; those of 16-bit weights may be summed in fp32."""
    weights = [weight for group in optimizer.param_groups for weight in group["params"]]
    return sum(weight.numel() * (weight.grad_dtype or weight.dtype).itemsize for weight in weights)
