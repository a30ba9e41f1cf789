"""Recurrent layers in packed rows: their state starts anew with each document.

State-space layers (Mamba), linear attention (gated delta rule) and short convolutions carry state from token to token,
past the end of a document into the next one. Here such a layer gets the documents of a row as a padded batch, one
document a row, and its outputs are joined to the packed row again; attention, MLPs and experts see the packed row.
Padding is on the right, where no token depends on it. The layer's own kernels compute it, whichever they are.

Recurrent layers are found by what they do, not by name: a change of one document changes their output for the next.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from whet.compat.torch_private import map_tensors, set_module_class, tree_flatten, tree_unflatten
from whet.compat.transformers_private import is_experts_module
from whet.model.attention.interface import Documents, PackingError, current_documents
from whet.model.modules import add_mixin, decoder_layers, eval_mode

_MAX_PADDING = 0.2
"""Padding in a group of documents, as a share of its tokens."""
_GROUP_COST = 1024
"""Padding tokens that cost no more than one more group: a group launches all kernels of the layer again."""
_GPU_MULTIPLE = 64
"""Padded lengths on a GPU are multiples of this, the chunk size of kernels for linear attention."""


class RecurrentLayer:
    """Mixin: computes the documents of a packed row in padded batches, so that none sees the state of another."""

    @torch.compiler.disable  # the number of documents and their lengths differ from batch to batch
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        own: Any = super().forward  # type: ignore[misc]
        documents = current_documents()
        if documents is None:  # generation, or a padded batch
            return own(*args, **kwargs)
        groups, inverse = _groups_on_device(documents)
        row = 1, documents.cu_seqlens_host[-1]
        parts = [own(*_select(args, group, row), **_select(kwargs, group, row)) for group in groups]
        return _join(parts, groups, inverse)


def _select(tree: Any, group: Tensor, row: tuple[int, int]) -> Any:
    """Every tensor [1 T …] of a layer's arguments as the padded documents [D L …] of a group."""

    def select(tensor: Tensor) -> Tensor:
        if tensor.shape[:2] != row:
            return tensor
        return tensor[0].index_select(0, group.flatten()).unflatten(0, group.shape)

    return map_tensors(select, tree)


def _join(parts: Sequence[Any], groups: Sequence[Tensor], inverse: Tensor) -> Any:
    """The outputs [D L …] of all groups as one packed row [1 T …]."""
    flat = [tree_flatten(part) for part in parts]
    joined = []
    for leaves in zip(*(leaves for leaves, _ in flat), strict=True):
        is_padded = all(
            isinstance(leaf, Tensor) and leaf.shape[:2] == group.shape
            for leaf, group in zip(leaves, groups, strict=True)
        )
        if is_padded:
            joined.append(torch.cat([leaf.flatten(0, 1) for leaf in leaves]).index_select(0, inverse)[None])
        else:
            joined.append(leaves[0])
    return tree_unflatten(joined, flat[0][1])


def _groups_on_device(documents: Documents) -> tuple[list[Tensor], Tensor]:
    """`group_documents` of a forward pass, computed once for all layers."""
    if documents.padded_groups is None:
        device = documents.cu_seqlens.device
        multiple = _GPU_MULTIPLE if device.type == "cuda" else 1
        groups, inverse = group_documents(documents.cu_seqlens_host, multiple)
        tensors = [torch.from_numpy(array) for array in (*groups, inverse)]
        if device.type == "cuda":
            tensors = [tensor.pin_memory().to(device, non_blocking=True) for tensor in tensors]
        documents.padded_groups = tensors[:-1], tensors[-1]
    return documents.padded_groups


def group_documents(
    cu_seqlens: Sequence[int], multiple: int = 1
) -> tuple[list[NDArray[np.int64]], NDArray[np.int64]]:  # fmt: skip
    """Documents of like length in groups: for each group the places [D L] of its tokens in the row, and for each token
    of the row its place in the flattened groups, one after the other.

    Padding repeats the last token of its document, so that it reads as finite a number as any.
    """
    bounds = np.asarray(cu_seqlens, dtype=np.int64)
    starts, lengths = bounds[:-1], np.diff(bounds)
    order = np.argsort(-lengths, kind="stable")
    order = order[lengths[order] > 0]
    groups: list[NDArray[np.int64]] = []
    inverse = np.empty(int(bounds[-1]), dtype=np.int64)
    offset = 0
    for first, end in itertools.pairwise(_group_bounds(lengths[order].tolist(), multiple)):
        chosen = order[first:end]
        within = np.arange(_round_up(int(lengths[chosen[0]]), multiple))
        places = starts[chosen, None] + np.minimum(within, lengths[chosen, None] - 1)
        is_token = within < lengths[chosen, None]
        inverse[places[is_token]] = offset + np.flatnonzero(is_token)
        groups.append(places)
        offset += places.size
    return groups, inverse


def _group_bounds(descending: Sequence[int], multiple: int) -> list[int]:
    """Where groups of documents of descending lengths begin, and the end of the last."""
    bounds, padding = [0], 0
    for number, length in enumerate(descending):
        width = _round_up(descending[bounds[-1]], multiple)
        padding += width - length
        if number > bounds[-1] and padding > _GROUP_COST + _MAX_PADDING * width * (number - bounds[-1]):
            bounds.append(number)
            padding = _round_up(length, multiple) - length
    return [*bounds, len(descending)]


def _round_up(length: int, multiple: int) -> int:
    return -(-length // multiple) * multiple


# Finding them

_LEAK = 1e-7
"""Relative change of an output that is no rounding: shapes stay the same, so that most modules change by nothing."""


def recurrent_layers(model: nn.Module) -> list[nn.Module]:
    """The layers whose state starts anew with each document."""
    return [module for module in model.modules() if isinstance(module, RecurrentLayer)]


def reset_state_between_documents(modules: Sequence[nn.Module]) -> None:
    """Make these layers compute each document of a packed row by itself."""
    for module in modules:
        add_mixin(module, RecurrentLayer)


def undo_reset(modules: Sequence[nn.Module]) -> None:
    """Undo `reset_state_between_documents`."""
    for module in modules:
        set_module_class(module, type(module).__mro__[2])  # after the mixed class and the mixin


@torch.no_grad()
def find_recurrent_layers(model: nn.Module, run_packed: Any, border: int, tokens: int) -> list[nn.Module]:
    """The largest modules inside the decoder layers whose output after `border` changes with their input before it, and
    that do not attend.

    `run_packed` computes a packed row of two documents: `border` of its `tokens` tokens are the first one's.
    """
    found: set[nn.Module] = set()
    is_probing = False

    def probe(module: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        nonlocal is_probing
        if is_probing:
            return
        is_probing = True
        try:
            changed = module.forward(*_flip(args, border, tokens), **_flip(kwargs, border, tokens))
        finally:
            is_probing = False
        before, after = (tree_flatten(each)[0] for each in (output, changed))
        for one, other in zip(before, after, strict=True):
            if isinstance(one, Tensor) and one.shape[:2] == (1, tokens) and one.is_floating_point():
                difference = (one[:, border:] - other[:, border:]).abs().max()
                if difference > _LEAK * one.abs().max() and computes_batches(module, args, kwargs):
                    found.add(module)

    def computes_batches(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> bool:
        """Whether it can get documents as a batch: attention takes a packed row, so a part before it must be reset."""
        nonlocal is_probing
        is_probing = True
        try:
            module.forward(*_repeat(args, tokens), **_repeat(kwargs, tokens))
        except PackingError:
            return False
        finally:
            is_probing = False
        return True

    inside = [
        module
        for layer in decoder_layers(model)
        for module in layer.modules()
        if module is not layer and not any(map(is_experts_module, module.modules()))  # those compute in other shapes
    ]
    hooks = [module.register_forward_hook(probe, with_kwargs=True) for module in inside]
    try:
        with eval_mode(model):
            run_packed()
    finally:
        for hook in hooks:
            hook.remove()
    parts = {part for module in found for part in module.modules() if part is not module}
    return [module for module in inside if module in found - parts]


def _flip(tree: Any, border: int, tokens: int) -> Any:
    """Every tensor [1 T …] of real numbers with its first `border` tokens in reverse."""

    def flip(tensor: Tensor) -> Tensor:
        if tensor.shape[:2] != (1, tokens) or not tensor.is_floating_point():
            return tensor
        return torch.cat([tensor[:, :border].flip(1), tensor[:, border:]], 1)

    return map_tensors(flip, tree)


def _repeat(tree: Any, tokens: int) -> Any:
    """Every tensor [1 T …] twice, as a batch."""
    return map_tensors(lambda tensor: torch.cat([tensor] * 2) if tensor.shape[:2] == (1, tokens) else tensor, tree)
