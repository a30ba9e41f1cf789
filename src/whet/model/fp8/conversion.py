"""Conversion of a model to fp8 training: which linear layers multiply in fp8, and on which devices.

Scaling is tensorwise: one scale for a whole matrix. See `whet.model.fp8.linear` for the rules.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

import torch
from torch import nn

from whet.compat.torch_private import set_module_class
from whet.core.errors import WhetError
from whet.model.fp8.linear import FP8_ALIGNMENT, FP8Linear
from whet.model.fp8.mlp import FP8MLP
from whet.model.modules import GATED_MLP_LAYERS, add_mixin, is_gated_mlp

_BREAK_EVEN_WIDTH = 800
_ADAPTER_NAME = re.compile(r"\.lora_[A-Za-z]+(\.|$)")
_ROUTER_NAME = re.compile(r"\.(gate|router|wg|shared_expert_gate)(\.|$)")
"""Routers are small, and rounding there would send tokens to other experts."""


class FP8Error(WhetError):
    """This model or device does not support fp8 training."""


def is_faster_in_fp8(out_features: int, in_features: int) -> bool:
    """Whether a weight is large enough for fp8 to be faster than bf16, casts included.

    Per token, the product costs out · in and the casts cost out + in; less where layers share their input, as q, k and
    v do.
    """
    return out_features * in_features >= _BREAK_EVEN_WIDTH * (out_features + in_features)


def convert_to_fp8_(
    language_model: nn.Module, *, convert_if: Callable[[int, int], bool] = is_faster_in_fp8, emulate: bool = False
) -> list[str]:
    """Convert the decoder's linear layers to fp8 where `convert_if(out_features, in_features)`; returns their names.

    Embedding, head, norms, routers, adapter matrices and fused experts stay as they are. Weights keep their dtypes and
    names. `emulate` computes the same roundings on devices without fp8 matrix products.
    """
    converted = {
        name: module
        for name, module in _convertible_linears(language_model)
        if convert_if(module.out_features, module.in_features)
    }
    if not converted:
        raise FP8Error(
            "train.precision: no layer of this model would be faster in fp8: they are too small, or their sizes are "
            f"not multiples of {FP8_ALIGNMENT}. Set train.precision=bf16"
        )
    for module in converted.values():
        set_module_class(module, FP8Linear)  # the same object: adapters around it, hooks and names stay valid
        module.emulate = emulate  # type: ignore[assignment]
    for mlp in language_model.modules():
        if _is_fp8_mlp(mlp):
            add_mixin(mlp, FP8MLP)
            mlp.emulate = emulate  # type: ignore[assignment]
    return list(converted)


def count_fp8_layers(model: nn.Module) -> int:
    """The number of layers that multiply in fp8."""
    return sum(isinstance(module, FP8Linear) for module in model.modules())


def require_fp8(device: torch.device, precision: str) -> None:
    """Raise FP8Error if the device does not support fp8."""
    reason = fp8_unsupported_reason(device)
    if reason is not None:
        raise FP8Error(f"train.precision: {precision} is not supported: {reason}. Set train.precision=bf16")


def fp8_unsupported_reason(device: torch.device) -> str | None:
    """Why the device does not support fp8; None if it does."""
    if device.type != "cuda" or torch.version.hip is not None:
        return f"fp8 needs an NVIDIA GPU, and this device is {'ROCm' if device.type == 'cuda' else device.type}"
    capability = torch.cuda.get_device_capability(device)
    if capability < (8, 9):
        name = torch.cuda.get_device_name(device)
        return f"{name} has compute capability {capability[0]}.{capability[1]}, and fp8 needs 8.9"
    return None


def _convertible_linears(language_model: nn.Module) -> Iterator[tuple[str, nn.Linear]]:
    """The linear layers inside ModuleLists, that is of the decoder layers, with sizes that fp8 can multiply."""
    lists = [name for name, module in language_model.named_modules() if isinstance(module, nn.ModuleList)]
    head = language_model.get_output_embeddings()  # type: ignore[operator]
    for name, module in language_model.named_modules():
        if type(module) is not nn.Linear or module is head:  # quantised layers inherit from Linear
            continue
        if (
            not any(name.startswith(f"{held}.") for held in lists)
            or _ADAPTER_NAME.search(name)
            or _ROUTER_NAME.search(name)
        ):
            continue
        if module.in_features % FP8_ALIGNMENT == 0 and module.out_features % FP8_ALIGNMENT == 0:
            yield name, module


def _is_fp8_mlp(module: nn.Module) -> bool:
    """Whether it is a gated MLP whose three layers are all FP8Linear without bias."""
    layers = [getattr(module, name, None) for name in GATED_MLP_LAYERS]
    ready = all(isinstance(layer, FP8Linear) and layer.bias is None for layer in layers)
    return ready and is_gated_mlp(module)
