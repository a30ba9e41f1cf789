"""Tensor parallelism: processes that compute each layer together, every one with its part of the heads and of the
feed-forward width.

A layer that divides its results takes what all have alike, so what flows back into that is summed over the processes; a
layer that divides what goes in gives a part of a sum, which is summed on the way forth. All around stays plain: it sees
fewer heads. Weights are DTensors, so that FSDP2 divides them further and checkpoints know which part is whose; they are
computed with as the plain parts that they are.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from whet.core.errors import WhetError
from whet.core.ranks import lost_peer
from whet.model.attention import plain
from whet.model.loss import LossModel
from whet.model.modes import evaluating
from whet.parallel.tensor_plan import read_plan

_MARK = "_whet_across"


@dataclass(frozen=True, slots=True)
class Across:
    """What a model with divided layers knows of it. Weights are named as they are in the language model."""

    group: dist.ProcessGroup
    divided: frozenset[str]
    """Weights of which every process has a part of its own."""
    summed: frozenset[str]
    """Weights that every process has whole, and of whose gradient it finds a part."""


def divide_(root: LossModel, mesh: DeviceMesh) -> None:
    """Leave this process its part of the layers that the model's plan divides."""
    model, group = root.language_model, mesh.get_group()
    plan = read_plan(model, mesh.size())
    doors = {name.rpartition(".")[0]: Door(group.group_name) for name in (*plan.colwise, *plan.rowwise)}
    for names, kind, dim in ((plan.colwise, ColwiseLinear, 0), (plan.rowwise, RowwiseLinear, 1)):
        for name in names:
            layer: Any = model.get_submodule(name)
            layer.weight = _part(layer.weight, mesh, dim)
            if dim == 0 and layer.bias is not None:
                layer.bias = _part(layer.bias, mesh, 0)
            layer.door = doors[name.rpartition(".")[0]]
            layer.__class__ = kind  # another function in `forward` would be compiled anew for each layer
    divided = frozenset([*_weights_of(model, plan.colwise), *(f"{name}.weight" for name in plan.rowwise)])
    object.__setattr__(root, _MARK, Across(group, divided, frozenset(_weights_of(model, plan.summed))))


def across(root: nn.Module) -> Across | None:
    """What `divide_` left; None: every layer is computed by one process."""
    return getattr(root, _MARK, None)


def try_out(root: LossModel) -> None:
    """Run a few tokens through divided layers: a model may take something for known that is no longer so."""
    here = across(root)
    if here is not None:
        root.within(lambda: _try(root, here.group.size()))


@torch.no_grad()
def _try(root: LossModel, processes: int) -> None:
    tokens = torch.arange(4, device=next(root.parameters()).device)[None]
    with evaluating(root), plain(root.language_model):
        try:
            root.language_model.base_model(input_ids=tokens, use_cache=False)  # type: ignore[operator]
        except (RuntimeError, ValueError, TypeError, IndexError, AttributeError) as error:
            if lost_peer(error) or isinstance(error, torch.OutOfMemoryError):  # says nothing of the model
                raise
            first = next((line for line in str(error).splitlines() if line.strip()), "")
            raise WhetError(
                f"parallel.tensor: {processes}, but this model does not compute with a part of its heads "
                f"({type(error).__name__}: {first}). Leave parallel.tensor out; parallel.shard divides any model"
            ) from None


class Door:
    """Where states enter the divided layers of one module, and where they leave. Layers that take the same, as those of
    queries, keys and values do, let it in once, so that its gradient is summed once for all of them."""

    def __init__(self, group: str) -> None:
        self._group = group
        self._outside: Tensor | None = None
        self._inside: Tensor | None = None

    def enter(self, states: Tensor) -> Tensor:
        if self._inside is None or self._outside is not states:
            self._outside, self._inside = states, _SumBack.apply(states, self._group)
        return self._inside

    def shut(self) -> None:
        """Forget what came in, before anything leaves. What came in holds all that was computed before it, until the
        layer is computed again; and a layer that is recomputed may come no further than to its last product."""
        self._outside = self._inside = None

    def leave(self, states: Tensor) -> Tensor:
        whole: Tensor = _SumForth.apply(states, self._group)
        return whole


class ColwiseLinear(nn.Linear):
    """Of what the whole layer gives, this process's part."""

    door: Door

    def forward(self, input: Tensor) -> Tensor:
        bias = None if self.bias is None else _here(self.bias)
        return F.linear(self.door.enter(input), _here(self.weight), bias)


class RowwiseLinear(nn.Linear):
    """What the whole layer gives, of the part of its input that this process has."""

    door: Door

    def forward(self, input: Tensor) -> Tensor:
        self.door.shut()
        whole = self.door.leave(F.linear(input, _here(self.weight)))
        return whole if self.bias is None else whole + self.bias.to(whole.dtype)  # once, not by every process


def _here(weight: Any) -> Tensor:
    """This process's part, differentiable."""
    part: Tensor = weight.to_local()
    return part


def _part(weight: nn.Parameter, mesh: DeviceMesh, dim: int) -> nn.Parameter:
    """A whole weight as one of which this process keeps its part."""
    mine = weight.detach().chunk(mesh.size(), dim)[mesh.get_local_rank()].clone(memory_format=torch.contiguous_format)
    shape, stride = weight.shape, weight.stride()
    divided = DTensor.from_local(mine, mesh, [Shard(dim)], run_check=False, shape=shape, stride=stride)
    return nn.Parameter(divided, requires_grad=weight.requires_grad)


def _weights_of(model: nn.Module, modules: list[str]) -> list[str]:
    return [f"{name}.{each}" for name in modules for each, _ in model.get_submodule(name).named_parameters()]


class _SumBack(torch.autograd.Function):
    """Forth as it is; back, the sum of what all processes find."""

    @staticmethod
    def forward(ctx: Any, states: Tensor, group: str) -> Tensor:
        ctx.group = group
        return states.view_as(states)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return _summed(grads[0], ctx.group), None


class _SumForth(torch.autograd.Function):
    """Forth, the sum of what all processes have; back as it is, because all go on with the same."""

    @staticmethod
    def forward(ctx: Any, states: Tensor, group: str) -> Tensor:
        return _summed(states, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None


def _summed(states: Tensor, group: str) -> Tensor:
    """By an operation that the compiler knows, so that a layer stays one graph."""
    functional = torch.ops._c10d_functional
    whole: Tensor = functional.wait_tensor(functional.all_reduce(states.contiguous(), "sum", group))
    return whole
