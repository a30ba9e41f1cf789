"""What the fused LoRA operators share: a layer's weights, casts, and low-rank products with fp32 accumulation.

LoRA adds scale · (x·Aᵀ)·Bᵀ to a layer; the scale is multiplied into A. Shape letters: T tokens, E features, R rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from whet.compat.torch_private import foreach_copy_, foreach_mul
from whet.model.frozen_weight import is_supported_linear, weight_compute_dtype, weight_parts


class LoraWeights(NamedTuple):
    """The tensors of a linear layer with one LoRA adapter."""

    frozen: list[Tensor]
    bias: Tensor | None
    a: Tensor
    b: Tensor
    scale: float


def extract_lora(layer: Any, dtype: torch.dtype | None = None) -> LoraWeights | None:
    """The weights of a peft layer that currently adds scale · (x·Aᵀ)·Bᵀ, and nothing else, to a frozen linear layer.

    None if adapters are merged, disabled or several, with dropout, DoRA or other variants, and, if `dtype` is given,
    if a weight has another compute dtype.
    """
    if not hasattr(layer, "lora_A") or layer.disable_adapters or layer.merged or len(layer.active_adapters) != 1:
        return None
    name, base = layer.active_adapters[0], layer.base_layer
    if name not in layer.lora_A or name in layer.lora_variant or layer.fan_in_fan_out or layer.lora_bias[name]:
        return None
    if getattr(layer.lora_dropout[name], "p", 0.0) != 0.0 or not is_supported_linear(base):
        return None
    a, b = layer.lora_A[name].weight, layer.lora_B[name].weight
    if base.weight.requires_grad or (base.bias is not None and base.bias.requires_grad):
        return None
    if dtype is not None and not weight_compute_dtype(base) == a.dtype == b.dtype == dtype:
        return None
    return LoraWeights(weight_parts(base), base.bias, a, b, layer.scaling[name])


def autocast_dtype(x: Tensor) -> torch.dtype | None:
    """The dtype that autocast computes in on the device of x; None if autocast is off, or x is fp64."""
    kind = x.device.type
    if (
        kind == "meta" or not torch.is_autocast_enabled(kind) or x.dtype == torch.float64
    ):  # torch has no autocast for meta
        return None
    return torch.get_autocast_dtype(kind)


def cast_stacked(stacks: Sequence[Sequence[tuple[Tensor, float]]], dtype: torch.dtype) -> list[Tensor]:
    """Each stack of (matrix, factor) as one matrix in `dtype`: factor · matrix, rounded once, concatenated by rows."""
    stacked, parts = [], []
    for stack in stacks:
        first = stack[0][0]
        whole = first.new_empty(sum(len(matrix) for matrix, _ in stack), first.shape[1], dtype=dtype)
        parts += whole.split([len(matrix) for matrix, _ in stack])
        stacked.append(whole)
    # two launches for all of them: a small model has hundreds of adapters, and a kernel for each took 2 of 16 ms
    matrices, factors = zip(*(pair for stack in stacks for pair in stack), strict=True)
    foreach_copy_(parts, foreach_mul(matrices, factors))
    return stacked


def flatten_tokens(x: Tensor) -> Tensor:
    """[..., E] → [T, E]"""
    return x.reshape(-1, x.shape[-1])


def matmul_precise(left: Tensor, right: Tensor, dtype: torch.dtype) -> Tensor:
    """left @ right in `dtype`, for sums over many tokens: 16-bit operands are accumulated in fp32 and not rounded to 16
    bits."""
    if left.dtype == dtype:
        return left @ right
    if left.is_cuda and torch.version.hip is None and dtype == torch.float32:
        return torch.mm(left, right, out_dtype=torch.float32)
    exact = torch.promote_types(dtype, torch.float32)
    return (left.to(exact) @ right.to(exact)).to(dtype)


class MatmulAccumulator:
    """The sum of several products left @ right, accumulated in `dtype`."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._total: Tensor | None = None

    def add(self, left: Tensor, right: Tensor) -> None:
        total, dtype = self._total, self._dtype
        if total is None:
            self._total = matmul_precise(left, right, dtype)
        elif left.dtype == dtype:
            total.addmm_(left, right)
        elif left.is_cuda and torch.version.hip is None and dtype == torch.float32:
            torch.addmm(total, left, right, out_dtype=torch.float32, out=total)
        else:
            total += matmul_precise(left, right, dtype)

    @property
    def total(self) -> Tensor:
        assert self._total is not None
        return self._total
