"""Adapters through peft: the modules they target, LoRA matrices, modules and token rows trained with them, merging."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from whet.compat.bitsandbytes_private import quant_state
from whet.compat.peft_private import (
    adapted_parameter,
    is_lora_layer,
    modules_to_save_type,
    refuses_target,
    without_renamed_targets,
)
from whet.compat.torch_private import copy_module_without_weights
from whet.compat.transformers_private import is_experts_module
from whet.core.errors import WhetError
from whet.model.config import AdapterConfig
from whet.model.modules import other_modalities
from whet.model.quantize import dequantize_linear, dequantize_parameter, is_quantized, weight_shape


def add_adapter(model: nn.Module, config: AdapterConfig, seed: int, tokens: Sequence[int] = ()) -> nn.Module:
    """Freeze `model` and add adapters, initialised from `seed` alone. `tokens` are ids whose rows of the embedding, and
    of an untied head, are trained too."""
    from peft import LoraConfig, get_peft_model

    _reject_unknown_modules(model, config)
    tied = _is_tied(model)
    targets = resolve_targets(model, config.targets)
    without_experts = targets_without_experts(model)
    linear = sorted({name.rpartition(".")[2] for name, each in model.named_modules() if isinstance(each, nn.Linear)})
    refused = [name for name in linear if config.targets == "all-linear" and refuses_target(model, name)]
    settings = LoraConfig(
        r=config.rank,
        lora_alpha=config.alpha,  # peft declares an int but accepts any number
        target_modules=targets.modules,
        target_parameters=targets.parameters or None,
        exclude_modules=_inside_any(other_modalities(model), refused),
        lora_dropout=config.dropout,
        rank_pattern=dict(config.ranks),
        alpha_pattern=dict(config.alphas),
        use_rslora=config.method == "rslora",
        use_dora=config.method == "dora",
        modules_to_save=config.also_train or None,
        trainable_token_indices=_trainable_token_rows(model, config, tokens, tied) or None,
        ensure_weight_tying=tied and _trains_embedding_or_head(model, config),  # peft warns if there is nothing to tie
        task_type="CAUSAL_LM",
    )
    torch.manual_seed(seed)
    try:
        with warnings.catch_warnings(), without_renamed_targets():
            warnings.simplefilter("ignore", RuntimeWarning)  # of unmatched patterns, which are errors below
            warnings.filterwarnings("ignore", message="Model has `tie_word_embeddings=True`")  # handled below
            adapted = get_peft_model(model, settings)  # fp32 adapters beside 16-bit weights
    except (ValueError, TypeError, re.error) as error:
        if "ParamWrapper" in str(error):
            raise _fused_experts_error(config, without_experts) from None
        if "trainable_token_indices" in str(error):
            raise WhetError(
                f"adapter.targets: {config.targets} includes the embedding, of which model.add_tokens or "
                "adapter.tokens train single rows. Remove the embedding from adapter.targets, or train it whole: "
                "adapter.also_train"
            ) from None
        raise WhetError(
            f"adapter.targets: {config.targets!r} does not match this model: {error}. Set adapter.targets=all-linear "
            "to adapt every linear layer"
        ) from None
    _reject_tied_head(adapted.get_base_model())
    if tied and is_lora_layer(adapted.get_base_model().get_input_embeddings()):
        model.config.tie_word_embeddings = False  # type: ignore[union-attr]  # exported, the head has its own weight
    _reject_unmatched_patterns(adapted, config)
    for parameter in adapted.parameters():
        if parameter.requires_grad and parameter.dtype.itemsize < 4:  # those that peft left in the base's dtype
            parameter.data = parameter.data.float()
    return adapted


def _inside_any(names: list[str], ends: list[str]) -> str | None:
    """A pattern of the modules inside these, and of those with such an end to their names."""
    inside = [rf"({'|'.join(map(re.escape, names))})(\..*)?"] if names else []
    return "|".join([*inside, *(rf"(.*\.)?{re.escape(end)}" for end in ends)]) or None


def _fused_experts_error(config: AdapterConfig, without_experts: list[str]) -> WhetError:
    """peft adapts the stacked weights of experts, which are no linear layers, by plain LoRA without dropout only."""
    key, value, other = ("method", "dora", "lora") if config.method == "dora" else ("dropout", config.dropout, 0)
    return WhetError(
        f"adapter.{key}: {value} does not work on stacked experts, which adapter.targets={config.targets} includes in "
        f"this model. Set adapter.{key}={other}, or leave out the experts: "
        f"adapter.targets=[{', '.join(without_experts)}]"
    )


def _reject_unknown_modules(model: nn.Module, config: AdapterConfig) -> None:
    """peft silently ignores names that no module has."""
    names = [name for name, _ in model.named_modules()]
    for wanted in config.also_train:
        if not any(name == wanted or name.endswith(f".{wanted}") for name in names):
            ends = ", ".join(
                sorted({name.rpartition(".")[2] for name in names if not name.endswith(tuple("0123456789"))})
            )
            raise WhetError(f"adapter.also_train: this model has no module {wanted!r}. It has: {ends.lstrip(', ')}")


def _reject_unmatched_patterns(adapted: Any, config: AdapterConfig) -> None:
    layers = [_adapted_name(name, module) for name, module in adapted.named_modules() if is_lora_layer(module)]
    for knob, patterns in (("ranks", config.ranks), ("alphas", config.alphas)):
        for pattern in patterns:
            if not any(re.match(rf"(.*\.)?({pattern})$", name) for name in layers):
                raise WhetError(
                    f"adapter.{knob}: {pattern!r} matches no layer with an adapter. Give the end of a name, such as "
                    f"{layers[0].rpartition('model.')[2]}, or a regular expression"
                )


def _adapted_name(name: str, layer: Any) -> str:
    """The layer's name; of a stacked expert weight that of the parameter."""
    if adapted_parameter(layer) is None:
        return name
    return f"{name.replace('.base_layer', '')}.{layer.parameter_name}"


def _is_tied(model: Any) -> bool:
    head = model.get_output_embeddings()
    return head is not None and head.weight is model.get_input_embeddings().weight


def _embedding_and_head_names(model: Any) -> tuple[str, str]:
    """The last part of the names of embedding and head; empty for a missing head."""
    names = {id(module): name for name, module in model.named_modules()}
    found = model.get_input_embeddings(), model.get_output_embeddings()
    return names[id(found[0])].rpartition(".")[2], names.get(id(found[1]), "").rpartition(".")[2]


def _trains_embedding_or_head(model: nn.Module, config: AdapterConfig) -> bool:
    ends = _embedding_and_head_names(model)
    return any(name.rpartition(".")[2] in ends for name in config.also_train)


def _trainable_token_rows(model: Any, config: AdapterConfig, tokens: Sequence[int], tied: bool) -> dict[str, list[int]]:
    """Trainable rows by module, without modules that are trained whole."""
    if not tokens:
        return {}
    embedding, head = _embedding_and_head_names(model)
    whole = {name.rpartition(".")[2] for name in config.also_train}
    if tied:
        return {} if whole & {embedding, head} else {embedding: list(tokens)}
    if getattr(model.get_output_embeddings(), "bias", None) is not None and head not in whole:
        raise WhetError(
            f"adapter.tokens: the output head of this model has a bias, which peft drops when it trains single rows. "
            f"Train the modules whole: adapter.also_train=[{embedding}, {head}]"
        )
    return {name: list(tokens) for name in (embedding, head) if name not in whole}


def _reject_tied_head(model: Any) -> None:
    """An adapter of a head tied to the embedding would be merged into both."""
    head = model.get_output_embeddings()
    if is_lora_layer(head) and head.get_base_layer().weight is model.get_input_embeddings().weight:
        raise WhetError(
            "adapter.targets: this model's output head is tied to its embedding, so an adapter of it could not be "
            "merged. Remove the head from adapter.targets"
        )


def unwrap_peft(model: nn.Module) -> nn.Module:
    """The transformers model inside a peft model, with its adapters in place."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model  # type: ignore[operator]


def embedding_rows(model: nn.Module) -> int:
    """The number of rows of a model's embedding, wrapped by peft or not."""
    embedding = unwrap_peft(model).get_input_embeddings()  # type: ignore[operator]
    return next(module.num_embeddings for module in embedding.modules() if isinstance(module, nn.Embedding))


def cast_trained_modules_(model: nn.Module) -> None:
    """Cast modules of adapter.also_train from fp32 to the dtype of the modules they replace, for use without autocast.
    Not for further training."""
    if not hasattr(model, "peft_config"):
        return
    wrapper = modules_to_save_type()
    for module in model.modules():
        if isinstance(module, wrapper):
            kept = next(iter(module.original_module.parameters())).dtype
            for trained in module.modules_to_save.values():
                for parameter in trained.parameters():
                    parameter.data = parameter.data.to(kept)


def merge_adapter(model: nn.Module) -> nn.Module:
    """The transformers model with adapters merged into its weights; without adapters, the model itself.

    4-bit weights are dequantized and moved to the host one by one, because together they may exceed device memory.
    Merged in 4 bits, most of what the adapter learned would be rounded away.
    """
    if not hasattr(model, "merge_and_unload"):
        return model
    cast_trained_modules_(model)
    packed = [name for name, module in model.named_modules() if is_quantized(module)]
    for name in packed:
        model.set_submodule(name, dequantize_linear(model.get_submodule(name)).to("cpu"))
    stacks = [name for name, weight in model.named_parameters() if quant_state(weight) is not None]  # of experts
    for name in stacks:
        module, _, key = name.rpartition(".")
        whole = dequantize_parameter(model.get_parameter(name)).to("cpu")
        model.get_submodule(module).register_parameter(key, nn.Parameter(whole, requires_grad=False))
    if packed or stacks:
        model = model.to("cpu")
    base: Any = unwrap_peft(model)
    embedding, head = base.get_input_embeddings(), base.get_output_embeddings()
    if is_lora_layer(embedding) and head.weight is embedding.weight:  # or the adapter would be merged into both
        head.weight = nn.Parameter(head.weight.detach().clone(), requires_grad=False)
    return model.merge_and_unload()  # type: ignore[operator]


# Which modules and which stacked expert weights adapter.targets names.
#
# transformers stacks the weights of a layer's experts into parameters of one module, which is no linear layer. peft
# adapts them as `target_parameters`. Whoever names the layers of one expert (gate_proj and up_proj, or w1 and w3) means
# the stacked weight that holds both. Routers are left alone unless they are named.

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
    """`adapter.targets` for a model; names are peft's to resolve where there are no stacked experts."""
    stacks = expert_stacks(model)
    if targets == "all-linear":
        routers = map(model.get_submodule, router_names(model))
        others = {model.get_output_embeddings(), *routers, *_without_effect(model)}
        plain = [name for name, module in model.named_modules() if _is_linear(module) and module not in others]
        return Targets(plain, _shortened(stacks, stacks))
    if not stacks:
        return Targets(targets)
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
    choice of tokens has no gradient; layers whose weights the model reads itself in training, past an adapter; and
    layers with a product of their own, such as one for each group of heads. The first step of a run names others."""
    for module in model.modules():
        kind = type(module).__name__
        children = dict(module.named_children())
        if kind.endswith("Indexer"):
            yield from module.modules()
        elif hasattr(module, "A_log") and hasattr(module, "D"):  # Mamba
            norms = (child for name, child in children.items() if "norm" in name)
            if not any(True for norm in norms for _ in norm.parameters()):  # or its kernels take what x_proj computes
                yield from (children[name] for name in ("x_proj",) if name in children)
            yield from (children[name] for name in ("dt_proj", "out_proj") if name in children)
        elif kind.endswith("AltUp"):  # Gemma 3n
            yield children["correction_coefs"]
        elif isinstance(module, nn.Linear) and not _computes_linear(module):
            yield module


def _computes_linear(layer: nn.Linear) -> bool:
    """Whether a layer computes x Wᵀ + b, as some do in a forward of their own (Falcon). Runs it with a small weight in
    place of its own, which may be a placeholder or on another device."""
    if type(layer).forward is nn.Linear.forward or _is_4bit(layer):
        return True
    small = copy_module_without_weights(layer)
    small.in_features, small.out_features = 6, 4
    weight, bias = torch.linspace(-1, 1, 24).view(4, 6), None if layer.bias is None else torch.ones(4)
    small.weight, small.bias = nn.Parameter(weight), None if bias is None else nn.Parameter(bias)
    x = torch.linspace(-2, 3, 18).view(1, 3, 6)
    with torch.no_grad():
        try:
            found = small.forward(x)  # without hooks
            return isinstance(found, Tensor) and torch.allclose(found, F.linear(x, weight, bias))
        except (AttributeError, IndexError, RuntimeError, TypeError, ValueError):
            return False  # it relies on the sizes of its weight


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
