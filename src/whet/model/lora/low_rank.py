"""What the fused operators of adapters share: the adapter as they take it, and products of thin matrices.

Shape letters: T tokens, E width of the input, R rank. An adapter adds scale · (x·Aᵀ)·Bᵀ; the scale is put into A.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from whet.model.frozen_weight import is_supported_linear, weight_compute_dtype, weight_parts


class LoraWeights(NamedTuple):
    """A linear layer with one adapter, taken apart."""

    frozen: list[Tensor]
    bias: Tensor | None
    a: Tensor
    b: Tensor
    scale: float


def extract_lora(layer: Any, dtype: torch.dtype | None = None) -> LoraWeights | None:
    """`layer` taken apart if it is peft's and adds scale · (x·Aᵀ)·Bᵀ to an ordinary frozen layer, and nothing else now.

    None where adapters are merged or switched off, where there are several, dropout, DoRA and the like, and where
    the layer does not compute in `dtype` throughout (if that is given).
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
    """The type that mixed precision computes in here; None where it is off. It leaves fp64 alone."""
    kind = x.device.type
    if kind == "meta" or not torch.is_autocast_enabled(kind) or x.dtype == torch.float64:  # torch knows none there
        return None
    return torch.get_autocast_dtype(kind)


def cast_stacked(stacks: Sequence[Sequence[tuple[Tensor, float]]], dtype: torch.dtype) -> list[Tensor]:
    """Each stack of (matrix, factor) as one matrix in `dtype`: factor · matrix, rounded once, concatenated by rows."""
    stacked = []
    for stack in stacks:
        first = stack[0][0]
        whole = first.new_empty(sum(len(matrix) for matrix, _ in stack), first.shape[1], dtype=dtype)
        parts = whole.split([len(matrix) for matrix, _ in stack])
        for (matrix, factor), part in zip(stack, parts, strict=True):
            torch.mul(matrix, factor, out=part)
        stacked.append(whole)
    return stacked


def flatten_tokens(x: Tensor) -> Tensor:
    """[T, E], whatever stood before the width."""
    return x.reshape(-1, x.shape[-1])


def matmul_precise(left: Tensor, right: Tensor, dtype: torch.dtype) -> Tensor:
    """left @ right in `dtype`, summed over many tokens: from 16-bit numbers not rounded to 16 bits."""
    if left.dtype == dtype:
        return left @ right
    if left.is_cuda and torch.version.hip is None and dtype == torch.float32:
        return torch.mm(left, right, out_dtype=torch.float32)
    exact = torch.promote_types(dtype, torch.float32)
    return (left.to(exact) @ right.to(exact)).to(dtype)


class MatmulAccumulator:
    """left @ right of several parts, added up in `dtype` without rounding what is added first."""

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
