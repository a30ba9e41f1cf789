"""Fused LoRA: replaces the forward passes of peft's layers by fused operators, for speed and memory.

Layers, MLPs and attentions get a class derived from their own. Names, weights, saving, merging and disabling adapters
work as before, and where the fused operator does not apply, the module's own forward runs.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from whet.compat.peft_private import is_lora_layer
from whet.model.frozen_weight import FrozenMatrix, GradientOperand, MatmulOperand, split_parts, sum_of_matmuls
from whet.model.lora.fused_mlp import lora_mlp
from whet.model.lora.low_rank import (
    LoraWeights,
    autocast_dtype,
    cast_stacked,
    extract_lora,
    flatten_tokens,
    matmul_precise,
)
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


# Linear layers that share an input, with their LoRA adapters, as one operator: y = x·Wᵀ + bias + (x·(scale·A)ᵀ)·Bᵀ.
#
# The low-rank product comes first and the full one accumulates into it, which saves a pass over memory; x is multiplied
# with the A of all layers at once. Saved for the backward pass are x and xa = x·Aᵀ. The operator is opaque to
# torch.compile. It computes in the dtype of x; gradients of A and B have the dtype of A and B.
#
# Shape letters: T tokens, E input features, O output features, R rank.


def lora_linear(x: Tensor, *layers: LoraWeights) -> list[Tensor]:
    """The outputs for x [..., E], whose dtype is the compute dtype. Either all layers have a bias or none has."""
    outputs: list[Tensor] = _forward(
        x,
        [part for layer in layers for part in layer.frozen],
        [len(layer.frozen) for layer in layers],
        [layer.bias for layer in layers if layer.bias is not None],
        [matrix for layer in layers for matrix in (layer.a, layer.b)],
        [layer.scale for layer in layers],
    )
    # viewed out here: models such as Gemma 3n change outputs in place, which autograd refuses for views made inside
    return [y_to.view(*x.shape[:-1], y_to.shape[-1]) for y_to in outputs[: len(layers)]]


@torch.library.custom_op(
    "whet::lora_linear",
    mutates_args=(),
    schema="(Tensor x, Tensor[] frozen, int[] sizes, Tensor[] biases, Tensor[] adapters, float[] scales) -> Tensor[]",
)
def _forward(
    x: Tensor, frozen: Sequence[Tensor], sizes: Sequence[int], biases: Sequence[Tensor], adapters: Sequence[Tensor],
    scales: Sequence[float],
) -> list[Tensor]:  # fmt: skip
    """The outputs [T, O], and x·[scaled A of all layers]ᵀ."""
    with torch.autocast(x.device.type, enabled=False):
        x_te = flatten_tokens(x)
        operand = MatmulOperand(x_te)
        scaled = list(zip(adapters[::2], scales, strict=True))
        a_all, *bs = cast_stacked([scaled, *([(b, 1.0)] for b in adapters[1::2])], x.dtype)
        xa = x_te @ a_all.T
        outputs = []
        matrices, given = _frozen_matrices(frozen, sizes, adapters, x.dtype), biases or itertools.repeat(None, len(bs))
        for matrix, b, part, bias in zip(matrices, bs, _split_by_rank(xa, adapters), given, strict=True):
            outputs.append(sum_of_matmuls([(operand, matrix)], (part, b.T), bias))
        return [*outputs, xa]


@_forward.register_fake
def _(
    x: Tensor, frozen: Sequence[Tensor], sizes: Sequence[int], biases: Sequence[Tensor], adapters: Sequence[Tensor],
    scales: Sequence[float],
) -> list[Tensor]:  # fmt: skip
    tokens = x.shape[:-1].numel()
    sizes = (*(len(b) for b in adapters[1::2]), sum(len(a) for a in adapters[::2]))
    return [x.new_empty(tokens, size) for size in sizes]


@torch.library.custom_op(
    "whet::lora_linear_backward",
    mutates_args=(),
    schema="(Tensor[] d_outputs, Tensor x, Tensor xa, Tensor[] frozen, int[] sizes, Tensor[] adapters, "
    "float[] scales, bool needs_x) -> Tensor[]",
)
def _backward(
    d_outputs: Sequence[Tensor], x: Tensor, xa: Tensor, frozen: Sequence[Tensor], sizes: Sequence[int],
    adapters: Sequence[Tensor], scales: Sequence[float], needs_x: bool,
) -> list[Tensor]:  # fmt: skip
    """Gradients of x (empty unless needs_x) and of the adapters."""
    with torch.autocast(x.device.type, enabled=False):
        outer, dtype = list(d_outputs), adapters[0].dtype
        # scale B, not A: then the gradient of A needs no scaling
        scaled = [[pair] for pair in zip(adapters[1::2], scales, strict=True)]
        a_all, *bs = cast_stacked([[(a, 1.0) for a in adapters[::2]], *scaled], x.dtype)
        d_xas = [d_y @ b for d_y, b in zip(outer, bs, strict=True)]
        d_xa = d_xas[0] if len(outer) == 1 else torch.cat(d_xas, dim=1)
        d_bs = [
            matmul_precise(d_y.T, part, dtype) for d_y, part in zip(outer, _split_by_rank(xa, adapters), strict=True)
        ]
        sums = matmul_precise(d_xa.T, flatten_tokens(x), dtype).split([len(a) for a in adapters[::2]])
        # the outputs of a custom operator must not share memory
        d_as = list(sums) if len(outer) == 1 else [part.clone() for part in sums]
        d_x = x.new_empty(0)
        if needs_x:
            terms = zip(map(GradientOperand, outer), _frozen_matrices(frozen, sizes, adapters, x.dtype), strict=True)
            d_x = sum_of_matmuls(terms, (d_xa, a_all)).view(x.shape)
        return [d_x, *(found for pair in zip(d_as, d_bs, strict=True) for found in pair)]


@_backward.register_fake
def _(
    d_outputs: Sequence[Tensor], x: Tensor, xa: Tensor, frozen: Sequence[Tensor], sizes: Sequence[int],
    adapters: Sequence[Tensor], scales: Sequence[float], needs_x: bool,
) -> list[Tensor]:  # fmt: skip
    return [x.new_empty(x.shape if needs_x else 0), *(torch.empty_like(adapter) for adapter in adapters)]


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    x, frozen, ctx.frozen_sizes, biases, adapters, ctx.scales = inputs
    ctx.set_materialize_grads(False)  # xa has no gradient of its own
    ctx.sizes = len(biases), len(adapters)
    ctx.save_for_backward(x, output[-1], *adapters, *frozen)


def _autograd_backward(ctx: Any, d_outputs: list[Tensor | None]) -> tuple[Any, ...]:
    biases, count = ctx.sizes
    x, xa, *others = ctx.saved_tensors
    adapters, frozen = others[:count], others[count:]
    outer = [
        x.new_zeros(len(xa), len(b)) if d_y is None else d_y
        for d_y, b in zip(d_outputs[:-1], adapters[1::2], strict=True)
    ]
    needs_x = ctx.needs_input_grad[0]
    d_x, *found = _backward(outer, x, xa, frozen, ctx.frozen_sizes, adapters, ctx.scales, needs_x)
    return d_x if needs_x else None, [None] * len(frozen), None, [None] * biases, found, None


_forward.register_autograd(_autograd_backward, setup_context=_setup_context)


def _frozen_matrices(
    frozen: Sequence[Tensor], sizes: Sequence[int], adapters: Sequence[Tensor], dtype: torch.dtype
) -> Iterator[FrozenMatrix]:
    """The frozen weight of each layer."""
    for parts, a, b in zip(split_parts(frozen, sizes), adapters[::2], adapters[1::2], strict=True):
        yield FrozenMatrix(parts, a, b, dtype)


def _split_by_rank(xa: Tensor, adapters: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """x·Aᵀ of each layer."""
    return xa.split([len(a) for a in adapters[::2]], dim=1)
