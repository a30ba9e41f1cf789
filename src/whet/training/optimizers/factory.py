"""The optimizer of a run: parameter groups, construction, the update with clipped gradients, learning rates."""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from whet.compat.torch_private import foreach_mul_, fused_adamw_step
from whet.core.errors import WhetError
from whet.model.loss.loss_model import LossModel
from whet.parallel.dtensor import local_tensor
from whet.training.config import OptimizerConfig
from whet.training.optimizers.adamw import AdamW
from whet.training.optimizers.muon import Muon

# Parameter groups: learning rate and weight decay by kind of weight.

_GROUP_DESCRIPTIONS = {
    "embedding": "an embedding",
    "head": "an output head of its own (a head tied to the embedding counts as embedding)",
    "matrices": "a matrix",
    "scalars": "a vector or a single number",
}


def build_param_groups(model: nn.Module, config: OptimizerConfig) -> list[dict[str, Any]]:
    """The trainable weights in groups with `name`, peak learning rate `highest` and weight decay; no empty groups."""
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
            highest = config.scale * (config.lr if rate is None else rate)
            rule = {"name": name, "highest": highest, "weight_decay": decay}
            groups.extend({"params": alike, **rule} for alike in _group_by_mesh(parameters))
        elif rate is not None:
            raise WhetError(
                f"train.optimizer.{key}: {rate}, but this run does not train {_GROUP_DESCRIPTIONS[name]}. Remove it"
            )
    return _nanochat_groups(model, groups) if config.name == "muon" and config.flavour == "nanochat" else groups


def _nanochat_groups(model: nn.Module, groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rates as nanochat means them: those of embedding and head shrink with the root of the model's width, and the
    scalars of its layers have rules of their own. Only matrices decay."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    embedding = _find_module(model, "get_input_embeddings")
    found = []
    for group in groups:
        if group["name"] in ("embedding", "head") and embedding is not None:
            group["highest"] *= (embedding.weight.shape[-1] / _NANOCHAT_WIDTH) ** -0.5
        if group["name"] != "matrices":
            group["weight_decay"] = 0.0
        for ending, factor, changes in _NANOCHAT_SCALARS if group["name"] == "scalars" else ():
            own = [weight for weight in group["params"] if names[id(weight)].endswith(ending)]
            group["params"] = [weight for weight in group["params"] if not names[id(weight)].endswith(ending)]
            if own:
                found.append(group | {"params": own, "name": ending, "highest": group["highest"] * factor} | changes)
        found += [group] if group["params"] else []
    return found


_NANOCHAT_WIDTH = 768  # for which nanochat's rates of embedding and head are given
_NANOCHAT_SCALARS: tuple[tuple[str, float, dict[str, Any]], ...] = (
    ("resid_lambdas", 0.01, {}),
    ("x0_lambdas", 1.0, {"betas": (0.96, 0.95)}),
)
"""Ending of a name, factor of scalar_lr, other settings."""


def _group_by_mesh(parameters: list[nn.Parameter]) -> list[list[nn.Parameter]]:
    """torch's fused optimizers need weights of one device mesh. With tensor parallelism, weights are on several: norms
    are replicated over the tensor axis, matrices and some biases are sharded."""
    by_mesh: dict[Any, list[nn.Parameter]] = {}
    for parameter in parameters:
        mesh = parameter.device_mesh if isinstance(parameter, DTensor) else None
        by_mesh.setdefault(mesh, []).append(parameter)
    return list(by_mesh.values())


def _sort_parameters(model: nn.Module) -> dict[str, list[nn.Parameter]]:
    """The trainable weights by group. Stacked experts and LoRA factors are matrices."""
    embedding, head = (
        _module_parameter_ids(_find_module(model, "get_input_embeddings"), *_embeddings(model)),
        _module_parameter_ids(_find_module(model, "get_output_embeddings")),
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


def _find_module(model: nn.Module, getter: str) -> Any | None:
    """The model's embedding or head."""
    inner = model.language_model if isinstance(model, LossModel) else model
    return getattr(inner, getter)() if hasattr(inner, getter) else None


def _embeddings(model: nn.Module) -> list[nn.Module]:
    """Tables by token, position or layer: their rows are looked up, so nothing about them is a matrix product."""
    return [module for module in model.modules() if isinstance(module, nn.Embedding)]


def _module_parameter_ids(*modules: nn.Module | None) -> set[int]:
    """The weights of some modules, without LoRA weights inside them."""
    named = (pair for module in modules if module is not None for pair in module.named_parameters())
    return {id(parameter) for name, parameter in named if not name.startswith("lora_")}


# Construction.

_STATE_BITS = {"adamw": 32, "adamw16bit": 16, "adamw8bit": 8}


def build_optimizer(
    model: nn.Module, config: OptimizerConfig, seed: int, offloaded: bool = False
) -> torch.optim.Optimizer:
    """The configured optimizer of the trainable weights. AdamW is torch's fused one if weights and states are fp32.

    `offloaded`: allocate the states in host memory; the device may have no room for all of them.
    """
    groups = build_param_groups(model, config)
    adamw: dict[str, Any] = {"lr": config.scale * config.lr, "betas": config.betas, "eps": config.eps}
    if config.name == "muon":
        return Muon(
            groups, flavour=config.flavour, momentum=config.momentum, momentum_start=config.momentum_start,
            momentum_warmup=config.momentum_warmup, seed=seed, offloaded=offloaded, **adamw,
        )  # fmt: skip
    if config.name == "adamw" and all(w.dtype.itemsize >= 4 for group in groups for w in group["params"]):
        return torch.optim.AdamW(groups, fused=True, **adamw)
    return AdamW(groups, bits=_STATE_BITS[config.name], seed=seed, offloaded=offloaded, **adamw)


# The update. Gradients are clipped inside it: a pass over all of them to scale them would cost as much as the update.


def apply_gradients(optimizer: torch.optim.Optimizer, scale: Tensor, is_sound: Tensor) -> None:
    """Update the weights with their gradients × `scale` unless `is_sound` is 0; both are scalars on the device.

    Where the optimizer's kernel can read them itself, this waits for nothing; elsewhere it reads them first.
    """
    if not decides_on_device(optimizer):
        if bool(is_sound):
            optimizer_step(optimizer, float(scale))
    elif isinstance(optimizer, AdamW):
        optimizer.step_if(scale, is_sound)
    else:
        _torch_fused_step(optimizer, scale.reciprocal().float(), (is_sound == 0).float())


def retract_step(optimizer: torch.optim.Optimizer) -> None:
    """After `apply_gradients` with `is_sound` 0: whet's AdamW counted a step that its kernel did not take. torch's
    AdamW counts on the device."""
    if isinstance(optimizer, AdamW) and decides_on_device(optimizer):
        optimizer.undo_step_count()


def optimizer_step(optimizer: torch.optim.Optimizer, scale: float) -> None:
    """Update the weights with their gradients × `scale`, a number that the host knows."""
    if isinstance(optimizer, AdamW):
        optimizer.gradient_scale = scale
        optimizer.step()
    elif scale == 1:
        optimizer.step()
    elif _is_unsharded_fp32_cuda(optimizer):
        _torch_fused_step(optimizer, torch.full((), 1 / scale, device=_weights(optimizer)[0].device), None)
    else:
        gradients = [local_tensor(weight.grad) for weight in _weights(optimizer) if weight.grad is not None]
        foreach_mul_(gradients, scale)
        optimizer.step()


_decides_on_device: WeakKeyDictionary[torch.optim.Optimizer, bool] = WeakKeyDictionary()


def decides_on_device(optimizer: torch.optim.Optimizer) -> bool:
    """Whether `apply_gradients` need not wait: on CUDA, for AdamW with states of 16 or 32 bits on the device. Muon,
    8-bit states, offloaded states and sharded weights under torch's AdamW need the host's numbers."""
    if optimizer not in _decides_on_device:  # one look: a model with adapters has hundreds of weights
        if getattr(optimizer, "steps_in_chunks", False):
            decides = False
        elif isinstance(optimizer, AdamW):
            decides = optimizer.can_decide_on_device()
        else:
            decides = _is_unsharded_fp32_cuda(optimizer)
        _decides_on_device[optimizer] = decides
    return _decides_on_device[optimizer]


def forget_decision(optimizer: torch.optim.Optimizer) -> None:
    """After the optimizer's state has moved to the host."""
    _decides_on_device.pop(optimizer, None)


def _torch_fused_step(optimizer: Any, inverse_scale: Tensor, found_inf: Tensor | None) -> None:
    """A step of torch's fused AdamW: its kernel divides gradients by `inverse_scale` and skips if `found_inf` is 1."""
    if all(map(optimizer.state.get, _weights(optimizer))):
        fused_adamw_step(optimizer, inverse_scale, found_inf)
        return
    # the first step creates the states; the interface of torch.amp.GradScaler
    optimizer.grad_scale, optimizer.found_inf = inverse_scale, found_inf
    try:
        optimizer.step()
    finally:
        optimizer.grad_scale = optimizer.found_inf = None


def _is_unsharded_fp32_cuda(optimizer: torch.optim.Optimizer) -> bool:
    """Whether torch's fused kernel can scale the gradients: all weights are fp32, unsharded and on CUDA."""
    return all(w.is_cuda and w.dtype == torch.float32 and local_tensor(w) is w for w in _weights(optimizer))


def _weights(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [weight for group in optimizer.param_groups for weight in group["params"]]


def set_learning_rates(optimizer: torch.optim.Optimizer, factor: float) -> dict[str, float]:
    """Set each group's learning rate to its peak × `factor`; returns what metrics.jsonl shows."""
    default = optimizer.defaults["lr"]
    rates = {"lr": default * factor}
    for group in optimizer.param_groups:
        group["lr"] = group["highest"] * factor
        if group["highest"] != default:
            rates[f"lr/{group['name']}"] = group["lr"]
    if isinstance(optimizer, Muon):
        rates["momentum"] = optimizer.momentum()
    return rates


def optimizer_state_bytes(optimizer: torch.optim.Optimizer) -> int:
    """The size of the optimizer state after the first step."""
    if isinstance(optimizer, AdamW):
        return sum(value.nbytes for state in optimizer.state.values() for value in state.values())
    return sum(2 * weight.nbytes + 4 for weight in _weights(optimizer))


def gradient_bytes(optimizer: torch.optim.Optimizer) -> int:
    """The size of all gradients, unsharded; those of 16-bit weights may be accumulated in fp32."""
    return sum(weight.numel() * (weight.grad_dtype or weight.dtype).itemsize for weight in _weights(optimizer))
