"""What an adapter reaches: the weights of the decoder layers, by class of module."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from whet.compat.peft_private import adapted_parameter, is_lora_layer
from whet.core.errors import WhetError
from whet.model.modules import decoder_layers
from whet.model.quantize import count_weights

MIN_COVERAGE = 0.5
"""Below this share of reached weights, whet warns."""
_WRAPPERS = ("base_layer", "original_module")
"""Parts of names that peft adds to those of the model."""
_GENERIC_PACKAGES = ("torch", "bitsandbytes", "peft")


@dataclass(slots=True)
class ModuleCoverage:
    """The matrices in all modules of one class, and how many of their weights are trained, or have an adapter."""

    module: str
    """The class, such as LlamaAttention; layers without a class of their own belong to the module around them."""
    reached: int = 0
    parameters: int = 0
    reached_names: list[str] = field(default_factory=list)
    missed_names: list[str] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__slots__}


def adapter_coverage(language_model: nn.Module) -> list[ModuleCoverage]:
    """The coverage of the layers of a model with its adapter attached, in the model's order. Vectors do not count."""
    try:
        layers: Sequence[nn.Module] = decoder_layers(language_model)
    except WhetError:  # a model without a list of layers
        layers = [language_model]
    found: dict[str, ModuleCoverage] = {}
    for layer in layers:
        reached = _reached_weights(layer)
        modules = dict(layer.named_modules())
        for name, weight in layer.named_parameters():
            path = name.split(".")
            if any(part.startswith("lora_") or part in ("modules_to_save", "token_adapter") for part in path):
                continue
            if weight.ndim < 2 or name.endswith("bias"):  # stacked experts have stacked biases
                continue
            own = _class_name(modules, path)
            entry = found.setdefault(own, ModuleCoverage(own))
            is_reached = weight.requires_grad or id(weight) in reached
            entry.parameters += count_weights(weight)
            entry.reached += count_weights(weight) if is_reached else 0
            names = entry.reached_names if is_reached else entry.missed_names
            short = _short_name(path)
            if short not in names:
                names.append(short)
    return list(found.values())


def covered_share(coverage: Sequence[ModuleCoverage]) -> float:
    return sum(each.reached for each in coverage) / max(1, sum(each.parameters for each in coverage))


def describe_coverage(coverage: Sequence[ModuleCoverage], targets: Sequence[str]) -> str:
    """One sentence or two, for `whet check` and for the warning of a run; `targets`: adapter.targets."""
    reached, parameters = sum(each.reached for each in coverage), sum(each.parameters for each in coverage)
    text = f"the adapter reaches {covered_share(coverage):.1%} of the layers' weights ({reached:,} of {parameters:,}): "
    text += _listed([(each.module, each.reached_names, each.reached) for each in coverage]) or "none"
    if missed := _listed([(each.module, each.missed_names, each.parameters - each.reached) for each in coverage]):
        text += f". Not reached: {missed}"
    if covered_share(coverage) < MIN_COVERAGE:
        wider = "" if targets == "all-linear" else "Set adapter.targets=all-linear, or "
        text += f". {wider}{'a' if wider else 'A'}dd what is missing to adapter.targets by name"
    return text


def _listed(parts: list[tuple[str, list[str], int]]) -> str:
    return ", ".join(f"{module} ({', '.join(names)}: {count:,})" for module, names, count in parts if names)


def _reached_weights(layer: nn.Module) -> set[int]:
    """The ids of frozen weights that have an adapter, or a copy that is trained whole (adapter.also_train)."""
    found: list[Tensor] = []
    for module in layer.modules():
        if is_lora_layer(module):
            parameter = adapted_parameter(module)
            found.append(module.get_base_layer().weight if parameter is None else parameter)  # type: ignore[operator]
        elif hasattr(module, "modules_to_save") and hasattr(module, "original_module"):
            found.extend(module.original_module.parameters())  # type: ignore[union-attr]
    return {id(weight) for weight in found}


def _class_name(modules: dict[str, nn.Module], path: list[str]) -> str:
    """The class of the innermost module that is more than a layer of torch, or of peft around one."""
    owners = [modules[".".join(path[:end])] for end in range(len(path) - 1, -1, -1)]
    return type(next((module for module in owners if not _is_generic(module)), owners[0])).__name__


def _is_generic(module: nn.Module) -> bool:
    package = type(module).__module__
    is_linear = isinstance(module, nn.Linear) or package == "transformers.pytorch_utils"  # GPT-2's Conv1D
    return is_linear or package.split(".")[0] in _GENERIC_PACKAGES


def _short_name(path: list[str]) -> str:
    """q_proj of self_attn.q_proj.base_layer.weight; gate_up_proj of experts.base_layer.gate_up_proj."""
    plain = [part for part in path if part not in _WRAPPERS]
    return plain[-2] if plain[-1] == "weight" and len(plain) > 1 else plain[-1]
