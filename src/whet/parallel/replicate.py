"""Replication: every rank holds the whole model; gradients are summed, never averaged."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors
from torch.distributed.tensor import DTensor

from whet.core.ranks import Ranks

_BUCKET_BYTES = 64 * 2**20


def start_equal(model: nn.Module, ranks: Ranks) -> None:
    """Give every rank rank 0's trainable weights; the frozen ones were loaded from the same files."""
    with torch.no_grad():
        for parameter in trainable(model):
            ranks.copy_from_first_(parameter)


def sum_gradients(parameters: Sequence[nn.Parameter], ranks: Ranks) -> None:
    """Replace each gradient by its sum over the ranks, several tensors at a time.

    Called once a step, after the last micro-batch: the loss is divided by the count of the whole step already, so
    the sum is the gradient. A weight that no row touched has a gradient of zero, for one rank as for many: without one
    an optimizer would leave it alone, with a sum of zeros it would not.
    """
    gradients = [_gradient(parameter) for parameter in parameters]
    if ranks.world == 1:
        return
    whole = [gradient for gradient in gradients if not isinstance(gradient, DTensor)]  # others are summed already
    for bucket in buckets(whole):
        flat = ranks.sum_(_flatten_dense_tensors(bucket))
        for gradient, summed in zip(bucket, _unflatten_dense_tensors(flat, bucket), strict=True):
            gradient.copy_(summed)


def sum_in_fp32(model: nn.Module) -> None:
    """Let the gradients of 16-bit weights be added up in fp32.

    In bf16 a sum over 8 micro-batches is off by 0.3 %, over 64 by 0.7 %, over 512 by 2.3 %. It costs two bytes more
    for each weight, so it is for steps of several micro-batches.
    """
    for parameter in trainable(model):
        if parameter.dtype.itemsize == 2:
            parameter.grad_dtype = torch.float32


def trainable(model: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def _gradient(parameter: nn.Parameter) -> Tensor:
    """A rank whose rows did not touch a weight still takes part, with zero."""
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter, dtype=parameter.grad_dtype)
    return parameter.grad


def buckets(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Tensors of one type, in order, up to a size that keeps the network busy and memory small."""
    bucket: list[Tensor] = []
    size = 0
    for tensor in tensors:
        if bucket and (size + tensor.nbytes > _BUCKET_BYTES or tensor.dtype != bucket[0].dtype):
            yield bucket
            bucket, size = [], 0
        bucket.append(tensor)
        size += tensor.nbytes
    if bucket:
        yield bucket
