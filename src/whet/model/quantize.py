"""Frozen weights in 4 bits (QLoRA): NF4 by bitsandbytes, with adapters in full numbers beside them.

64 numbers in a row share a scale, the largest of them; each is the nearest of 16 values chosen for a normal
distribution. The scales are kept in 8 bits, 256 of them sharing one in fp32, so that a weight takes
4 + 8/64 + 32/(64·256) = 4.127 bits. Arithmetic is in the type that the weight came in: a product turns the matrix back
into numbers of that type first, in the forward and again in the backward pass.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn

from whet.compat.bitsandbytes_private import NF4_BLOCK, disable_cpu_repacking, quant_state
from whet.core.errors import WhetError
from whet.model.frozen_weight import materialize_weight, weight_compute_dtype, weight_parts

MIN_QUANTIZED_SHARE = 0.5
"""A model with a smaller part of its weights in 4 bits saves less than whoever asked for it expects."""


def require_bitsandbytes() -> None:
    """Refuse at the start of a run, not after its data was prepared."""
    if find_spec("bitsandbytes") is None:
        raise WhetError("quantize: nf4 needs bitsandbytes, which is not installed: pip install 'whet[quantize]'")


def quantize_(model: nn.Module, device: torch.device) -> None:
    """Put every frozen linear layer but the head in 4 bits onto `device`, one after the other.

    The 16-bit weight is freed as its layer is replaced: beside the 4-bit model the device holds one of them at a time,
    if `model` is on the host. A matrix whose rows are no whole number of blocks stays as it is: bitsandbytes'
    kernels for CPUs give such a one back with scales of other rows (seen in 0.50.2: errors of 1.4, not 0.4).
    """
    require_bitsandbytes()
    head = model.get_output_embeddings()  # type: ignore[operator]
    names = [
        name
        for name, module in model.named_modules()
        if type(module) is nn.Linear and module is not head and not module.weight.requires_grad
        and module.in_features % NF4_BLOCK == 0
    ]  # fmt: skip
    if not names:
        raise WhetError(
            "quantize: nf4, but whet finds no linear layers in this model that it could keep in 4 bits. Leave quantize "
            "out"
        )
    for name in names:
        try:
            model.set_submodule(name, _to_linear_4bit(model.get_submodule(name), device))
        except NotImplementedError:
            raise WhetError(
                f"quantize: nf4: bitsandbytes does not serve {device.type} devices here. Leave quantize out"
            ) from None


def _to_linear_4bit(linear: Any, device: torch.device) -> nn.Module:
    from bitsandbytes.nn import Linear4bit, Params4bit

    with torch.device("meta"):
        packed = Linear4bit(
            linear.in_features, linear.out_features, bias=False, compute_dtype=linear.weight.dtype, quant_type="nf4"
        )
    packed.weight = Params4bit(
        linear.weight.data, requires_grad=False, compress_statistics=True, quant_type="nf4", module=packed
    ).to(device)
    packed.bias = None if linear.bias is None else nn.Parameter(linear.bias.data.to(device), requires_grad=False)
    disable_cpu_repacking(packed)
    return packed.train(linear.training)


def is_quantized(layer: nn.Module) -> bool:
    """Whether it is a linear layer with its weight in 4 bits; an adapter around one is not."""
    return isinstance(layer, nn.Linear) and quant_state(layer.weight) is not None


def dequantize_weight(layer: Any) -> Tensor:
    """The weight [out, in] of a 4-bit layer as the numbers that it is multiplied as, in the layer's compute type.

    Nothing here waits for the device.
    """
    return materialize_weight(weight_parts(layer), layer.out_features, layer.in_features, weight_compute_dtype(layer))


def dequantize_linear(layer: Any) -> nn.Linear:
    """A 4-bit layer as the ordinary one that computes the same."""
    with torch.device("meta"):
        plain = nn.Linear(layer.in_features, layer.out_features, bias=False)
    plain.weight = nn.Parameter(dequantize_weight(layer), requires_grad=False)
    plain.bias = layer.bias
    return plain.train(layer.training)


def count_weights(parameter: Tensor) -> int:
    """How many weights a parameter stands for; 4-bit ones are two to a byte."""
    state = quant_state(parameter)
    return parameter.numel() if state is None else int(state.shape.numel())


def quantized_share(model: nn.Module) -> float:
    """The part of the weights that is in 4 bits."""
    parameters = list(model.parameters())
    packed = sum(count_weights(parameter) for parameter in parameters if quant_state(parameter) is not None)
    return packed / sum(map(count_weights, parameters))


def weight_bytes(model: nn.Module) -> int:
    """What the weights take, scales included."""
    total = 0
    for parameter in model.parameters():
        state = quant_state(parameter)
        total += parameter.nbytes
        if state is not None:
            total += state.absmax.nbytes + (state.state2.absmax.nbytes if state.nested else 0)
    return total


def dequantized_bytes(model: nn.Module) -> int:
    """What the weights take once none is in 4 bits any more."""
    total = 0
    for parameter in model.parameters():
        state = quant_state(parameter)
        total += count_weights(parameter) * (parameter.dtype if state is None else state.dtype).itemsize
    return total
