"""Private APIs of torch, seen in 2.11 and 2.13; those of torch.compile are in torch_compiler."""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors
from torch.distributed.distributed_c10d import _set_pg_timeout
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.overrides import _get_current_function_mode_stack
from torch.utils import _pytree
from torch.utils._python_dispatch import TorchDispatchMode

# Multi-tensor operations: one kernel launch for a list of tensors. torch.optim is built on them; torch has no public
# names for them.
foreach_add_ = torch._foreach_add_
"""`torch._foreach_add_`: adds what a CUDA graph has computed to gradients."""
foreach_copy_ = torch._foreach_copy_
"""`torch._foreach_copy_`: copies gradients into the fixed buffers of a CUDA graph; casts adapters."""
foreach_mul = torch._foreach_mul
"""`torch._foreach_mul`: scales the weights of adapters."""
foreach_mul_ = torch._foreach_mul_
"""`torch._foreach_mul_`: scales gradients when they are clipped."""
foreach_norm = torch._foreach_norm
"""`torch._foreach_norm`: norms of all gradients."""


def fused_adamw_step(optimizer: torch.optim.AdamW, inverse_scale: Tensor, found_inf: Tensor | None) -> None:
    """`torch._fused_adamw_`, as `AdamW(fused=True).step()` calls it for weights of one device and dtype: its kernel
    divides gradients by `inverse_scale` and does nothing if `found_inf` is 1. Every weight must have its state. The
    method itself sorts hundreds of weights by device and dtype in every step, which takes the host 1.5 ms."""
    for group in optimizer.param_groups:
        weights = [weight for weight in group["params"] if weight.grad is not None]
        states = [optimizer.state[weight] for weight in weights]
        steps, (beta1, beta2) = [state["step"] for state in states], group["betas"]
        if not weights:
            continue
        torch._foreach_add_(steps, 1)
        torch._fused_adamw_(
            weights, [weight.grad for weight in weights], [state["exp_avg"] for state in states],
            [state["exp_avg_sq"] for state in states], [], steps, lr=group["lr"], beta1=beta1, beta2=beta2,
            weight_decay=group["weight_decay"], eps=group["eps"], amsgrad=False, maximize=False,
            grad_scale=inverse_scale, found_inf=found_inf,
        )  # fmt: skip
        if found_inf is not None:
            torch._foreach_sub_(steps, [found_inf] * len(steps))


flatten_dense_tensors: Callable[[list[Tensor]], Tensor] = _flatten_dense_tensors
"""`torch._utils._flatten_dense_tensors`: concatenates a bucket of gradients for one all-reduce."""
unflatten_dense_tensors: Callable[[Tensor, list[Tensor]], tuple[Tensor, ...]] = _unflatten_dense_tensors
"""`torch._utils._unflatten_dense_tensors`: views of a flat tensor in the shapes of the tensors it was made of."""

scaled_mm = torch._scaled_mm
"""`torch._scaled_mm`: the fp8 matrix product. torch.nn.functional.scaled_mm, which is public, has no `out`."""


def grouped_mm(left: Tensor, right: Tensor, ends: Tensor) -> Tensor:
    """`torch._grouped_mm`: products of groups of rows, or sums over groups of columns, that end at `ends` (int32)."""
    return torch._grouped_mm(left, right, offs=ends)


# Modules


def set_module_class(module: nn.Module, cls: type) -> None:
    """Assign `module.__class__`. The module stays the same object: names, weights, hooks and wrappers keep it.

    A new class, not a new `forward`, because torch.compile shares compiled code between instances of a class, and would
    compile a function in `module.forward` once for each module."""
    module.__class__ = cls


def replace_forward(module: nn.Module, forward: Callable[..., Any]) -> None:
    """Assign `module.forward`, which nn.Module.__call__ looks up on the instance."""
    module.__dict__.setdefault("_whet_unwrapped_forward", module.forward)
    module.forward = forward


def unwrapped_forward(module: nn.Module) -> Callable[..., Any]:
    """The `forward` that `replace_forward` replaced first, or the current one."""
    forward: Callable[..., Any] = module.__dict__.get("_whet_unwrapped_forward", module.forward)
    return forward


def replace_step(optimizer: torch.optim.Optimizer, step: Callable[[], None]) -> None:
    """Assign `optimizer.step`, as torch's own learning rate schedulers do."""
    optimizer.step = step  # type: ignore[method-assign, assignment]


def copy_module_without_children(module: nn.Module, children: dict[str, Any]) -> Any:
    """A shallow copy of `module` with `children` for its submodules (`Module._modules`) and without a `forward` that
    was assigned to the instance, to try out its class on small layers."""
    small: Any = copy.copy(module)
    small.__dict__["_modules"] = children
    small.__dict__.pop("forward", None)
    return small


def copy_module_without_weights(module: nn.Module) -> Any:
    """A shallow copy of `module` without `Module._parameters` and `_buffers`, with those submodules that have none, so
    that the copy keeps no weight alive."""
    children = {name: child for name, child in module.named_children() if not any(True for _ in child.parameters())}
    small = copy_module_without_children(module, children)
    small.__dict__["_parameters"], small.__dict__["_buffers"] = {}, {}
    return small


def has_forward_hooks(module: nn.Module) -> bool:
    """`Module._forward_hooks`: a CUDA graph would not call them."""
    return bool(module._forward_hooks)


def persistent_buffers(module: nn.Module) -> list[tuple[str, Tensor]]:
    """The module's own buffers without `Module._non_persistent_buffers_set`, as state_dict() saves them."""
    skipped = module._non_persistent_buffers_set
    return [(name, buffer) for name, buffer in module.named_buffers(recurse=False) if name not in skipped]


def function_modes() -> list[Any]:
    """`torch.overrides._get_current_function_mode_stack`: the active TorchFunctionModes, which activation
    checkpointing does not restore when it recomputes."""
    return _get_current_function_mode_stack()


# Sharded tensors and process groups


def dtensor_local(tensor: DTensor) -> Tensor:
    """`DTensor._local_tensor`: the local shard itself. `to_local` would go through autograd."""
    return tensor._local_tensor


def set_dtensor_local(tensor: DTensor, local: Tensor) -> None:
    """Assign `DTensor._local_tensor`: moves the shard of an optimizer state between device and host."""
    tensor._local_tensor = local


def dtensor_like(like: DTensor, local: Tensor) -> DTensor:
    """`DTensor(local, like._spec)`: `local` as the shard of a tensor sharded like `like`. It stays on its device;
    `from_local` would move it to the mesh's."""
    return DTensor(local, like._spec, requires_grad=False)


def dtensor_of_shape(like: DTensor, local: Tensor, shape: torch.Size) -> DTensor:
    """Like `dtensor_like`, for a global `shape` and a dtype of its own (`DTensorSpec`, `TensorMeta`)."""
    stride = torch.empty(shape, device="meta").stride()
    spec = DTensorSpec(like.device_mesh, like.placements, TensorMeta(shape, stride, local.dtype))
    return DTensor(local, spec, requires_grad=False)


def local_shape_and_offset(tensor: DTensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """`torch.distributed.tensor._utils.compute_local_shape_and_global_offset`: which slice of the global tensor this
    rank holds, to read that slice alone from a checkpoint."""
    return compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)


def set_group_timeout(timeout: timedelta, group: dist.ProcessGroup) -> None:
    """`torch.distributed.distributed_c10d._set_pg_timeout`: init_device_mesh takes no timeout for its groups."""
    _set_pg_timeout(timeout, group)


def functional_all_reduce(tensor: Tensor, group_name: str) -> Tensor:
    """`torch.ops._c10d_functional.all_reduce`: a sum over a group that torch.compile traces into the graph."""
    ops = torch.ops._c10d_functional
    summed: Tensor = ops.wait_tensor(ops.all_reduce(tensor.contiguous(), "sum", group_name))
    return summed


# Reading checkpoints


def load_as_fake(file: Any) -> Tensor:
    """`torch._subclasses.fake_tensor.FakeTensorMode`: torch.load of a tensor without its data. The mode is noted
    process-wide, so calls in several threads need a lock."""
    with _shared_fake_mode():
        tensor: Tensor = torch.load(file, weights_only=True)
    return tensor


def fake_tensor_mode() -> Any:
    """`torch._subclasses.fake_tensor.FakeTensorMode`: tensors made inside have shapes and dtypes, and no memory."""
    return _fake_mode()()


@functools.cache
def _shared_fake_mode() -> Any:
    """Making a mode takes a millisecond, and an export reads hundreds of tensors."""
    return fake_tensor_mode()


def storage_key(tensor: Tensor) -> int:
    """`UntypedStorage._cdata`: what tensors that share memory have in common, also if they are fake and have none."""
    return tensor.untyped_storage()._cdata


class OperationCount(TorchDispatchMode):
    """`torch.utils._python_dispatch.TorchDispatchMode`: counts the operators that run inside."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


tree_flatten: Callable[[Any], tuple[list[Any], Any]] = _pytree.tree_flatten
"""`torch.utils._pytree.tree_flatten`: the leaves of nested lists, tuples and dicts, and what holds them."""
tree_unflatten: Callable[[list[Any], Any], Any] = _pytree.tree_unflatten


def map_tensors(function: Callable[[Tensor], Any], tree: Any) -> Any:
    """`torch.utils._pytree.tree_map_only`: `function` of every tensor in nested lists, tuples and dicts."""
    return _pytree.tree_map_only(Tensor, function, tree)


@functools.cache
def _fake_mode() -> type:
    """Without a CUDA device, FakeTensorMode replaces the guard of CUDA devices at each entry, while other threads use
    it: seen to crash with the CUDA build of torch 2.11. Tensors of checkpoints are on the CPU and need none."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    return type("CpuFakeMode", (FakeTensorMode,), {"avoid_device_init": False})


def checkpoint_offset(storage: torch.UntypedStorage) -> int:
    """`UntypedStorage._checkpoint_offset`: where in its file the data of a tensor from `load_as_fake` begins."""
    return int(storage._checkpoint_offset or 0)


# CUDA


def release_graph_pool(device_index: int, pool: Any) -> None:
    """`torch._C._cuda_endAllocateToPool` and `_cuda_releasePool`: return the memory pool of a CUDA graph whose capture
    failed. torch leaves the allocator in the middle of the capture when the driver has invalidated it."""
    with contextlib.suppress(RuntimeError):
        torch._C._cuda_endAllocateToPool(device_index, pool)
        torch._C._cuda_releasePool(device_index, pool)


def start_memory_history(max_entries: int) -> None:
    """`torch.cuda.memory._record_memory_history`: record allocations for a memory snapshot."""
    torch.cuda.memory._record_memory_history(max_entries=max_entries)


def dump_memory_history(file: Path) -> None:
    """`torch.cuda.memory._dump_snapshot`: write the recorded allocations for pytorch.org/memory_viz, and stop."""
    torch.cuda.memory._dump_snapshot(str(file))
    torch.cuda.memory._record_memory_history(enabled=None)


# Autograd


@contextlib.contextmanager
def autograd_inside_operator() -> Iterator[None]:
    """`torch._C._ForceDispatchKeyGuard`: let a custom operator use autograd for a part of what it computes; torch
    excludes the dispatch keys of autograd while an operator runs."""
    keys = torch._C.DispatchKey
    excluded = torch._C._dispatch_tls_local_exclude_set()
    for key in (keys.AutogradCPU, keys.AutogradCUDA, keys.AutogradFunctionality, keys.ADInplaceOrView):
        excluded = excluded.remove(key)
    guard = torch._C._ForceDispatchKeyGuard(torch._C._dispatch_tls_local_include_set(), excluded)
    with guard, torch.enable_grad():
        yield
