"""Expert parallelism: the experts of each layer are distributed over processes, and tokens travel to them.

Every process computes its own rows up to the experts, sends each token to the processes that hold its experts, computes
what it receives, and sends the results back (two all-to-alls forward, two backward). Weights of experts are DTensors
over the expert axis, so that FSDP2 shards them further and checkpoints know their layout; all else is replicated over
that axis. Adapters of experts are small and replicated, too: each process uses those of its experts.

A process gets the whole gradient of its experts, from the tokens of all processes of its group, and of all other
weights the part of its own rows, which is summed over the group.

Shape letters: T tokens, K experts of a token, G experts, E hidden size, n processes, S rows received.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from whet.core.errors import WhetError
from whet.model.experts.install import experts_modules, set_experts_function
from whet.model.experts.operators import ExpertsWeights, LoraPair, experts
from whet.model.loss.loss_model import LossModel
from whet.parallel.ddp import all_reduce_in_group

_STATE_ATTRIBUTE = "_whet_expert_parallel"
_MODEL_PREFIX = "language_model."


def require_divisible_experts(model: nn.Module, processes: int) -> int:
    """The number of experts in a layer; an error if they cannot be distributed evenly over so many processes."""
    found = experts_modules(model)
    if not found:
        raise WhetError(
            f"parallel.expert: {processes}, but {type(model).__name__} has no experts that whet can distribute. Remove "
            "parallel.expert; parallel.shard works with any model"
        )
    counts = {len(next(module.parameters(recurse=False))) for module in found.values()}
    for count in counts:
        if count % processes:
            raise WhetError(
                f"parallel.expert: {processes}, but the model has {count} experts in a layer. Set it to a divisor of "
                f"{count}"
            )
    return max(counts)


@dataclass(slots=True)
class ExpertParallelState:
    """Kept on a model after apply_expert_parallel."""

    group: dist.ProcessGroup
    distributed: frozenset[str]
    """Parameters of which every process holds those of its experts."""
    others: list[nn.Parameter] = field(default_factory=list)
    """Trainable parameters that are replicated over the group. Found in the first step, after FSDP2 replaced them."""


def apply_expert_parallel(root: LossModel, mesh: DeviceMesh) -> None:
    """Distribute the experts of every layer over the processes of `mesh`, in place."""
    require_divisible_experts(root.language_model, mesh.size())
    distributed = set()
    for name, module in experts_modules(root.language_model).items():
        for each, weight in list(module.named_parameters(recurse=False)):
            module.register_parameter(each, _shard_experts(weight, mesh))
            distributed.add(f"{name}.{each}")
        set_experts_function(module, partial(distributed_experts, mesh.get_group()))
    object.__setattr__(root, _STATE_ATTRIBUTE, ExpertParallelState(mesh.get_group(), frozenset(distributed)))


def _shard_experts(weight: nn.Parameter, mesh: DeviceMesh) -> nn.Parameter:
    shard = weight.detach().chunk(mesh.size())[mesh.get_local_rank()].clone(memory_format=torch.contiguous_format)
    shape, stride = weight.shape, weight.stride()
    whole = DTensor.from_local(shard, mesh, [Shard(0)], run_check=False, shape=shape, stride=stride)
    return nn.Parameter(whole, requires_grad=weight.requires_grad)


def sum_gradients_over_expert_group(root: nn.Module) -> None:
    """Sum the gradients of all weights but those of experts. Called once a step, after the reduction over the other
    data-parallel ranks."""
    state: ExpertParallelState | None = getattr(root, _STATE_ATTRIBUTE, None)
    if state is None:
        return
    if not state.others:
        state.others = [
            weight
            for name, weight in root.named_parameters()
            if weight.requires_grad and name.removeprefix(_MODEL_PREFIX) not in state.distributed
        ]
    all_reduce_in_group(state.others, state.group)


@torch.compiler.disable  # collectives with a process group are not traced
def distributed_experts(
    group: dist.ProcessGroup, x: Tensor, index: Tensor, weights: Tensor, w: ExpertsWeights
) -> Tensor:  # fmt: skip
    """`experts`, for x [T, E] of this process and experts of all processes of the group."""
    count, choices = w.shape.experts // group.size(), index.shape[1]
    chosen, order = torch.sort(index.reshape(-1), stable=True)
    sent = torch.bincount(chosen // count, minlength=group.size())
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=group)
    sent_rows, received_rows = sent.tolist(), received.tolist()
    rows: Tensor = _AllToAll.apply(x[order // choices], group, sent_rows, received_rows)
    own: Tensor = _all_to_all(chosen % count, group, sent_rows, received_rows)[:, None]
    y = experts(rows, own, rows.new_ones(own.shape), _local_weights(w, count, group.rank()))
    back: Tensor = _AllToAll.apply(y, group, received_rows, sent_rows)
    by_choice = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
    of_tokens = back[by_choice].unflatten(0, (-1, choices)).to(torch.promote_types(x.dtype, torch.float32))
    return (of_tokens * weights.unsqueeze(-1)).sum(dim=1).to(x.dtype)


def _local_weights(w: ExpertsWeights, count: int, rank: int) -> ExpertsWeights:
    """The weights of this process's experts, with its share of replicated adapters."""
    return w._replace(
        shape=w.shape._replace(experts=count),
        up=[_local(tensor) for tensor in w.up],
        down=[_local(tensor) for tensor in w.down],
        up_bias=None if w.up_bias is None else _local(w.up_bias),
        down_bias=None if w.down_bias is None else _local(w.down_bias),
        up_lora=w.up_lora and _local_adapter(w.up_lora, w.shape.experts, count, rank),
        down_lora=w.down_lora and _local_adapter(w.down_lora, w.shape.experts, count, rank),
    )


def _local(tensor: Tensor) -> Tensor:
    """This process's experts, differentiable."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _local_adapter(pair: LoraPair, experts: int, count: int, rank: int) -> LoraPair:
    """In peft's layout, A [G · R, in] has the rows of an expert together, B [out, R · G] those of a rank."""
    here = slice(rank * count, (rank + 1) * count)
    a = pair.a.unflatten(0, (experts, -1))[here].flatten(0, 1)
    b = pair.b.unflatten(1, (-1, experts))[:, :, here].flatten(1, 2)
    return LoraPair(a, b, pair.scale)


class _AllToAll(torch.autograd.Function):
    """Rows to the processes in order, `sent[i]` of them to process i; the backward pass returns their gradients."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, group: dist.ProcessGroup, sent: list[int], received: list[int]) -> Tensor:
        ctx.group, ctx.sent, ctx.received = group, sent, received
        return _all_to_all(rows, group, sent, received)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        return _all_to_all(grads[0], ctx.group, ctx.received, ctx.sent), None, None, None


def _all_to_all(rows: Tensor, group: dist.ProcessGroup, sent: list[int], received: list[int]) -> Tensor:
    result = rows.new_empty(sum(received), *rows.shape[1:])
    dist.all_to_all_single(result, rows.contiguous(), received, sent, group=group)
    return result
