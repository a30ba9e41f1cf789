"""Adapters computed together with the layers they stand in, for speed and memory; peft keeps owning them.

Layers, MLPs and attentions get another class, derived from their own: names, weights, saving, merging and switching
adapters off are what they were, and wherever the fused way does not apply their own forward runs.
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

_QKV = ("q_proj", "k_proj", "v_proj")
_LOUD = 1000
"""So many times as large, inputs reach limits that some MLPs set to gate and up."""


def fuse_lora_(model: nn.Module) -> int:
    """Fuse what can be: MLPs with their adapters, q, k and v, and every other layer with its own. Gives how many.

    `model` may be a part of one: a layer whose weights are there while the others' are not.
    """
    mlps = [module for module in model.modules() if _is_gated_mlp(module)]
    attentions = [module for module in model.modules() if _shares_input(module)]
    outer: Any = next((module for module in model.modules() if hasattr(module, "get_output_embeddings")), None)
    head = outer and outer.get_output_embeddings()  # which the loss asks for its weights, and does not call
    layers = [module for module in model.modules() if _is_adapted_linear(module) and module is not head]
    for layer in layers:  # those inside of others too, for when something calls them by themselves
        _become(layer, _FusedLinear)
    for modules, fused in ((mlps, _FusedMLP), (attentions, _FusedAttention)):
        for module in modules:
            _become(module, fused)
    inside = {module.get_submodule(name) for module in attentions for name in _QKV}
    inside.update(layer for mlp in mlps for layer in mlp.children())
    return len(mlps) + len(attentions) + sum(layer not in inside for layer in layers)


class _FusedLinear(nn.Module):
    ready: tuple[Tensor, Tensor] | None = None
    """An input, and the output for it that was made together with others'. Taken once."""

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        if self.ready is not None:
            (known, y), self.ready = self.ready, None
            if x is known:
                return y
        mixed = mixed_type(x)
        layer = None if args or kwargs else adapted(self, None if mixed else x.dtype)
        if layer is None:
            return super().forward(x, *args, **kwargs)
        return lora_linear(x.to(mixed) if mixed else x, layer)[0]


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


class _FusedAttention(nn.Module):
    """Makes q, k and v of its input at once and lays them ready. Its own forward asks each layer as ever; one that asks
    for something else gets that, and nothing is made in advance any more."""

    q_proj: _FusedLinear
    k_proj: _FusedLinear
    v_proj: _FusedLinear
    asks_otherwise = False

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        x = args[0] if args else kwargs.get("hidden_states")
        layers = self.q_proj, self.k_proj, self.v_proj
        if self.asks_otherwise or x is None or not all(isinstance(layer, _FusedLinear) for layer in layers):
            return super().forward(*args, **kwargs)
        mixed = mixed_type(x)
        found = [adapted(layer, None if mixed else x.dtype) for layer in layers]
        known = [layer for layer in found if layer is not None]
        if len(known) == len(layers):
            for layer, y in zip(layers, lora_linear(x.to(mixed) if mixed else x, *known), strict=True):
                layer.ready = x, y
        result = super().forward(*args, **kwargs)
        for layer in layers:
            if layer.ready is not None:
                layer.ready, self.asks_otherwise = None, True
        return result


def _become(module: Any, fused: Any) -> None:
    own: Any = type(module)
    module.__class__ = _derived(own, fused)


@functools.cache
def _derived(own: Any, fused: Any) -> Any:
    """One class for all layers of a kind: the compiler compiles for a class, not for a layer."""
    return type(own.__name__, (fused, own), {"__module__": own.__module__})


def _is_adapted_linear(module: nn.Module) -> bool:
    from peft.tuners.lora.layer import LoraLayer

    return isinstance(module, LoraLayer) and not isinstance(module, _FusedLinear) and adapted(module) is not None


def _shares_input(module: nn.Module) -> bool:
    """Whether it has q, k and v of the same kind. That they get the module's input is seen when they are called."""
    layers = [getattr(module, name, None) for name in _QKV]
    if isinstance(module, _FusedAttention) or not all(isinstance(layer, nn.Module) for layer in layers):
        return False
    found = [adapted(layer) for layer in layers]
    kinds = {(len(layer.frozen), layer.bias is None, layer.a.shape[1]) for layer in found if layer is not None}
    return None not in found and len(kinds) == 1


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
        try:  # in training, so that a dropout shows, and loud, so that a limit does
            return all(_is_swiglu_for(module.train(), x * volume) for volume in (1, _LOUD))
        finally:
            module.train(was_training)


def _is_swiglu_for(module: Any, x: Tensor) -> bool:
    found = module(x)
    own = module.down_proj(module.act_fn(module.gate_proj(x)) * module.up_proj(x))
    return found.shape == own.shape and bool((found - own).norm() <= 1e-2 * own.norm())
