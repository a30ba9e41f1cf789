"""The matrices of a model that tokens are multiplied with, and which gradients each of them takes."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace

from torch import nn

_ADAPTER = re.compile(r"\.(base_layer|lora_[AB])(?=\.|$).*")
_ONE_EXPERT = re.compile(r"(.*\bexperts)\.\d+\.")
_CHOSEN = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_top_k", "top_k_experts")


@dataclass(frozen=True, slots=True)
class Matrix:
    """One matrix, as a token meets it."""

    name: str
    """Of its module."""
    size: int
    """Its numbers."""
    used: float
    """The part of it that a token passes: 1, or of fused experts the chosen ones."""
    trained: bool
    fed: bool = True
    """Whether what goes into it depends on something that is trained, so that its gradient has to go on downwards."""

    @property
    def layer(self) -> str:
        """The module that an adapter, if there is one, was put into."""
        return _ADAPTER.sub("", self.name)

    @property
    def block(self) -> str:
        """The module above it: an attention, an MLP."""
        return self.layer.rpartition(".")[0]

    @property
    def forward(self) -> int:
        """FLOPs for one token: a multiplication and an addition for each number."""
        return round(2 * self.size * self.used)

    @property
    def passes(self) -> int:
        """Products as large as the forward one that a step computes, itself included."""
        return 1 + self.trained + self.fed


def matrices_of(model: nn.Module) -> list[Matrix]:
    """All but embedding and head, in the order in which the model has them.

    `fed` is exact where a block's modules but the last share its input, as in the usual attention (q, k, v, then o) and
    MLP; elsewhere it may be wrong inside the one block where training begins.
    """
    ends = {
        id(inside)
        for end in (model.get_input_embeddings(), model.get_output_embeddings())  # type: ignore[operator]
        if end is not None
        for inside in end.modules()  # peft may have wrapped them
    }
    found = [
        matrix
        for name, module in model.named_modules()
        if id(module) not in ends and "original_module" not in name.split(".")  # what a trained copy stands for
        for matrix in _own(model, name)
    ]
    return _fed(model, found)


def _own(model: nn.Module, name: str) -> Iterator[Matrix]:
    """The matrices that a module holds itself: linear layers of any kind, routers, fused experts."""
    module = model.get_submodule(name)
    if isinstance(module, nn.Embedding):
        return
    parameters = [
        parameter
        for kind, parameter in module.named_parameters(recurse=False)
        if parameter.ndim in (2, 3) and not kind.endswith("bias")  # stacked experts have stacked biases
    ]
    if isinstance(module, nn.Linear):  # by its widths: a quantized one holds packed bytes
        trained = module.weight.requires_grad
        yield Matrix(name, module.in_features * module.out_features, _share(model, name), trained)
        return
    for parameter in parameters:
        used = _chosen(model, parameter.shape[0]) if parameter.ndim == 3 else 1.0
        yield Matrix(name, parameter.numel(), used, parameter.requires_grad)


def _share(model: nn.Module, name: str) -> float:
    """1, or for one expert of a list of them how many tokens of all it gets on average."""
    expert = _ONE_EXPERT.match(name)
    return _chosen(model, len(list(model.get_submodule(expert[1]).children()))) if expert else 1.0


def _chosen(model: nn.Module, experts: int) -> float:
    """The part of the experts that a token goes through; all of them where the configuration does not say."""
    config = model.config.get_text_config()  # type: ignore[operator, union-attr]
    return next((getattr(config, key) / experts for key in _CHOSEN if getattr(config, key, None)), 1.0)


def first_trained(model: nn.Module) -> str | None:
    """The first module in which something is trained: a linear layer, or a whole layer where its norm is trained too,
    which stands before all of it; empty if that is the embedding; None if nothing is trained."""
    if any(parameter.requires_grad for parameter in model.get_input_embeddings().parameters()):  # type: ignore[operator]
        return ""
    first = next((name for name, parameter in model.named_parameters() if parameter.requires_grad), None)
    if first is None:
        return None
    module = _ADAPTER.sub("", first.rpartition(".")[0])
    layer = module.rpartition(".")[0].rpartition(".")[0]
    vectors = (p for child in model.get_submodule(layer).children() for p in child.parameters(recurse=False))
    return layer if layer and any(vector.requires_grad for vector in vectors) else module


def _fed(model: nn.Module, matrices: list[Matrix]) -> list[Matrix]:
    """Below the first trained weight no gradient is needed, and none for what a first block is given."""
    first = first_trained(model)
    if first == "":
        return matrices
    block = "" if first is None else first.rpartition(".")[0]
    last = max((at for at, matrix in enumerate(matrices) if matrix.block == block), default=-1)
    begins = next(
        (at for at, matrix in enumerate(matrices) if f"{matrix.name}.".startswith(f"{first}.")), len(matrices)
    )
    found = []
    for at, matrix in enumerate(matrices):
        if at < begins:
            fed = False
        elif matrix.block == block and (matrix.layer == first or matrix.layer != matrices[last].layer):
            fed = ".lora_B" in matrix.name
        else:
            fed = True
        found.append(replace(matrix, fed=fed))
    return found
