"""Tensor parallelism: colwise and rowwise linear layers by the model's own plan, kept as DTensors."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from whet.compat.torch_private import functional_all_reduce, set_module_class
from whet.compat.transformers_private import tensor_parallel_plan
from whet.core.distributed import is_peer_failure
from whet.core.errors import WhetError, describe_error
from whet.model.attention import native_attention
from whet.model.loss.loss_model import LossModel
from whet.model.modules import eval_mode

# What a model's own plan says of computing its layers by several processes together, as far as whet can follow it.
#
# transformers' models carry such a plan: `colwise` divides the rows of a linear layer's weight, and with them what it
# gives; the layer behind it is `rowwise`, divides its columns, takes what the process has, and the results are summed.
# Between the two, each process has some of the heads, or a part of the feed-forward width. Embedding and head stay whole:
# the loss is computed on supervised positions only, by a head that it reads.

_COLWISE, _ROWWISE, _ALL_REDUCED = "colwise", "rowwise", "replicated_with_grad_allreduce"
_HEAD_COUNTS = ("num_attention_heads", "num_key_value_heads")
_REMEDY = "Leave parallel.tensor out; parallel.shard divides any model"


@dataclass(frozen=True, slots=True)
class TensorParallelPlan:
    """Names of modules."""

    colwise: list[str]
    """Linear layers of which each process computes a part of the results."""
    rowwise: list[str]
    """Linear layers of which each process has a part of what goes in."""
    summed: list[str]
    """What every process has whole, between the two: it sees some of the heads, so its gradients are to be summed."""


def read_tensor_parallel_plan(model: nn.Module, processes: int) -> TensorParallelPlan:
    """The plan of a transformers model, for so many processes; what cannot be computed so is refused."""
    styles = dict(_planned_modules(model, tensor_parallel_plan(model)))
    if _COLWISE not in styles.values() or _ROWWISE not in styles.values():
        raise _tensor_parallel_error(processes, f"this model ({type(model).__name__}) has no plan for it. {_REMEDY}")
    for name, style in styles.items():
        if style not in (_COLWISE, _ROWWISE, _ALL_REDUCED):
            raise _tensor_parallel_error(
                processes, f"this model's plan wants {style} for {name}, which whet cannot do. {_REMEDY}"
            )
    divided = [name for name, style in styles.items() if style != _ALL_REDUCED]
    modules: dict[str, nn.Module] = dict(model.named_modules())
    for name, style in styles.items():
        layer = modules.get(name)
        if layer is None or (style != _ALL_REDUCED and type(layer).forward is not nn.Linear.forward):
            kind = "weight" if layer is None else type(layer).__name__  # such as attention sinks
            raise _tensor_parallel_error(processes, f"{name} is a {kind}, not a plain linear layer. {_REMEDY}")
    _require_divisible_heads(model, processes)
    for name in divided:
        _require_divisible_width(model, name, styles[name], processes)
    between = dict.fromkeys(name.rpartition(".")[0] for name in divided if styles[name] == _COLWISE)
    summed = dict.fromkeys(name for name, style in styles.items() if style == _ALL_REDUCED)
    for parent in between:
        summed |= dict.fromkeys(_unplanned_modules(model, parent, styles, processes))
    return TensorParallelPlan(
        [name for name in divided if styles[name] == _COLWISE],
        [name for name in divided if styles[name] == _ROWWISE],
        list(summed),
    )


def _planned_modules(model: nn.Module, plan: dict[str, str]) -> Iterator[tuple[str, str]]:
    """(name, style) of all modules and weights that a plan is about, embedding and head excepted."""
    ends = {id(model.get_input_embeddings()), id(model.get_output_embeddings())}  # type: ignore[operator]
    modules = [name for name, module in model.named_modules() if id(module) not in ends]
    kept = {f"{name}.weight" for name, module in model.named_modules() if id(module) in ends}
    weights = [name for name, _ in model.named_parameters() if name not in kept]
    for name in (*modules, *weights):
        pattern = ".".join("*" if part.isdigit() else part for part in name.split("."))
        if pattern in plan:
            yield name, plan[pattern]


def _require_divisible_heads(model: nn.Module, processes: int) -> None:
    config: Any = model.config.get_text_config()  # type: ignore[union-attr, operator]
    for key in _HEAD_COUNTS:
        heads = getattr(config, key, None)
        if isinstance(heads, int) and heads % processes:
            what = "key/value heads" if key == _HEAD_COUNTS[1] else "heads"
            raise _tensor_parallel_error(
                processes, f"this model has {heads} {what}, which do not divide by it. Lower it to a divisor of {heads}"
            )


def _require_divisible_width(model: nn.Module, name: str, style: str, processes: int) -> None:
    layer: Any = model.get_submodule(name)
    size = layer.out_features if style == _COLWISE else layer.in_features
    if size % processes:
        reason = f"{name} is {size} wide, which does not divide by it. Lower it to a divisor of {size}"
        raise _tensor_parallel_error(processes, reason)


def _unplanned_modules(model: nn.Module, parent: str, styles: dict[str, str], processes: int) -> Iterator[str]:
    """Modules between divided layers that the plan does not name and that see single heads, as norms of queries do.
    Other weights there would have to be divided in a way that nobody says."""
    inside = model.get_submodule(parent)
    width = getattr(inside, "head_dim", None)
    for name, weight in inside.named_parameters():
        owner = f"{parent}.{name}".rpartition(".")[0]
        if owner in styles:
            continue
        if owner == parent or weight.shape != (width,):
            reason = "stands beside divided layers, and this model's plan does not say how it is to be divided"
            raise _tensor_parallel_error(processes, f"{parent}.{name} {reason}. {_REMEDY}")
        yield owner


def _tensor_parallel_error(processes: int, reason: str) -> WhetError:
    return WhetError(f"parallel.tensor: {processes}, but {reason}")


# Tensor parallelism: processes that compute each layer together, every one with its part of the heads and of the
# feed-forward width.
#
# A layer that divides its results takes what all have alike, so what flows back into that is summed over the processes; a
# layer that divides what goes in gives a part of a sum, which is summed on the way forth. All around stays plain: it sees
# fewer heads. Weights are DTensors, so that FSDP2 divides them further and checkpoints know which part is whose; they are
# computed with as the plain parts that they are.

_STATE_ATTRIBUTE = "_whet_across"


@dataclass(frozen=True, slots=True)
class TensorParallelState:
    """What a model with divided layers knows of it. Weights are named as they are in the language model."""

    group: dist.ProcessGroup
    divided: frozenset[str]
    """Weights of which every process has a part of its own."""
    summed: frozenset[str]
    """Weights that every process has whole, and of whose gradient it finds a part."""


def apply_tensor_parallel(root: LossModel, mesh: DeviceMesh) -> None:
    """Leave this process its part of the layers that the model's plan divides."""
    model, group = root.language_model, mesh.get_group()
    plan = read_tensor_parallel_plan(model, mesh.size())
    doors = {name.rpartition(".")[0]: TensorParallelRegion(group.group_name) for name in (*plan.colwise, *plan.rowwise)}
    for names, kind, dim in ((plan.colwise, ColwiseLinear, 0), (plan.rowwise, RowwiseLinear, 1)):
        for name in names:
            layer: Any = model.get_submodule(name)
            layer.weight = _shard_parameter(layer.weight, mesh, dim)
            if dim == 0 and layer.bias is not None:
                layer.bias = _shard_parameter(layer.bias, mesh, 0)
            layer.door = doors[name.rpartition(".")[0]]
            set_module_class(layer, kind)
    divided = frozenset([*_parameter_names(model, plan.colwise), *(f"{name}.weight" for name in plan.rowwise)])
    object.__setattr__(
        root, _STATE_ATTRIBUTE, TensorParallelState(group, divided, frozenset(_parameter_names(model, plan.summed)))
    )


def tensor_parallel_state(root: nn.Module) -> TensorParallelState | None:
    """What `divide_` left; None: every layer is computed by one process."""
    return getattr(root, _STATE_ATTRIBUTE, None)


def verify_tensor_parallel(root: LossModel) -> None:
    """Run a few tokens through divided layers: a model may take something for known that is no longer so."""
    here = tensor_parallel_state(root)
    if here is not None:
        root.within(lambda: _forward_few_tokens(root, here.group.size()))


@torch.no_grad()
def _forward_few_tokens(root: LossModel, processes: int) -> None:
    tokens = torch.arange(4, device=next(root.parameters()).device)[None]
    with eval_mode(root), native_attention(root.language_model):
        try:
            root.language_model.base_model(input_ids=tokens, use_cache=False)  # type: ignore[operator]
        except (RuntimeError, ValueError, TypeError, IndexError, AttributeError) as error:
            if is_peer_failure(error) or isinstance(error, torch.OutOfMemoryError):  # says nothing of the model
                raise
            raise WhetError(
                f"parallel.tensor: {processes}, but this model does not compute with a part of its heads "
                f"({describe_error(error)}). Leave parallel.tensor out; parallel.shard divides any model"
            ) from None


class TensorParallelRegion:
    """Where states enter the divided layers of one module, and where they leave. Layers that take the same, as those of
    queries, keys and values do, let it in once, so that its gradient is summed once for all of them."""

    def __init__(self, group: str) -> None:
        self._group = group
        self._outside: Tensor | None = None
        self._inside: Tensor | None = None

    def enter(self, states: Tensor) -> Tensor:
        if self._inside is None or self._outside is not states:
            self._outside, self._inside = states, _CopyToRegion.apply(states, self._group)
        return self._inside

    def shut(self) -> None:
        """Forget what came in, before anything leaves. What came in holds all that was computed before it, until the
        layer is computed again; and a layer that is recomputed may come no further than to its last product."""
        self._outside = self._inside = None

    def leave(self, states: Tensor) -> Tensor:
        whole: Tensor = _ReduceFromRegion.apply(states, self._group)
        return whole


class ColwiseLinear(nn.Linear):
    """Of what the whole layer gives, this process's part."""

    door: TensorParallelRegion

    def forward(self, input: Tensor) -> Tensor:
        bias = None if self.bias is None else _differentiable_local(self.bias)
        return F.linear(self.door.enter(input), _differentiable_local(self.weight), bias)


class RowwiseLinear(nn.Linear):
    """What the whole layer gives, of the part of its input that this process has."""

    door: TensorParallelRegion

    def forward(self, input: Tensor) -> Tensor:
        self.door.shut()
        whole = self.door.leave(F.linear(input, _differentiable_local(self.weight)))
        return whole if self.bias is None else whole + self.bias.to(whole.dtype)  # once, not by every process


def _differentiable_local(weight: Any) -> Tensor:
    """This process's part, differentiable."""
    part: Tensor = weight.to_local()
    return part


def _shard_parameter(weight: nn.Parameter, mesh: DeviceMesh, dim: int) -> nn.Parameter:
    """A whole weight as one of which this process keeps its part."""
    mine = weight.detach().chunk(mesh.size(), dim)[mesh.get_local_rank()].clone(memory_format=torch.contiguous_format)
    shape, stride = weight.shape, weight.stride()
    divided = DTensor.from_local(mine, mesh, [Shard(dim)], run_check=False, shape=shape, stride=stride)
    return nn.Parameter(divided, requires_grad=weight.requires_grad)


def _parameter_names(model: nn.Module, modules: list[str]) -> list[str]:
    return [f"{name}.{each}" for name in modules for each, _ in model.get_submodule(name).named_parameters()]


class _CopyToRegion(torch.autograd.Function):
    """Forth as it is; back, the sum of what all processes find."""

    @staticmethod
    def forward(ctx: Any, states: Tensor, group: str) -> Tensor:
        ctx.group = group
        return states.view_as(states)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return functional_all_reduce(grads[0], ctx.group), None


class _ReduceFromRegion(torch.autograd.Function):
    """Forth, the sum of what all processes have; back as it is, because all go on with the same."""

    @staticmethod
    def forward(ctx: Any, states: Tensor, group: str) -> Tensor:
        return functional_all_reduce(states, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None
