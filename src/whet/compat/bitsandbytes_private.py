"""Internals of bitsandbytes, seen in 0.50: how it packs NF4 weights, and the operators that unpack them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

NF4_BLOCK, NF4_SCALE_BLOCK = 64, 256
"""Weights that share a scale, and scales that share one in turn (double quantization)."""
GEMM_4BIT_OP = "bitsandbytes::gemm_4bit"
"""The operator that multiplies with a packed weight; selective recomputation saves its output."""


def quant_state(weight: Any) -> Any:
    """`Params4bit.quant_state`: scales and metadata of a 4-bit weight; None for any other tensor."""
    return getattr(weight, "quant_state", None)


def is_double_quantized_nf4(state: Any) -> bool:
    """Whether a quant_state is NF4 with the block sizes that `dequantize_nf4` takes."""
    return (
        state.quant_type == "nf4"
        and state.blocksize == NF4_BLOCK
        and state.nested
        and state.state2.blocksize == NF4_SCALE_BLOCK
    )


def nf4_parts(weight: Any) -> list[Tensor]:
    """The tensors of a 4-bit weight: packed values, 8-bit scales, their fp32 scales, their code book and offset."""
    state = weight.quant_state
    return [weight.data, state.absmax, state.state2.absmax, state.state2.code, state.offset]


def set_unpacked_shape(weight: Any, shape: torch.Size) -> None:
    """`ds_shape`: where peft looks for the shape of a parameter that does not have its own (made for DeepSpeed, whose
    parameters are empty between uses)."""
    weight.ds_shape = shape


def dequantize_nf4(parts: Any, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """`torch.ops.bitsandbytes.dequantize_blockwise` and `dequantize_4bit`: the weight that `nf4_parts` came from.
    bitsandbytes.functional.dequantize_4bit, which is public, takes a QuantState: not possible inside a custom op."""
    packed, scales, scales_of_scales, code, offset = parts
    scales = torch.ops.bitsandbytes.dequantize_blockwise(scales, scales_of_scales, code, NF4_SCALE_BLOCK, torch.float32)
    return torch.ops.bitsandbytes.dequantize_4bit(packed, scales + offset, NF4_BLOCK, "nf4", shape, dtype)


def disable_cpu_repacking(layer: Any) -> None:
    """`Linear4bit.support_avx512bf16_for_cpu`: on CPUs with bf16 instructions the first evaluation would repack the
    weight for good, with coarser scales, and the operator it then uses has no gradient."""
    layer.support_avx512bf16_for_cpu = False
