"""Adapters computed together with the layers they stand in, for speed and memory; peft keeps owning them.

Layers and MLPs get another class, derived from their own: names, weights, saving, merging and switching adapters off are
what they were, and wherever the fused way does not apply the layer's own forward runs.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from whet.model.frozen_weight import computes_in
from whet.model.lora_linear import lora_linear
from whet.model.lora_mlp import lora_mlp
from whet.model.lora_products import adapted, mixed_type


def fuse_lora_(model: nn.Module) -> int:
    """Fuse what can be: MLPs with their three adapters, and every other layer with its own. Gives how many were."""
    mlps = [module for module in model.modules() if _is_gated_mlp(module)]
    inside = {layer for mlp in mlps for layer in mlp.children()}
    layers = [module for module in model.modules() if _is_adapted_linear(module)]
    for layer in layers:  # those inside of an MLP too, for when something calls them by themselves
        layer.__class__ = _derived(type(layer), _FusedLinear)
    for mlp in mlps:
        mlp.__class__ = _derived(type(mlp), _FusedMLP)
    return len(mlps) + sum(layer not in inside for layer in layers)


class _FusedLinear(nn.Module):
    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        mixed = mixed_type(x)
        layer = None if args or kwargs else adapted(self, None if mixed else x.dtype)
        if layer is None:
            return super().forward(x, *args, **kwargs)
        return lora_linear(x.to(mixed) if mixed else x, layer)


class _FusedMLP(nn.Module):
    gate_proj: nn.Module
    up_proj: nn.Module
    down_proj: nn.Module

    def forward(self, x: Tensor) -> Any:
        mixed = mixed_type(x)
        dtype = None if mixed else x.dtype
        gate, up, down = adapted(self.gate_proj, dtype), adapted(self.up_proj, dtype), adapted(self.down_proj, dtype)
        if gate is None or up is None or down is None:
            return super().forward(x)
        return lora_mlp(x.to(mixed) if mixed else x, gate, up, down)


@functools.cache
def _derived(own: type[nn.Module], fused: type[nn.Module]) -> type[nn.Module]:
    """One class for all layers of a kind: the compiler compiles for a class, not for a layer."""
    return type(own.__name__, (fused, own), {"__module__": own.__module__})


def _is_adapted_linear(module: nn.Module) -> bool:
    from peft.tuners.lora.layer import LoraLayer

    return isinstance(module, LoraLayer) and not isinstance(module, _FusedLinear) and adapted(module) is not None


def _is_gated_mlp(module: nn.Module) -> bool:
    """Whether its forward is down(silu(gate(x)) · up(x)), by what it computes, not by what it is called."""
    names = {name for name, _ in module.named_children()}
    if names != {"gate_proj", "up_proj", "down_proj", "act_fn"} or isinstance(module, _FusedMLP):
        return False
    layers: list[Any] = [module.gate_proj, module.up_proj, module.down_proj]
    return all(adapted(layer) is not None for layer in layers) and _computes_swiglu(module)


def _computes_swiglu(module: Any) -> bool:
    base = module.gate_proj.base_layer
    device, width = base.weight.device, base.in_features
    grid = torch.linspace(-6, 6, 97, device=device)
    if not torch.allclose(module.act_fn(grid), F.silu(grid), rtol=1e-5, atol=1e-6):
        return False
    x = torch.sin(torch.arange(3 * width, device=device)).to(computes_in(base)).view(1, 3, width)  # nothing is drawn
    was_training = module.training
    with torch.no_grad(), torch.random.fork_rng([device] if x.is_cuda else []):
        try:  # in training, so that a dropout shows
            found = module.train()(x)
            own = module.down_proj(module.act_fn(module.gate_proj(x)) * module.up_proj(x))
        finally:
            module.train(was_training)
    return found.shape == own.shape and bool((found - own).norm() <= 1e-2 * own.norm())
