"""Tensor parallelism: processes that compute each layer together, each a part of the heads and of the MLP width.

A colwise layer shards the rows of its weight and so its output; the rowwise layer behind it shards the columns, and the
partial results are all-reduced. Between the two a process sees fewer heads, or a part of the MLP width, and the model's
code runs unchanged. Weights are DTensors, so that FSDP2 shards them further and checkpoints know their layout; layers
compute with the local shards. Embedding and head are replicated: the loss needs the head at supervised positions only.
"""

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
from whet.model.modules import eval_mode, model_body
from whet.parallel.ddp import all_reduce_in_group

# The model's plan: transformers' models say which modules are colwise, rowwise, or replicated.

_COLWISE, _ROWWISE, _ALL_REDUCED = "colwise", "rowwise", "replicated_with_grad_allreduce"
_HEAD_COUNTS = {"num_attention_heads": "heads", "num_key_value_heads": "key/value heads"}
_REMEDY = "Remove parallel.tensor; parallel.shard works with any model"


@dataclass(frozen=True, slots=True)
class TensorParallelPlan:
    """Names of modules."""

    colwise: list[str]
    rowwise: list[str]
    all_reduced: list[str]
    """Replicated modules between the two, such as norms of single heads: each process sees some of the heads, so their
    gradients are summed."""


def read_tensor_parallel_plan(model: nn.Module, processes: int) -> TensorParallelPlan:
    """The plan of a transformers model for a number of processes; an error if whet cannot follow it."""
    styles = dict(_planned_modules(model, tensor_parallel_plan(model)))
    if _COLWISE not in styles.values() or _ROWWISE not in styles.values():
        raise _error(processes, f"{type(model).__name__} has no tensor-parallel plan. {_REMEDY}")
    modules: dict[str, nn.Module] = dict(model.named_modules())
    for name, style in styles.items():
        if style not in (_COLWISE, _ROWWISE, _ALL_REDUCED):
            raise _error(processes, f"the model's plan has {style} for {name}, which whet does not support. {_REMEDY}")
        layer = modules.get(name)
        if layer is None or (style != _ALL_REDUCED and type(layer).forward is not nn.Linear.forward):
            kind = "weight" if layer is None else type(layer).__name__  # such as attention sinks
            raise _error(processes, f"{name} is a {kind}, not a plain linear layer. {_REMEDY}")
    config: Any = model.config.get_text_config()  # type: ignore[union-attr, operator]
    for key, what in _HEAD_COUNTS.items():
        heads = getattr(config, key, None)
        if isinstance(heads, int) and heads % processes:
            raise _error(processes, f"the model has {heads} {what}. Set it to a divisor of {heads}")
    sharded = [name for name, style in styles.items() if style != _ALL_REDUCED]
    for name in sharded:
        linear: Any = modules[name]
        size = linear.out_features if styles[name] == _COLWISE else linear.in_features
        if size % processes:
            raise _error(processes, f"{name} is {size} wide. Set it to a divisor of {size}")
    all_reduced = dict.fromkeys(name for name, style in styles.items() if style == _ALL_REDUCED)
    for parent in dict.fromkeys(name.rpartition(".")[0] for name in sharded if styles[name] == _COLWISE):
        all_reduced |= dict.fromkeys(_unplanned_modules(model, parent, styles, processes))
    return TensorParallelPlan(
        [name for name in sharded if styles[name] == _COLWISE],
        [name for name in sharded if styles[name] == _ROWWISE],
        list(all_reduced),
    )


def _planned_modules(model: nn.Module, plan: dict[str, str]) -> Iterator[tuple[str, str]]:
    """(name, style) of all modules and parameters in the plan except embedding and head."""
    ends = {id(model.get_input_embeddings()), id(model.get_output_embeddings())}  # type: ignore[operator]
    modules = [name for name, module in model.named_modules() if id(module) not in ends]
    skipped = {f"{name}.weight" for name, module in model.named_modules() if id(module) in ends}
    weights = [name for name, _ in model.named_parameters() if name not in skipped]
    for name in (*modules, *weights):
        pattern = ".".join("*" if part.isdigit() else part for part in name.split("."))
        if pattern in plan:
            yield name, plan[pattern]


def _unplanned_modules(model: nn.Module, parent: str, styles: dict[str, str], processes: int) -> Iterator[str]:
    """Modules between sharded layers that the plan does not name but that work on single heads, such as norms of
    queries. How to shard any other weight there is unknown."""
    inside = model.get_submodule(parent)
    head_dim = getattr(inside, "head_dim", None)
    for name, weight in inside.named_parameters():
        owner = f"{parent}.{name}".rpartition(".")[0]
        if owner in styles:
            continue
        if owner == parent or weight.shape != (head_dim,):
            raise _error(processes, f"{parent}.{name} is between sharded layers and not in the model's plan. {_REMEDY}")
        yield owner


def _error(processes: int, reason: str) -> WhetError:
    return WhetError(f"parallel.tensor: {processes}, but {reason}")


# Sharding the layers

_STATE_ATTRIBUTE = "_whet_tensor_parallel"
_MODEL_PREFIX = "language_model."


@dataclass(slots=True)
class TensorParallelState:
    """Kept on a model after apply_tensor_parallel. Parameters are named as in the language model."""

    group: dist.ProcessGroup
    sharded: frozenset[str]
    """Parameters of which every process holds a shard."""
    all_reduced: frozenset[str]
    """Replicated parameters of whose gradient every process computes a part."""
    replicated: tuple[list[nn.Parameter], list[nn.Parameter]] | None = None
    """Trainable parameters that are not sharded: those with partial gradients, those with whole ones. Found in the
    first step, after FSDP2 has replaced the parameters; walking a large model's modules takes long."""


def apply_tensor_parallel(root: LossModel, mesh: DeviceMesh) -> None:
    """Shard the layers that the model's plan names, in place."""
    model, group = root.language_model, mesh.get_group()
    plan = read_tensor_parallel_plan(model, mesh.size())
    parents = {name.rpartition(".")[0] for name in (*plan.colwise, *plan.rowwise)}
    regions = {parent: TensorParallelRegion(group.group_name) for parent in parents}
    for names, kind, dim in ((plan.colwise, ColwiseLinear, 0), (plan.rowwise, RowwiseLinear, 1)):
        for name in names:
            layer: Any = model.get_submodule(name)
            layer.weight = _shard_parameter(layer.weight, mesh, dim)
            if dim == 0 and layer.bias is not None:
                layer.bias = _shard_parameter(layer.bias, mesh, 0)
            layer.region = regions[name.rpartition(".")[0]]
            set_module_class(layer, kind)
    sharded = frozenset([*_parameter_names(model, plan.colwise), *(f"{name}.weight" for name in plan.rowwise)])
    state = TensorParallelState(group, sharded, frozenset(_parameter_names(model, plan.all_reduced)))
    object.__setattr__(root, _STATE_ATTRIBUTE, state)


def _shard_parameter(weight: nn.Parameter, mesh: DeviceMesh, dim: int) -> nn.Parameter:
    shard = weight.detach().chunk(mesh.size(), dim)[mesh.get_local_rank()].clone(memory_format=torch.contiguous_format)
    shape, stride = weight.shape, weight.stride()
    whole = DTensor.from_local(shard, mesh, [Shard(dim)], run_check=False, shape=shape, stride=stride)
    return nn.Parameter(whole, requires_grad=weight.requires_grad)


def _parameter_names(model: nn.Module, modules: list[str]) -> list[str]:
    return [f"{name}.{each}" for name in modules for each, _ in model.get_submodule(name).named_parameters()]


def tensor_parallel_state(root: nn.Module) -> TensorParallelState | None:
    """None without tensor parallelism."""
    return getattr(root, _STATE_ATTRIBUTE, None)


def verify_tensor_parallel(root: LossModel) -> None:
    """Run four tokens through the sharded layers: a model's code may rely on the number of heads it was built with."""
    state = tensor_parallel_state(root)
    if state is not None:
        root.with_full_weights(lambda: _forward_few_tokens(root, state.group.size()))


@torch.no_grad()
def _forward_few_tokens(root: LossModel, processes: int) -> None:
    tokens = torch.arange(4, device=next(root.parameters()).device)[None]
    with eval_mode(root), native_attention(root.language_model):
        try:
            model_body(root.language_model)(input_ids=tokens, use_cache=False)
        except (RuntimeError, ValueError, TypeError, IndexError, AttributeError) as error:
            if is_peer_failure(error) or isinstance(error, torch.OutOfMemoryError):  # not the model's fault
                raise
            raise _error(
                processes, f"the model fails with a part of its heads ({describe_error(error)}). {_REMEDY}"
            ) from None


class TensorParallelRegion:
    """The sharded layers of one module: attention or MLP. Colwise layers with the same input (queries, keys and values)
    enter together, so that its gradient is all-reduced once for all of them."""

    def __init__(self, group: str) -> None:
        self._group = group
        self._outside: Tensor | None = None
        self._inside: Tensor | None = None

    def enter(self, states: Tensor) -> Tensor:
        if self._inside is None or self._outside is not states:
            self._outside, self._inside = states, _CopyToRegion.apply(states, self._group)
        return self._inside

    def clear(self) -> None:
        """Drop the input, which keeps everything computed before it alive. Called before the rowwise product: a
        recomputed layer may stop there."""
        self._outside = self._inside = None

    def exit(self, states: Tensor) -> Tensor:
        whole: Tensor = _ReduceFromRegion.apply(states, self._group)
        return whole


class ColwiseLinear(nn.Linear):
    """Computes this process's part of the output features."""

    region: TensorParallelRegion

    def forward(self, input: Tensor) -> Tensor:
        bias = None if self.bias is None else _differentiable_local(self.bias)
        return F.linear(self.region.enter(input), _differentiable_local(self.weight), bias)


class RowwiseLinear(nn.Linear):
    """Computes the whole output from this process's part of the input features, by an all-reduce."""

    region: TensorParallelRegion

    def forward(self, input: Tensor) -> Tensor:
        self.region.clear()
        whole = self.region.exit(F.linear(input, _differentiable_local(self.weight)))
        return whole if self.bias is None else whole + self.bias.to(whole.dtype)  # once, not in every process


def _differentiable_local(weight: Any) -> Tensor:
    shard: Tensor = weight.to_local()
    return shard


class _CopyToRegion(torch.autograd.Function):
    """Forward: the identity. Backward: the gradient summed over the processes."""

    @staticmethod
    def forward(ctx: Any, states: Tensor, group: str) -> Tensor:
        ctx.group = group
        return states.view_as(states)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return functional_all_reduce(grads[0], ctx.group), None


class _ReduceFromRegion(torch.autograd.Function):
    """Forward: the sum over the processes. Backward: the identity, because all of them continue with the same."""

    @staticmethod
    def forward(ctx: Any, states: Tensor, group: str) -> Tensor:
        return functional_all_reduce(states, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None


# Gradients of replicated parameters
#
# Every process computes the whole gradient of embedding, head and norms between layers, equal up to rounding. If each
# process applied its own, the replicas would drift apart, and a checkpoint of one would not be the model that
# was trained. So all use the mean. Norms of single heads get a part of their gradient in each process: they are summed.


def sync_replicated_gradients(model: nn.Module) -> None:
    """Make the gradients of replicated parameters equal in all processes of a tensor-parallel group. Called once a
    step, after the reduction over data-parallel ranks."""
    state = tensor_parallel_state(model)
    if state is None:
        return
    if state.replicated is None:
        state.replicated = _replicated_parameters(model, state)
    partial, whole = state.replicated
    all_reduce_in_group(partial, state.group)
    all_reduce_in_group(whole, state.group, divisor=state.group.size())


def _replicated_parameters(
    model: nn.Module, state: TensorParallelState
) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    partial: list[nn.Parameter] = []
    whole: list[nn.Parameter] = []
    for full_name, weight in model.named_parameters():
        name = full_name.removeprefix(_MODEL_PREFIX)
        if weight.requires_grad and name not in state.sharded:
            (partial if name in state.all_reduced else whole).append(weight)
    return partial, whole
