"""QLoRA: frozen weights in 4 bits (NF4 by bitsandbytes), with adapters in higher precision.

Blocks of 64 weights share a scale, their amax; each weight is the nearest of 16 quantiles of a normal distribution. The
scales are 8-bit, 256 of them sharing one in fp32 (double quantization): 4 + 8/64 + 32/(64·256) = 4.127 bits for each
weight. Products dequantize the weight to its original dtype, in the forward and again in the backward pass.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn

from whet.compat.bitsandbytes_private import (
    NF4_BLOCK,
    dequantize_nf4,
    disable_cpu_repacking,
    nf4_parts,
    quant_state,
    set_unpacked_shape,
)
from whet.core.errors import WhetError
from whet.model.experts.install import experts_modules, install_experts
from whet.model.frozen_weight import materialize_weight, weight_compute_dtype, weight_parts

MIN_QUANTIZED_SHARE = 0.5
"""Below this share of 4-bit weights, whet warns that quantization saves little."""
_MAX_WEIGHTS = 2**31 - 1
"""In one tensor: bitsandbytes counts them in 32 bits."""


def require_bitsandbytes() -> None:
    """Raise at the start of a run, before data is prepared."""
    if find_spec("bitsandbytes") is None:
        raise WhetError("quantize: nf4 needs bitsandbytes, which is not installed: pip install 'whet[quantize]'")


def quantize_(model: nn.Module, device: torch.device) -> None:
    """Replace every frozen linear layer but the head by a 4-bit one on `device`, and the stacked weights of experts by
    4-bit ones, one after the other.

    With `model` on the host, the device holds the 4-bit model and at most one 16-bit weight. Layers whose in_features
    are not a multiple of the block size stay as they are: bitsandbytes' CPU kernels dequantize them with scales of
    other rows (seen in 0.50.2: errors of 1.4 instead of 0.4).
    """
    require_bitsandbytes()
    stacks = quantized_stacks(model)
    try:
        for name in quantized_layers(model):
            model.set_submodule(name, _to_linear_4bit(model.get_submodule(name), device))
        for name in stacks:
            module, _, key = name.rpartition(".")
            model.get_submodule(module).register_parameter(key, _to_4bit_stack(model.get_parameter(name), device))
    except NotImplementedError:
        raise WhetError(
            f"quantize: nf4: bitsandbytes does not support {device.type} devices. Remove quantize"
        ) from None
    if stacks:
        install_experts(model)  # transformers' own implementations multiply with 16-bit weights


def quantized_stacks(model: nn.Module) -> list[str]:
    """The names of the stacked expert weights [experts, …, …] that `quantize_` replaces; their last dimension is a
    multiple of the block size."""
    return [
        f"{name}.{key}"
        for name, module in experts_modules(model).items()
        for key, weight in module.named_parameters(recurse=False)
        if weight.ndim == 3 and not weight.requires_grad and weight.shape[2] % NF4_BLOCK == 0
        and weight.numel() <= _MAX_WEIGHTS
    ]  # fmt: skip


def _to_4bit_stack(weight: nn.Parameter, device: torch.device) -> nn.Parameter:
    from bitsandbytes.nn import Params4bit

    packed = Params4bit(weight.data, requires_grad=False, compress_statistics=True, quant_type="nf4").to(device)
    set_unpacked_shape(packed, weight.shape)
    return packed


def quantized_layers(model: nn.Module) -> list[str]:
    """The names of the layers that `quantize_` replaces."""
    head = model.get_output_embeddings()  # type: ignore[operator]
    names = [
        name
        for name, module in model.named_modules()
        if type(module) is nn.Linear and module is not head and not module.weight.requires_grad
        and module.in_features % NF4_BLOCK == 0
    ]  # fmt: skip
    if not names:
        raise WhetError(
            f"quantize: nf4, but this model has no linear layers with in_features a multiple of {NF4_BLOCK}. Remove "
            "quantize"
        )
    return names


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
    """Whether it is a linear layer with a 4-bit weight. An adapter around one is not."""
    return isinstance(layer, nn.Linear) and quant_state(layer.weight) is not None


def dequantize_weight(layer: Any) -> Tensor:
    """The weight [out, in] of a 4-bit layer in the layer's compute dtype. Does not synchronise with the device."""
    return materialize_weight(weight_parts(layer), layer.out_features, layer.in_features, weight_compute_dtype(layer))


def dequantize_linear(layer: Any) -> nn.Linear:
    """The nn.Linear that computes the same as a 4-bit layer."""
    with torch.device("meta"):
        plain = nn.Linear(layer.in_features, layer.out_features, bias=False)
    plain.weight = nn.Parameter(dequantize_weight(layer), requires_grad=False)
    plain.bias = layer.bias
    return plain.train(layer.training)


def weight_shape(parameter: Tensor) -> torch.Size:
    """The shape of a weight, whose 4-bit weights are packed."""
    state = quant_state(parameter)
    return parameter.shape if state is None else torch.Size(state.shape)


def dequantize_parameter(parameter: Tensor) -> Tensor:
    """A 4-bit weight in its original shape and dtype; any other as it is."""
    state = quant_state(parameter)
    return parameter if state is None else dequantize_nf4(nf4_parts(parameter), tuple(state.shape), state.dtype)


def count_weights(parameter: Tensor) -> int:
    """The number of weights in a parameter, whose 4-bit weights are packed two to a byte."""
    state = quant_state(parameter)
    return parameter.numel() if state is None else int(state.shape.numel())


def quantized_share(model: nn.Module) -> float:
    """The share of weights that are 4-bit."""
    parameters = list(model.parameters())
    packed = sum(count_weights(parameter) for parameter in parameters if quant_state(parameter) is not None)
    return packed / sum(map(count_weights, parameters))


def weight_bytes(model: nn.Module) -> int:
    """Bytes of all weights, with their scales."""
    total = 0
    for parameter in model.parameters():
        state = quant_state(parameter)
        total += parameter.nbytes
        if state is not None:
            total += state.absmax.nbytes + (state.state2.absmax.nbytes if state.nested else 0)
    return total


def dequantized_bytes(model: nn.Module) -> int:
    """Bytes of all weights after dequantization."""
    total = 0
    for parameter in model.parameters():
        state = quant_state(parameter)
        total += count_weights(parameter) * (parameter.dtype if state is None else state.dtype).itemsize
    return total
