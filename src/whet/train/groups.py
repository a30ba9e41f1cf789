"""Which weights are learned at which rate, and which are pulled towards zero."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.distributed.tensor import DTensor

from whet.core.errors import WhetError
from whet.model.loss import LossModel
from whet.train.config import OptimizerConfig

_WHAT = {
    "embedding": "the input embedding",
    "head": "an output head of its own (a head tied to the embedding counts as embedding)",
    "matrices": "a matrix",
    "scalars": "a vector or a single number",
}


def make_groups(model: nn.Module, config: OptimizerConfig) -> list[dict[str, Any]]:
    """The trainable weights in groups with `name`, highest rate and weight decay; empty groups are left out."""
    given = {
        "embedding": ("embedding_lr", config.embedding_lr),
        "head": ("head_lr", config.head_lr),
        "matrices": ("matrix_lr", config.matrix_lr),
        "scalars": ("scalar_lr", config.scalar_lr),
    }
    groups: list[dict[str, Any]] = []
    for name, parameters in _sort(model).items():
        knob, rate = given[name]
        if parameters:
            decay = 0.0 if name == "scalars" else config.weight_decay
            highest = config.lr if rate is None else rate
            rule = {"name": name, "highest": highest, "weight_decay": decay}
            groups.extend({"params": alike, **rule} for alike in _by_mesh(parameters))
        elif rate is not None:
            raise WhetError(
                f"train.optimizer.{knob}: {rate}, but this run does not train {_WHAT[name]}. Leave the knob out"
            )
    return groups


def _by_mesh(parameters: list[nn.Parameter]) -> list[list[nn.Parameter]]:
    """Torch's optimizers take many weights at once, if they are divided over the same axes. All are, unless processes
    compute layers together: then norms are not divided among them, and biases may be."""
    found: dict[Any, list[nn.Parameter]] = {}
    for parameter in parameters:
        mesh = parameter.device_mesh if isinstance(parameter, DTensor) else None
        found.setdefault(mesh, []).append(parameter)
    return list(found.values())


def _sort(model: nn.Module) -> dict[str, list[nn.Parameter]]:
    """Each trainable weight in its group; stacked experts and the matrices of adapters are matrices."""
    embedding, head = _weights_of(model, "get_input_embeddings"), _weights_of(model, "get_output_embeddings")
    sorted_: dict[str, list[nn.Parameter]] = {"embedding": [], "head": [], "matrices": [], "scalars": []}
    for full_name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        if parameter.ndim < 2 or full_name.endswith("bias"):  # stacked experts have stacked biases
            name = "scalars"
        elif id(parameter) in embedding:
            name = "embedding"
        else:
            name = "head" if id(parameter) in head else "matrices"
        sorted_[name].append(parameter)
    return sorted_


def _weights_of(model: nn.Module, getter: str) -> set[int]:
    """The weights of the module that a language model names its embedding or head, without adapters inside it."""
    inner = model.language_model if isinstance(model, LossModel) else model
    module = getattr(inner, getter)() if hasattr(inner, getter) else None
    if module is None:
        return set()
    return {id(parameter) for name, parameter in module.named_parameters() if not name.startswith("lora_")}
