"""The weights of the merged model that a run changes: what each was before training, and what it is now."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from whet.compat.bitsandbytes_private import quant_state
from whet.compat.peft_private import LoraFactors, lora_factors
from whet.model.quantize import dequantize_parameter, weight_shape

ValueOf = Callable[[Tensor], Tensor]
"""The whole value of a weight that may be a placeholder or sharded."""


@dataclass(frozen=True, slots=True, eq=False)
class TrainedWeight:
    """One weight of the merged model."""

    name: str
    """In the merged model."""
    shape: tuple[int, ...]
    experts: int | None
    """The number of experts that are stacked in the first dimension."""
    parameters: tuple[nn.Parameter, ...]
    """What is trained: B and A of LoRA, with DoRA also magnitudes; else the weight, its copy or rows of it."""
    base: Tensor | None
    """The frozen weight; None if the weight itself is trained."""
    layer: Any = None
    """peft's layer around it: LoRA, or an embedding of which single rows are trained."""

    @property
    def first_trained(self) -> nn.Parameter:
        """Nothing changes before this parameter gets a gradient: the factor of LoRA that starts at zero."""
        is_embedding = self.layer is not None and bool(getattr(self.layer, "lora_embedding_A", None))
        return self.parameters[1 if is_embedding else 0]

    def before(self, value_of: ValueOf) -> Tensor | None:
        """The weight before training, at least in fp32; None if the model does not hold it."""
        if self.base is None:
            return None
        return _wide(value_of(self.base) if quant_state(self.base) is None else dequantize_parameter(self.base))

    def after(self, before: Tensor | None, value_of: ValueOf) -> Tensor:
        """The weight now, unrounded; computed without peft's merge, which is checked by it."""
        if before is None or self.layer is None:
            return _wide(value_of(self.parameters[0]))
        if hasattr(self.layer, "token_indices"):
            rows = torch.tensor(next(iter(self.layer.token_indices.values())), device=before.device)
            return before.index_copy(0, rows, value_of(self.parameters[0]).to(before))
        changed = before + self.product(value_of).to(before)
        if len(self.parameters) == 3:  # DoRA: the rows have a trained norm
            magnitude = value_of(self.parameters[2]).to(before).reshape(-1, 1)
            changed = changed * (magnitude / changed.norm(dim=1, keepdim=True))
        return changed

    def product(self, value_of: ValueOf) -> Tensor:
        """scale · B·A, in the shape of the weight."""
        a, b, scale, is_transposed = self._factors(value_of)
        product = scale * (b @ a)
        return (product.transpose(1, 2) if is_transposed else product).reshape(self.shape)

    def product_norms(self, value_of: ValueOf) -> Tensor:
        """‖scale · B·A‖ of each expert, or of the weight, without the product: tr(BᵀB · AAᵀ) is [rank, rank]."""
        a, b, scale, _ = self._factors(value_of)
        squares = ((b.transpose(1, 2) @ b) * (a @ a.transpose(1, 2))).sum(dim=(1, 2))
        return scale * squares.clamp(min=0).sqrt()

    def _factors(self, value_of: ValueOf) -> LoraFactors:
        return lora_factors(
            self.layer, *(_wide(value_of(weight)) for weight in (self.parameters[1], self.parameters[0]))
        )


def trained_weights(language_model: nn.Module) -> list[TrainedWeight]:
    """Every weight that is trained or has an adapter, in the model's order. 4-bit weights have their own shape."""
    claimed: set[int] = set()
    found = []
    for weight in _weights_of_adapters(language_model):
        if id(weight.parameters[0]) not in claimed:  # a tied head shares the rows of its embedding
            found.append(weight)
            claimed |= {id(parameter) for parameter in weight.parameters}
    for name, parameter in language_model.named_parameters():
        if parameter.requires_grad and id(parameter) not in claimed:
            owner = language_model.get_submodule(name.rpartition(".")[0])
            found.append(_whole(name, parameter, owner, None))
    return found


def _weights_of_adapters(language_model: nn.Module) -> Iterator[TrainedWeight]:
    """By the attributes of peft's wrappers: importing peft takes a second."""
    for path, module in language_model.named_modules():
        wrapper: Any = module
        name = path.replace(".base_layer", "").replace(".token_adapter", "")
        if hasattr(module, "token_indices"):
            (delta,) = wrapper.trainable_tokens_delta.values()
            base = wrapper.get_base_layer().weight
            yield TrainedWeight(f"{name}.weight", tuple(base.shape), None, (delta,), base, wrapper)
        elif hasattr(module, "original_module") and hasattr(module, "modules_to_save"):
            for copy in wrapper.modules_to_save.values():
                frozen = dict(wrapper.original_module.named_parameters())
                for key, parameter in copy.named_parameters():
                    owner = copy.get_submodule(key.rpartition(".")[0])
                    yield _whole(f"{name}.{key}", parameter, owner, frozen[key])
        elif hasattr(module, "lora_embedding_A"):
            yield from _lora_weight(name, wrapper)


def _lora_weight(name: str, layer: Any) -> Iterator[TrainedWeight]:
    for adapter in layer.active_adapters:
        if adapter in layer.lora_A:
            a, b = layer.lora_A[adapter].weight, layer.lora_B[adapter].weight
        elif adapter in layer.lora_embedding_A:
            a, b = layer.lora_embedding_A[adapter], layer.lora_embedding_B[adapter]
        else:
            continue
        key = getattr(layer, "parameter_name", "weight")  # of stacked experts, which are no linear layers
        base = getattr(layer.get_base_layer(), key)
        shape = tuple(weight_shape(base))
        magnitudes = layer.lora_magnitude_vector
        extra = (magnitudes[adapter].weight,) if adapter in magnitudes else ()
        yield TrainedWeight(f"{name}.{key}", shape, shape[0] if len(shape) == 3 else None, (b, a, *extra), base, layer)


def _whole(name: str, parameter: nn.Parameter, owner: nn.Module, base: Tensor | None) -> TrainedWeight:
    return TrainedWeight(name, tuple(parameter.shape), _stacked_experts(owner, parameter), (parameter,), base)


def _stacked_experts(owner: nn.Module, parameter: Tensor) -> int | None:
    """The number of experts in a parameter: in modules of experts, weights are [experts, …, …], biases [experts, …]."""
    is_convolution = isinstance(owner, nn.Conv1d | nn.Conv2d | nn.Conv3d)
    stacks = [weight for weight in owner.parameters(recurse=False) if weight.ndim == 3]
    is_stacked = bool(stacks) and not is_convolution and parameter.ndim > 1 and len(parameter) == len(stacks[0])
    return len(parameter) if is_stacked else None


def _wide(value: Tensor) -> Tensor:
    return value.detach().to(torch.promote_types(value.dtype, torch.float32))
