"""Gradients of what every process of a tensor group holds whole: made one and the same, so that the copies never part.

Of norms between layers, embedding and head each process finds the whole gradient, but for rounding: kernels that add in
no fixed order give others on every device. Copies that each follow their own drift apart, step by step, and a
checkpoint that keeps one of them is not the model that was trained. So all take the mean. Of norms of single heads each
process finds the part of its heads: these are summed.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch.distributed as dist
from torch import nn
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors

from whet.core.whereabouts import HERE
from whet.parallel.replicate import buckets
from whet.parallel.shard import local
from whet.parallel.tensor import Across, across

_OWN = "language_model."
_FOUND = "_whet_shared"


def agree(model: nn.Module) -> None:
    """Once a step, when gradients are summed over all that computed other rows."""
    here = across(model)
    if here is None:
        return
    summed, same = _shared(model, here)
    _sum_over(summed, here.group, 1)
    _sum_over(same, here.group, here.group.size())


def _shared(model: nn.Module, here: Across) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Weights whose gradients are to be summed, and those whose gradients are the same on all. Looked for once: to go
    through a large model's modules takes a while, in which a GPU would wait."""
    if not hasattr(model, _FOUND):
        summed: list[nn.Parameter] = []
        same: list[nn.Parameter] = []
        for full_name, weight in model.named_parameters():
            name = full_name.removeprefix(_OWN)
            if weight.requires_grad and name not in here.divided:
                (summed if name in here.summed else same).append(weight)
        object.__setattr__(model, _FOUND, (summed, same))
    found: tuple[list[nn.Parameter], list[nn.Parameter]] = getattr(model, _FOUND)
    return found


def _sum_over(weights: Sequence[nn.Parameter], group: dist.ProcessGroup, among: int) -> None:
    gradients = [local(weight.grad) for weight in weights if weight.grad is not None]
    for bucket in buckets(gradients):
        flat = _flatten_dense_tensors(bucket)
        HERE.meets()
        dist.all_reduce(flat, group=group)
        HERE.met()
        for gradient, whole in zip(bucket, _unflatten_dense_tensors(flat, bucket), strict=True):
            gradient.copy_(whole if among == 1 else whole / among)
