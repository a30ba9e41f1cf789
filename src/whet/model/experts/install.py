"""Makes a model compute its experts with whet's operators, through transformers' experts registry.

transformers marks the experts classes of all architectures with `use_experts_implementation`, and those compute with
the implementation that the model's configuration names. peft wraps an experts module once for each adapted weight; the
outermost wrapper hands all adapters over at once, where peft would add their products to every expert's weights.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from whet.compat.bitsandbytes_private import nf4_parts, quant_state
from whet.compat.peft_private import param_wrapper_type
from whet.compat.transformers_private import is_experts_module, register_experts_implementation
from whet.model.experts.operators import ExpertsShape, ExpertsWeights, LoraPair, experts
from whet.model.experts.steps import register_activation
from whet.model.lora.low_rank import autocast_dtype
from whet.model.modules import add_mixin

ExpertsFunction = Callable[[Tensor, Tensor, Tensor, ExpertsWeights], Tensor]

IMPLEMENTATION = "whet"
TOKEN_COUNTS = "whet_token_counts"
"""An attribute of experts modules whose tokens are counted (load.py): [experts] int64."""
_ACTIVATION, _FUNCTION = "whet_activation", "whet_function"


def experts_modules(model: nn.Module) -> dict[str, nn.Module]:
    """The experts modules of a model, by name, but those with weights of other kinds, such as a norm behind each
    expert."""
    return {
        name: module
        for name, module in model.named_modules()
        if is_experts_module(module) and not any(True for child in module.children() for _ in child.parameters())
    }


def install_experts(model: nn.Module) -> int:
    """Compute all experts of a transformers model, with or without adapters, by whet's operators; returns how many
    modules of experts there are."""
    found = experts_modules(model)
    if not found:
        return 0
    register_experts_implementation(IMPLEMENTATION, _experts_forward)
    model.set_experts_implementation(IMPLEMENTATION)  # type: ignore[operator]
    for module in found.values():
        setattr(module, _ACTIVATION, register_activation(module))
    if any(hasattr(module, "parameter_name") for module in model.modules()):
        wrappers: list[Any] = [module for module in model.modules() if isinstance(module, param_wrapper_type())]
        inner = {wrapper.base_layer for wrapper in wrappers}
        for wrapper in wrappers:
            is_of_experts = wrapper not in inner and hasattr(wrapper.get_base_layer(), _ACTIVATION)
            if is_of_experts and not isinstance(wrapper, _WithAdapters):
                add_mixin(wrapper, _WithAdapters)
    return len(found)


def set_experts_function(module: nn.Module, function: ExpertsFunction) -> None:
    """Compute a module by another function than `experts`, such as one that sends tokens to other processes."""
    setattr(module, _FUNCTION, function)


def _experts_forward(module: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """The implementation in transformers' registry."""
    return _compute(module, {}, hidden_states, top_k_index, top_k_weights)


class _WithAdapters(nn.Module):
    """peft's outermost wrapper of an experts module."""

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        adapters = None if len(args) != 2 or kwargs else _active_adapters(self)
        if adapters is None:
            return super().forward(x, *args, **kwargs)
        return _compute(self.get_base_layer(), adapters, x, *args)  # type: ignore[operator]


def _active_adapters(wrapper: Any) -> dict[str, LoraPair] | None:
    """The adapters by the name of their weight; None if they are merged, disabled, several, or of another kind, which
    peft computes itself."""
    found: dict[str, LoraPair] = {}
    layer = wrapper
    while hasattr(layer, "parameter_name"):
        if layer.disable_adapters or layer.merged or len(layer.active_adapters) != 1:
            return None
        name = layer.active_adapters[0]
        if name not in layer.lora_A:
            return None
        found[layer.parameter_name] = LoraPair(
            layer.lora_A[name].weight, layer.lora_B[name].weight, float(layer.scaling[name])
        )
        layer = layer.base_layer
    return found if set(found) <= {*_layer_names(layer)} else None


def _layer_names(module: Any) -> tuple[str, str]:
    return ("gate_up_proj" if module.has_gate else "up_proj"), "down_proj"


def _compute(module: Any, adapters: dict[str, LoraPair], x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
    if module.training and hasattr(module, TOKEN_COUNTS) and torch.is_grad_enabled():
        count_tokens(getattr(module, TOKEN_COUNTS), index)
    up_name, down_name = _layer_names(module)
    (up_shape, up_parts), (down_shape, down_parts) = (_stack(getattr(module, name)) for name in (up_name, down_name))
    inputs, outputs = (1, 2) if module.is_transposed else (2, 1)
    shape = ExpertsShape(
        up_shape[0], up_shape[inputs], up_shape[outputs], down_shape[inputs], int(module.is_transposed)
    )
    mixed = autocast_dtype(x)
    tokens = x.reshape(-1, x.shape[-1])
    function: ExpertsFunction = getattr(module, _FUNCTION, experts)
    y = function(
        tokens.to(mixed) if mixed else tokens,
        index,
        weights,
        ExpertsWeights(
            shape, up_parts, down_parts, getattr(module, f"{up_name}_bias", None),
            getattr(module, f"{down_name}_bias", None), adapters.get(up_name), adapters.get(down_name),
            getattr(module, _ACTIVATION),
        ),
    )  # fmt: skip
    return y.view_as(x).to(x.dtype)


def _stack(weight: Any) -> tuple[Sequence[int], list[Tensor]]:
    """The shape of a stacked weight and its tensors: itself, or NF4 values with their scales."""
    state = quant_state(weight)
    return (weight.shape, [weight]) if state is None else (state.shape, nf4_parts(weight))


@torch.library.custom_op("whet::count_tokens", mutates_args=("counts",))
def count_tokens(counts: Tensor, index: Tensor) -> None:
    """Add the tokens of each expert to `counts`; `index` [T, K] holds the experts of each token."""
    chosen = index.reshape(-1).long()
    counts.scatter_add_(0, chosen, torch.ones_like(chosen))


count_tokens.register_fake(lambda counts, index: None)
