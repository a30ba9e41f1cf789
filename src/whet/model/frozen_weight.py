"""The frozen matrix of a linear layer, as the tensors it is kept in: itself, itself and the scale that it gets in 8
bits, or 4-bit numbers and their scales.

A fused operator takes the tensors and makes the matrix inside, in the forward and again in the backward pass, so that
the matrix of a 4-bit layer is never kept and the compiler sees the same operator for every layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from whet.model.fp8_round import FORWARD, largest_of, scale_for

_BLOCK, _BLOCK_OF_SCALES = 64, 256  # as bitsandbytes packs NF4 with double quantisation


def has_known_weight(layer: nn.Module) -> bool:
    """Whether it is an ordinary linear layer, in 16 bits and more or in NF4, or multiplies in 8 bits with one scale for
    each matrix; other subclasses compute something else."""
    if type(layer) is nn.Linear or _is_tensorwise(layer):
        return True
    state: Any = getattr(getattr(layer, "weight", None), "quant_state", None)
    return (
        state is not None
        and state.quant_type == "nf4"
        and state.blocksize == _BLOCK
        and state.nested
        and state.state2.blocksize == _BLOCK_OF_SCALES
    )


def _is_tensorwise(layer: nn.Module) -> bool:
    return getattr(layer, "is_tensorwise", False)


def is_eight_bit(parts: Sequence[Tensor]) -> bool:
    """Whether the matrix is to be multiplied in 8 bits."""
    return len(parts) == 2


def parts_of(layer: Any) -> list[Tensor]:
    """What the matrix is kept in. A layer that multiplies in 8 bits does so while it is trained only."""
    state = getattr(layer.weight, "quant_state", None)
    if _is_tensorwise(layer) and layer.training:
        return [layer.weight, scale_for(largest_of(layer.weight), FORWARD)]
    if state is None:
        return [layer.weight]
    return [layer.weight.data, state.absmax, state.state2.absmax, state.state2.code, state.offset]


def computes_in(layer: Any) -> torch.dtype:
    """The type of its matrix."""
    state = getattr(layer.weight, "quant_state", None)
    return layer.weight.dtype if state is None else (layer.compute_dtype or state.dtype)


def matrix_from(parts: Sequence[Tensor], out_features: int, in_features: int, dtype: torch.dtype) -> Tensor:
    """[out, in] in `dtype`, of one that is not for 8 bits; a matrix that has that type already is not copied."""
    if len(parts) == 1:
        return parts[0].to(dtype)
    packed, scales, scales_of_scales, code, offset = parts
    scales = torch.ops.bitsandbytes.dequantize_blockwise(
        scales, scales_of_scales, code, _BLOCK_OF_SCALES, torch.float32
    )
    return torch.ops.bitsandbytes.dequantize_4bit(
        packed, scales + offset, _BLOCK, "nf4", (out_features, in_features), dtype
    )
