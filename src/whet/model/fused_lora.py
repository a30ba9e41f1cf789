"""Adapters computed together with the layers they stand in, for speed and memory; peft keeps owning them.

Layers, MLPs and attentions get another class, derived from their own: names, weights, saving, merging and switching
adapters off are what they were, and wherever the fused way does not apply their own forward runs.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from whet.model.derived import become
from whet.model.gated import LAYERS, is_gated_mlp
from whet.model.lora_linear import lora_linear
from whet.model.lora_mlp import lora_mlp
from whet.model.lora_products import adapted, mixed_type

_QKV = ("q_proj", "k_proj", "v_proj")


def fuse_lora_(model: nn.Module) -> int:
    """Fuse what can be: MLPs with their adapters, q, k and v, and every other layer with its own. Gives how many."""
    mlps = [module for module in model.modules() if _is_adapted_mlp(module)]
    attentions = [module for module in model.modules() if _shares_input(module)]
    outer: Any = next((module for module in model.modules() if hasattr(module, "get_output_embeddings")), None)
    head = outer and outer.get_output_embeddings()  # which the loss asks for its weights, and does not call
    layers = [module for module in model.modules() if _is_adapted_linear(module) and module is not head]
    for layer in layers:  # those inside of others too, for when something calls them by themselves
        become(layer, _FusedLinear)
    for modules, fused in ((mlps, _FusedMLP), (attentions, _FusedAttention)):
        for module in modules:
            become(module, fused)
    inside = {module.get_submodule(name) for module in attentions for name in _QKV}
    inside.update(layer for mlp in mlps for layer in mlp.children())
    return len(mlps) + len(attentions) + sum(layer not in inside for layer in layers)


def spare_memory_(model: nn.Module) -> None:
    """Have fused MLPs use less memory in the backward pass, for models of which little is kept for it."""
    for module in model.modules():
        if isinstance(module, _FusedMLP):
            module.sparing = True


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
    sparing = False
    """Of memory, where little else is kept."""

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        mixed = mixed_type(x)
        dtype = None if mixed else x.dtype
        gate, up, down = adapted(self.gate_proj, dtype), adapted(self.up_proj, dtype), adapted(self.down_proj, dtype)
        if gate is None or up is None or down is None or args or kwargs:
            return super().forward(x, *args, **kwargs)
        return lora_mlp(x.to(mixed) if mixed else x, gate, up, down, self.sparing)


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


def _is_adapted_mlp(module: nn.Module) -> bool:
    layers = [getattr(module, name, None) for name in LAYERS]
    if isinstance(module, _FusedMLP) or any(layer is None or adapted(layer) is None for layer in layers):
        return False
    return is_gated_mlp(module)
