"""8-bit training: which matrices of a model are multiplied in 8 bits, and by what rules.

`tensorwise` has one scale for a matrix; `rowwise`, torchao's, one for each row, which rounds less and is slower.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor, nn

from whet.core.errors import WhetError
from whet.model.fp8.linear import (
    FP8_ALIGNMENT,
    FP8Linear,
    MatmulFunction,
    tensorwise_matmul,
    tensorwise_matmul_emulated,
)
from whet.model.fp8.mlp import FP8MLP
from whet.model.modules import GATED_MLP_LAYERS, add_mixin, is_gated_mlp

FP8Recipe = Literal["tensorwise", "rowwise"]

_BREAK_EVEN_WIDTH = 800
_ADAPTER_NAME = re.compile(r"\.lora_[A-Za-z]+(\.|$)")
_ROUTER_NAME = re.compile(r"\.(gate|router|wg|shared_expert_gate)(\.|$)")
"""What chooses experts: small, and a rounding there sends a token elsewhere."""


class FP8Error(WhetError):
    """This model, device or installation cannot be used for 8-bit training."""


def is_faster_in_fp8(out_features: int, in_features: int, recipe: FP8Recipe) -> bool:
    """Whether a matrix is large enough for 8 bits to be faster, rounding included.

    Multiplying costs out · in for a token, rounding out + in, and less where matrices share their input, as those of
    keys and values do with that of queries. The bounds for `rowwise` are those that torchao measured on an H100.
    """
    if recipe == "tensorwise":
        return out_features * in_features >= _BREAK_EVEN_WIDTH * (out_features + in_features)
    return out_features > 2048 and in_features > 1024 and not (out_features <= 4096 and in_features <= 2048)


def convert_to_fp8_(
    language_model: nn.Module, recipe: FP8Recipe, *, worth: Callable[[int, int, FP8Recipe], bool] = is_faster_in_fp8,
    emulate: bool = False,
) -> list[str]:  # fmt: skip
    """Let the linear layers of the decoder multiply in 8 bits, where it is `worth` it; gives their names.

    Embedding, head, norms, routers and the matrices of adapters stay as they are, so do fused experts. Weights keep
    their types and names. `emulate` computes the same roundings on devices without 8-bit products.
    """
    product = _matmul_for_recipe(recipe, emulate)
    found = {
        name: module
        for name, module in _convertible_linears(language_model)
        if worth(module.out_features, module.in_features, recipe)
    }
    if not found:
        raise FP8Error(
            f"train.precision: none of this model's matrices would be faster in 8 bits ({recipe}): they are too small, "
            f"or their sides are no multiples of {FP8_ALIGNMENT}. Set train.precision=bf16"
        )
    for module in found.values():
        # the module stays the same object: adapters around it, hooks and names hold on
        module.__class__ = FP8Linear
        module.product = product  # type: ignore[assignment]
        module.is_tensorwise = recipe == "tensorwise"  # type: ignore[assignment]
    if recipe == "tensorwise":
        for mlp in language_model.modules():
            if _is_fp8_mlp(mlp):
                add_mixin(mlp, FP8MLP)
                mlp.emulate = emulate  # type: ignore[assignment]
    return list(found)


def count_fp8_layers(model: nn.Module) -> int:
    """How many of a model's layers multiply in 8 bits."""
    return sum(isinstance(module, FP8Linear) for module in model.modules())


def require_fp8(device: torch.device, precision: str) -> None:
    """An error where the device has no 8-bit products."""
    reason = fp8_unsupported_reason(device)
    if reason is not None:
        raise FP8Error(f"train.precision: {precision} is not possible here: {reason}. Set train.precision=bf16")


def fp8_unsupported_reason(device: torch.device) -> str | None:
    """Why the device has no 8-bit products; None if it has."""
    if device.type != "cuda" or torch.version.hip is not None:
        return f"8-bit products need an NVIDIA card, and this is {'ROCm' if device.type == 'cuda' else device.type}"
    capability = torch.cuda.get_device_capability(device)
    if capability < (8, 9):
        name = torch.cuda.get_device_name(device)
        return f"{name} has no 8-bit products (it has compute capability {capability[0]}.{capability[1]}, not 8.9)"
    return None


def _convertible_linears(language_model: nn.Module) -> Iterator[tuple[str, nn.Linear]]:
    """Those of the repeated layers, which stand in lists: neither head nor embedding does."""
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
    """Whether it is a gated MLP of which all three products are in 8 bits."""
    layers = [getattr(module, name, None) for name in GATED_MLP_LAYERS]
    ready = all(isinstance(layer, FP8Linear) and layer.bias is None for layer in layers)
    return ready and is_gated_mlp(module)


def _matmul_for_recipe(recipe: FP8Recipe, emulate: bool) -> MatmulFunction:
    if recipe == "tensorwise":
        return tensorwise_matmul_emulated if emulate else tensorwise_matmul
    return _rowwise_matmul(emulate)


def _rowwise_matmul(emulate: bool) -> MatmulFunction:
    """torchao's product; its layer is not used, because it knows neither evaluation nor odd numbers of tokens."""
    try:
        from torchao.float8._inductor_patch import _patch_inductor_min_max_codegen
        from torchao.float8.config import Float8LinearConfig
        from torchao.float8.float8_linear import Float8Linear, matmul_with_hp_or_float8_args
    except (ImportError, AttributeError) as error:
        raise FP8Error(
            f"train.precision: fp8-rowwise needs torchao ({error}): pip install 'whet[fp8]'. Or set "
            "train.precision=fp8, which does not need it"
        ) from None
    _patch_inductor_min_max_codegen()  # as torchao's own entry does: triton wrote wrong bytes beside a clamp
    config = replace(Float8LinearConfig.from_recipe_name("rowwise"), emulate=emulate)
    settings = Float8Linear(FP8_ALIGNMENT, FP8_ALIGNMENT, bias=False, config=config, device="meta").linear_mm_config

    def rowwise(input: Tensor, weight: Tensor) -> Tensor:
        return matmul_with_hp_or_float8_args.apply(input, weight.t(), settings, config)

    return rowwise
