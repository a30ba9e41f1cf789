"""Replaces the forward passes of peft's LoRA layers by fused operators, for speed and memory.

Layers, MLPs and attentions get a class derived from their own. Names, weights, saving, merging and disabling adapters
work as before, and where the fused operator does not apply, the module's own forward runs.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from whet.compat.peft_private import is_lora_layer
from whet.model.lora.fused_linear import lora_linear
from whet.model.lora.fused_mlp import lora_mlp
from whet.model.lora.low_rank import autocast_dtype, extract_lora
from whet.model.modules import GATED_MLP_LAYERS, add_mixin, is_gated_mlp

_QKV_LAYERS = ("q_proj", "k_proj", "v_proj")


def fuse_lora_(model: nn.Module) -> int:
    """Fuse MLPs with their adapters, q, k and v, and all other adapted layers; returns the number of fused modules."""
    mlps = [module for module in model.modules() if _is_adapted_mlp(module)]
    attentions = [module for module in model.modules() if _has_matching_qkv(module)]
    outer: Any = next((module for module in model.modules() if hasattr(module, "get_output_embeddings")), None)
    head = outer and outer.get_output_embeddings()  # the loss reads its weights and does not call it
    layers = [module for module in model.modules() if _is_adapted_linear(module) and module is not head]
    for layer in layers:  # also those inside fused modules, for when they are called directly
        add_mixin(layer, _FusedLoraLinear)
    for modules, fused in ((mlps, _FusedLoraMLP), (attentions, _FusedLoraAttention)):
        for module in modules:
            add_mixin(module, fused)
    inside = {module.get_submodule(name) for module in attentions for name in _QKV_LAYERS}
    inside.update(layer for mlp in mlps for layer in mlp.children())
    return len(mlps) + len(attentions) + sum(layer not in inside for layer in layers)


def use_low_memory_backward_(model: nn.Module) -> None:
    """Make fused MLPs use less memory in the backward pass, for models that recompute activations."""
    for module in model.modules():
        if isinstance(module, _FusedLoraMLP):
            module.low_memory = True


class _FusedLoraLinear(nn.Module):
    precomputed: tuple[Tensor, Tensor] | None = None
    """An input and its output, computed together with other layers'; used once."""

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        if self.precomputed is not None:
            (input, y), self.precomputed = self.precomputed, None
            if x is input:
                return y
        mixed = autocast_dtype(x)
        layer = None if args or kwargs else extract_lora(self, None if mixed else x.dtype)
        if layer is None:
            return super().forward(x, *args, **kwargs)
        return lora_linear(x.to(mixed) if mixed else x, layer)[0]


class _FusedLoraMLP(nn.Module):
    gate_proj: nn.Module
    up_proj: nn.Module
    down_proj: nn.Module
    low_memory = False
    """Process the backward pass in smaller chunks of tokens."""

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        mixed = autocast_dtype(x)
        dtype = None if mixed else x.dtype
        gate, up, down = (
            extract_lora(self.gate_proj, dtype),
            extract_lora(self.up_proj, dtype),
            extract_lora(self.down_proj, dtype),
        )
        if gate is None or up is None or down is None or args or kwargs:
            return super().forward(x, *args, **kwargs)
        return lora_mlp(x.to(mixed) if mixed else x, gate, up, down, self.low_memory)


class _FusedLoraAttention(nn.Module):
    """Computes q, k and v of its input at once. Its own forward then calls each layer, which returns the precomputed
    output; an attention that calls them with other inputs gets those computed, and precomputes nothing from then on."""

    q_proj: _FusedLoraLinear
    k_proj: _FusedLoraLinear
    v_proj: _FusedLoraLinear
    qkv_inputs_differ = False

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        x = args[0] if args else kwargs.get("hidden_states")
        layers = self.q_proj, self.k_proj, self.v_proj
        if self.qkv_inputs_differ or x is None or not all(isinstance(layer, _FusedLoraLinear) for layer in layers):
            return super().forward(*args, **kwargs)
        mixed = autocast_dtype(x)
        weights = [extract_lora(layer, None if mixed else x.dtype) for layer in layers]
        fusable = [each for each in weights if each is not None]
        if len(fusable) == len(layers):
            for layer, y in zip(layers, lora_linear(x.to(mixed) if mixed else x, *fusable), strict=True):
                layer.precomputed = x, y
        result = super().forward(*args, **kwargs)
        for layer in layers:
            if layer.precomputed is not None:
                layer.precomputed, self.qkv_inputs_differ = None, True
        return result


def _is_adapted_linear(module: nn.Module) -> bool:
    return is_lora_layer(module) and not isinstance(module, _FusedLoraLinear) and extract_lora(module) is not None


def _has_matching_qkv(module: nn.Module) -> bool:
    """Whether q, k and v can be computed together. Whether they get the same input shows when they are called."""
    layers = [getattr(module, name, None) for name in _QKV_LAYERS]
    if isinstance(module, _FusedLoraAttention) or not all(isinstance(layer, nn.Module) for layer in layers):
        return False
    found = [extract_lora(layer) for layer in layers]
    kinds = {(len(layer.frozen), layer.bias is None, layer.a.shape[1]) for layer in found if layer is not None}
    return None not in found and len(kinds) == 1


def _is_adapted_mlp(module: nn.Module) -> bool:
    layers = [getattr(module, name, None) for name in GATED_MLP_LAYERS]
    if isinstance(module, _FusedLoraMLP) or any(layer is None or extract_lora(layer) is None for layer in layers):
        return False
    return is_gated_mlp(module)
