"""Which modules and which stacked expert weights adapter.targets names.

transformers stacks the weights of a layer's experts into parameters of one module, which is no linear layer. peft
adapts them as `target_parameters`. Whoever names the layers of one expert (gate_proj and up_proj, or w1 and w3) means
the stacked weight that holds both. Routers are left alone unless they are named.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from whet.compat.bitsandbytes_private import quant_state
from whet.compat.transformers_private import is_experts_module
from whet.core.errors import WhetError
from whet.model.quantize import weight_shape

_UP_NAMES = (("gate_proj", "up_proj"), ("w1", "w3"))
"""Names of gate and up where the experts are separate modules, as in checkpoint files; w2 is down."""
_DOWN_NAMES = ("down_proj", "w2")


@dataclass(frozen=True, slots=True)
class Targets:
    """What peft is to adapt."""

    modules: list[str] | str
    parameters: list[str] = field(default_factory=list)
    """Stacked weights of experts, and weights of routers that were named."""


def resolve_targets(model: Any, targets: list[str] | str) -> Targets:
    """`adapter.targets` for a model; without stacked experts they are peft's to resolve."""
    stacks = expert_stacks(model)
    if not stacks:
        return Targets(targets)
    if targets == "all-linear":
        routers = map(model.get_submodule, router_names(model))
        others = {model.get_output_embeddings(), *routers, *_without_effect(model)}
        plain = [name for name, module in model.named_modules() if _is_linear(module) and module not in others]
        return Targets(plain, _shortened(stacks, stacks))
    linear = [name for name, module in model.named_modules() if _is_adaptable(module)]
    if isinstance(targets, str):
        modules = [name for name in linear if re.fullmatch(targets, name)]
        chosen = [name for name in stacks if any(re.fullmatch(targets, other) for other in _other_names(name))]
        return Targets(modules, _shortened(chosen, stacks)) if modules or chosen else Targets(targets)
    modules, reached_stacks, named_routers = [], set[str](), []
    for target in targets:
        reached = {name for name in stacks if any(_ends_with(other, target) for other in _other_names(name))}
        halves = next((pair for pair in _UP_NAMES if target.rpartition(".")[2] in pair), None)
        is_module = any(_ends_with(name, target) for name in linear)
        if halves is not None and reached and not any(_ends_with(name, target) for name in stacks):
            prefix = target.rpartition(".")[0]
            other = next(half for half in halves if half != target.rpartition(".")[2])
            if f"{prefix}.{other}".lstrip(".") not in targets:
                if not is_module:
                    raise WhetError(
                        f"adapter.targets: {target} without {other}: this model's experts have one weight for both. "
                        "Name both, or gate_up_proj"
                    )
                reached = set()
        reached_stacks |= reached
        if any(_ends_with(name, target) for name in router_names(model)) and not is_module:
            named_routers.append(f"{target}.weight")
        elif is_module or not reached:
            modules.append(target)
    return Targets(modules, [*_shortened([name for name in stacks if name in reached_stacks], stacks), *named_routers])


def targets_without_experts(model: Any) -> list[str]:
    """Last parts of the names of layers that all-linear reaches, without those that name layers of experts, too."""
    stacks = expert_stacks(model)
    others = [other for stack in stacks for other in _other_names(stack)]
    ends = {name.rpartition(".")[2] for name in resolve_targets(model, "all-linear").modules} if stacks else set()
    return sorted(end for end in ends if not any(_ends_with(other, end) for other in others))


def expert_stacks(model: nn.Module) -> list[str]:
    """The names of stacked expert weights [experts, …], without biases."""
    return [
        f"{name}.{key}"
        for name, module in model.named_modules()
        if is_experts_module(module) or "Experts" in type(module).__name__  # some classes are not in the registry
        for key, weight in module.named_parameters(recurse=False)
        if len(weight_shape(weight)) == 3
    ]


def router_names(model: nn.Module) -> list[str]:
    """Modules whose weights choose the experts: neighbours of a module of experts that have one matrix, with a row for
    each expert, or are called router and have several."""
    found: dict[str, None] = {}
    for stack in expert_stacks(model):
        experts = weight_shape(model.get_parameter(stack))[0]
        block, _, own = stack.rpartition(".")[0].replace(".base_layer", "").rpartition(".")  # wrapped by peft or not
        for child, neighbour in model.get_submodule(block).named_children():
            if child == own:
                continue
            inside = [
                f"{block}.{child}.{name}".rstrip(".") for name, module in neighbour.named_modules() if _rows(module)
            ]
            rows = [_rows(model.get_submodule(name)) for name in inside]
            if (rows == [experts] and experts > 1) or (rows and "router" in child):
                found |= dict.fromkeys(inside)
    return list(found)


def frozen_routers(model: nn.Module) -> list[str]:
    """Routers without trained weights and without an adapter."""
    routers = {name: model.get_submodule(name) for name in router_names(model)}
    return [name for name, module in routers.items() if not any(weight.requires_grad for weight in module.parameters())]


def _rows(module: nn.Module) -> int:
    """Of the module's own matrix; 0 if it has none."""
    weight = getattr(module, "weight", None)
    if not isinstance(weight, nn.Parameter) or weight.ndim != 2:
        return 0
    return int(getattr(module, "out_features", len(weight)))  # a 4-bit weight is packed


def _without_effect(model: nn.Module) -> Iterator[nn.Module]:
    """Linear layers whose adapters would learn nothing or cannot be computed: indexers of sparse attention, whose
    choice of tokens has no gradient; layers of Mamba whose weights go to fused kernels, which do not see an adapter;
    and layers with a product of their own, such as one for each group of heads."""
    for module in model.modules():
        kind = type(module).__name__
        if kind.endswith("Indexer"):
            yield from module.modules()
        elif "Mamba" in kind:
            yield from (child for name, child in module.named_children() if name in ("dt_proj", "out_proj"))
        elif isinstance(module, nn.Linear) and type(module).forward is not nn.Linear.forward and not _is_4bit(module):
            yield module


def _is_4bit(layer: nn.Linear) -> bool:
    return quant_state(layer.weight) is not None


def _is_linear(module: nn.Module) -> bool:
    from transformers.pytorch_utils import Conv1D

    return isinstance(module, nn.Linear | Conv1D)


def _is_adaptable(module: nn.Module) -> bool:
    return _is_linear(module) or isinstance(module, nn.Embedding | nn.Conv1d | nn.Conv2d)


def _other_names(stack: str) -> Iterator[str]:
    """A stacked weight's name, its module's, and those of the layers it holds."""
    module, _, key = stack.rpartition(".")
    yield from (stack, module)
    if key in ("gate_up_proj", "up_proj"):
        yield from (f"{module}.{name}" for pair in _UP_NAMES for name in pair)
    elif key == "down_proj":
        yield from (f"{module}.{name}" for name in _DOWN_NAMES)


def _ends_with(name: str, target: str) -> bool:
    return name == target or name.endswith(f".{target}")


def _shortened(chosen: list[str], stacks: list[str]) -> list[str]:
    """`experts.gate_up_proj` if it is chosen in every layer; peft compares the ends of names."""
    ends = {name: ".".join(name.split(".")[-2:]) for name in stacks}
    whole = {end for end in ends.values() if all(name in chosen for name in stacks if ends[name] == end)}
    return sorted({ends[name] if ends[name] in whole else name for name in chosen})
