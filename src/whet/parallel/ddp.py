"""Data parallelism: every rank holds the whole model; gradients are all-reduced once a step, summed, never averaged."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from whet.compat.torch_private import flatten_dense_tensors, unflatten_dense_tensors
from whet.core.distributed import Ranks
from whet.core.heartbeat import PHASE
from whet.parallel.dtensor import local_tensor

_BUCKET_BYTES = 64 * 2**20


def broadcast_weights(model: nn.Module, ranks: Ranks) -> None:
    """Copy rank 0's trainable weights to every rank; each has loaded the frozen ones from the same files."""
    with torch.no_grad():
        for parameter in trainable_parameters(model):
            ranks.broadcast_(parameter)


def all_reduce_gradients(parameters: Sequence[nn.Parameter], ranks: Ranks) -> None:
    """Replace each gradient by its sum over the ranks, in buckets.

    Called once a step, after the last micro-batch. The loss is already divided by the token count of the whole step, so
    the sum is the gradient. A parameter that no row on any rank used keeps no gradient, with one rank as with many:
    optimizers leave it alone, while they would decay one whose gradient is zero.
    """
    if ranks.world_size == 1:
        return
    unused = [number for number, parameter in enumerate(parameters) if parameter.grad is None]
    users = torch.ones(len(parameters), device=ranks.device)
    if unused:
        users[unused] = 0
    ranks.all_reduce_(users)
    gradients = [_gradient_or_zero(parameter) for parameter in parameters]
    unsharded = [gradient for gradient in gradients if not isinstance(gradient, DTensor)]  # FSDP2 reduces the others
    for bucket in buckets(unsharded):
        flat = ranks.all_reduce_(flatten_dense_tensors(bucket))
        for gradient, summed in zip(bucket, unflatten_dense_tensors(flat, bucket), strict=True):
            gradient.copy_(summed)
    if unused:  # only then wait for the device
        used = users.tolist()
        for number in unused:
            if not used[number]:
                parameters[number].grad = None


def all_reduce_in_group(weights: Sequence[nn.Parameter], group: dist.ProcessGroup, divisor: int = 1) -> None:
    """Replace the gradients of these weights, or this process's shards of them, by their sum over a group ÷ `divisor`,
    in buckets."""
    for bucket in buckets([local_tensor(weight.grad) for weight in weights if weight.grad is not None]):
        flat = flatten_dense_tensors(bucket)
        PHASE.begin_wait()
        dist.all_reduce(flat, group=group)
        PHASE.end_wait()
        for gradient, summed in zip(bucket, unflatten_dense_tensors(flat, bucket), strict=True):
            gradient.copy_(summed if divisor == 1 else summed / divisor)


def accumulate_in_fp32(model: nn.Module, enabled: bool = True) -> None:
    """Accumulate the gradients of 16-bit weights in fp32, for two more bytes per weight; they have no gradient now.

    In bf16 the sum over 8 micro-batches is off by 0.3 %, over 64 by 0.7 %, over 512 by 2.3 %.
    """
    for parameter in trainable_parameters(model):
        if parameter.dtype.itemsize == 2:
            parameter.grad = None
            parameter.grad_dtype = torch.float32 if enabled else parameter.dtype


def trainable_parameters(model: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def buckets(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Consecutive tensors of one dtype, up to 64 MiB: large enough for the network, small enough for memory."""
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


def _gradient_or_zero(parameter: nn.Parameter) -> Tensor:
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter, dtype=parameter.grad_dtype)
    return parameter.grad
