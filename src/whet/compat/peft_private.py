"""Internal classes and attributes of peft, seen in 0.21. peft takes a second to import, so each function imports it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

from torch import Tensor, nn


def is_lora_layer(module: nn.Module) -> bool:
    """`peft.tuners.lora.layer.LoraLayer`: a layer with a LoRA adapter beside its weight."""
    from peft.tuners.lora.layer import LoraLayer

    return isinstance(module, LoraLayer)


def refuses_target(model: Any, name: str) -> bool:
    """`peft.tuners.tuners_utils._check_lora_target_modules_mamba`: whether peft refuses to adapt layers of this name,
    whose weights the fused kernels of Mamba models read past the layer."""
    from peft import LoraConfig
    from peft.tuners.tuners_utils import _check_lora_target_modules_mamba

    try:
        _check_lora_target_modules_mamba(LoraConfig(), model, name)
    except ValueError:
        return True
    return False


def is_lora_linear(module: nn.Module) -> bool:
    """`peft.tuners.lora.layer.Linear.forward`: whether the module computes y = W x + scaling · B A x, as peft's
    adapted linear layer does and its subclasses may not."""
    from peft.tuners.lora.layer import Linear

    return getattr(type(module), "forward", None) is Linear.forward


def adapted_parameter(module: nn.Module) -> nn.Parameter | None:
    """`peft.tuners.lora.layer.ParamWrapper`: the parameter with an adapter, of a module that is not a linear layer (a
    router, fused experts); None for other modules."""
    from peft.tuners.lora.layer import ParamWrapper

    if not isinstance(module, ParamWrapper):
        return None
    parameter: nn.Parameter = module.get_base_layer().get_parameter(module.parameter_name)
    return parameter


def tuner_layer_type() -> Any:
    """`peft.tuners.tuners_utils.BaseTunerLayer`: a layer with an adapter of any kind; it has merge()."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    return BaseTunerLayer


def modules_to_save_type() -> Any:
    """`peft.utils.other.ModulesToSaveWrapper`: a frozen module and the copy of it that is trained whole."""
    from peft.utils.other import ModulesToSaveWrapper

    return ModulesToSaveWrapper


def trainable_tokens_type() -> Any:
    """`peft.utils.other.TrainableTokensWrapper`: an embedding of which single rows are trained."""
    from peft.utils.other import TrainableTokensWrapper

    return TrainableTokensWrapper


class LoraFactors(NamedTuple):
    """The factors of scale · B·A, one pair for each stacked expert, or one."""

    a: Tensor
    """[experts, rank, in]"""
    b: Tensor
    """[experts, out, rank]"""
    scale: float
    is_transposed: bool
    """The weight is stored as [in, out]."""


def lora_factors(layer: Any, a: Tensor, b: Tensor) -> LoraFactors:
    """`ParamWrapper._did_swap_in_out_features` and the layout of its matrices, A [experts · rank, in] and
    B [out, rank · experts]; `Linear.fan_in_fan_out`; embeddings are [in, out]. `a` and `b` are whole."""
    (adapter,) = (name for name in layer.active_adapters if name in layer.scaling)
    experts = getattr(layer, "num_experts", 1)
    is_transposed = (
        not layer._did_swap_in_out_features
        if experts > 1
        else bool(layer.lora_embedding_A) or bool(getattr(layer, "fan_in_fan_out", False))
    )
    return LoraFactors(
        a.reshape(experts, -1, a.shape[-1]), b.reshape(b.shape[0], -1, experts).permute(2, 0, 1),
        float(layer.scaling[adapter]), is_transposed,
    )  # fmt: skip


def param_wrapper_type() -> Any:
    """`peft.tuners.lora.layer.ParamWrapper`: a module of which one parameter has an adapter; nested for several."""
    from peft.tuners.lora.layer import ParamWrapper

    return ParamWrapper


@contextlib.contextmanager
def without_renamed_targets() -> Iterator[None]:
    """`peft.utils.transformers_weight_conversion.convert_peft_config_for_transformers`: inside this context peft adapts
    what its configuration names. For models of `renamed_targets` it would take the names of an expert's layers for the
    stacked weights alone: dense layers of these names would get no adapter, and the ranks of experts would double."""
    from peft.utils import transformers_weight_conversion as conversion

    kept = conversion.convert_peft_config_for_transformers
    conversion.convert_peft_config_for_transformers = lambda *_, **__: None
    try:
        yield
    finally:
        conversion.convert_peft_config_for_transformers = kept


def renamed_targets(model_type: str) -> set[str]:
    """`_MODEL_TO_CONVERSION_PATTERN` and `_MOE_TARGET_MODULE_MAPPING`: names in target_modules that peft, when it loads
    an adapter onto a model of this type, takes for stacked experts or routers."""
    from peft.utils import transformers_weight_conversion as conversion

    kind = conversion._MODEL_TO_CONVERSION_PATTERN.get(model_type)
    return set(conversion._MOE_TARGET_MODULE_MAPPING.get(kind, {}))


def mix_adapters(model: nn.Module) -> Callable[[Sequence[str | None]], AbstractContextManager[None]] | None:
    """`Linear.forward(…, adapter_names=…)`: a context in which row i of a batch runs with the i-th adapter, or without
    one (None). None if an adapter is more than plain LoRA of linear layers: peft cannot mix the others."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    layers: list[Any] = [module for module in model.modules() if isinstance(module, BaseTunerLayer)]
    others = (modules_to_save_type(), trainable_tokens_type())
    if any(isinstance(module, others) for module in model.modules()):
        return None
    if not all(is_lora_linear(layer) and not layer.lora_variant for layer in layers):
        return None
    names: list[str] = []

    def inject(layer: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]] | None:
        return (args, {**kwargs, "adapter_names": names}) if names else None

    for layer in layers:
        layer.register_forward_pre_hook(inject, with_kwargs=True)

    @contextlib.contextmanager
    def use(chosen: Sequence[str | None]) -> Iterator[None]:
        names[:] = ["__base__" if name is None else name for name in chosen]
        try:
            yield
        finally:
            names.clear()

    return use
