"""CPU offload of activations and of optimizer state. Small tensors stay on the device: moving them costs more time than
it saves memory."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.tensor import DTensor

from whet.compat.torch_private import replace_step, set_dtensor_local
from whet.parallel.dtensor import local_tensor

_MIN_BYTES = 2**20
_CHUNK_PARAMETERS = 2**26
"""Parameters whose optimizer state is on the device at a time: 512 MiB for two fp32 moments."""
_CAST_OR_VIEW_NODES = ("TBackward0", "ToCopyBackward0", "ViewBackward0", "TransposeBackward0", "_ToTorchTensorBackward")


# Activations


def with_activation_offload(forward: Callable[..., Any], layer: nn.Module) -> Callable[..., Any]:
    """Wraps a forward pass so that what it saves for the backward pass, except weights, is kept in CPU memory."""

    @functools.wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        weights = {local_tensor(parameter).untyped_storage().data_ptr() for parameter in layer.parameters()}

        def pack(tensor: Tensor) -> Tensor | _OffloadedTensor:
            is_weight = tensor.untyped_storage().data_ptr() in weights or _is_weight_view(tensor)
            return tensor if tensor.nbytes < _MIN_BYTES or is_weight else _OffloadedTensor(tensor)

        def unpack(saved: Tensor | _OffloadedTensor) -> Tensor:
            return saved.to_device() if isinstance(saved, _OffloadedTensor) else saved

        with saved_tensors_hooks(pack, unpack):
            return forward(*args, **kwargs)

    return run


def _is_weight_view(tensor: Tensor) -> bool:
    """Whether a tensor is a cast or transposed weight, as mixed precision makes them."""
    node = tensor.grad_fn
    while node is not None and node.name() in _CAST_OR_VIEW_NODES:
        node = node.next_functions[0][0]
    return hasattr(node, "variable")


class _OffloadedTensor:
    """A tensor copied to CPU memory on a stream of its own, while the device computes."""

    def __init__(self, tensor: Tensor) -> None:
        self._device = tensor.device
        self._host = _pinned_like(tensor)
        self._copied: torch.cuda.Event | None = None
        if tensor.is_cuda:
            stream = _copy_stream(tensor.device)
            stream.wait_stream(torch.cuda.current_stream(tensor.device))
            with torch.cuda.stream(stream):
                self._host.copy_(tensor.detach(), non_blocking=True)
                self._copied = stream.record_event()
            tensor.record_stream(stream)  # the allocator must not reuse its memory before the copy is done
        else:
            self._host.copy_(tensor.detach())

    def to_device(self) -> Tensor:
        if self._copied is not None:
            torch.cuda.current_stream(self._device).wait_event(self._copied)
        return self._host.to(self._device, non_blocking=True)


@functools.cache
def _copy_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


def _pinned_like(tensor: Tensor) -> Tensor:
    """An uninitialized CPU tensor, in pinned memory if `tensor` is on a GPU."""
    return torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda, requires_grad=False)


# Optimizer state


def offload_optimizer_state(optimizer: torch.optim.Optimizer, chunk: int = _CHUNK_PARAMETERS) -> None:
    """Make `optimizer` step through its parameters in chunks, with the state of one chunk on the device at a time.

    `state` and `param_groups` keep their layout, and so do checkpoints. The result is the same as at once for any
    optimizer that keeps everything about a parameter in `state[parameter]`.
    """
    step_all: Callable[[], Any] = optimizer.step

    def step() -> None:
        groups = [list(group["params"]) for group in optimizer.param_groups]
        try:
            for index, parameters in _parameter_chunks(groups, chunk):
                for other, group in enumerate(optimizer.param_groups):
                    group["params"] = parameters if other == index else []
                hosts = {weight: _fetch_state(optimizer.state[weight], weight.device) for weight in parameters}
                step_all()
                for weight in parameters:
                    _store_state(optimizer.state[weight], hosts[weight])
        finally:
            for group, parameters in zip(optimizer.param_groups, groups, strict=True):
                group["params"] = parameters
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()  # the copies to the host are complete

    replace_step(optimizer, step)
    optimizer.steps_in_chunks = True  # type: ignore[attr-defined]


def state_to_host(state: dict[str, Any]) -> dict[str, Any]:
    """Move the large tensors of a parameter's state to CPU memory: for optimizers that create all state at once."""
    for key, value in _large_tensors(state).items():
        if value.is_cuda:
            _set_tensor(state, key, _pinned_like(value).copy_(value))
    return state


def _parameter_chunks(groups: list[list[Tensor]], limit: int) -> Iterator[tuple[int, list[Tensor]]]:
    """(index of the group, some of its parameters), in order; a parameter above the limit is a chunk of its own."""
    for index, parameters in enumerate(groups):
        chunk: list[Tensor] = []
        size = 0
        for weight in parameters:
            if chunk and size + weight.numel() > limit:
                yield index, chunk
                chunk, size = [], 0
            chunk.append(weight)
            size += weight.numel()
        if chunk:
            yield index, chunk


def _fetch_state(state: dict[str, Any], device: torch.device) -> dict[str, Tensor]:
    """Copy a parameter's state to its device; returns the CPU tensors."""
    hosts = _large_tensors(state)
    for key, host in hosts.items():
        _set_tensor(state, key, host.to(device, non_blocking=True))
    return hosts


def _store_state(state: dict[str, Any], hosts: dict[str, Tensor]) -> None:
    """Copy the state back into its CPU tensors; allocates those that the step has added."""
    for key, value in _large_tensors(state).items():
        host = hosts[key] if key in hosts else _pinned_like(value)
        _set_tensor(state, key, host.copy_(value, non_blocking=True))


def _large_tensors(state: dict[str, Any]) -> dict[str, Tensor]:
    tensors = {key: local_tensor(value) for key, value in state.items() if isinstance(value, Tensor)}
    return {key: tensor for key, tensor in tensors.items() if tensor.nbytes >= _MIN_BYTES}


def _set_tensor(state: dict[str, Any], key: str, tensor: Tensor) -> None:
    if isinstance(state[key], DTensor):
        set_dtensor_local(state[key], tensor)
    else:
        state[key] = tensor
