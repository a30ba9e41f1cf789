"""CPU offload of activations and of optimizer state."""

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

# Offloading: what is not needed right now waits in the host's memory.
#
# Small tensors stay where they are: moving one costs more time than it saves memory.

LayerForward = Callable[..., Any]

_MIN_BYTES = 2**20  # bytes
_CHUNK_PARAMETERS = (
    2**26
)  # weights whose optimizer state is on the device at a time: two fp32 numbers each make 512 MiB
_CAST_OR_VIEW_NODES = ("TBackward0", "ToCopyBackward0", "ViewBackward0", "TransposeBackward0", "_ToTorchTensorBackward")


def with_activation_offload(forward: LayerForward, layer: nn.Module) -> LayerForward:
    """The same forward pass; what it keeps for the backward pass is kept on the host, weights excepted."""

    @functools.wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        weights = {local_tensor(parameter).untyped_storage().data_ptr() for parameter in layer.parameters()}

        def pack(tensor: Tensor) -> Tensor | _OffloadedTensor:
            stays = (
                tensor.nbytes < _MIN_BYTES or tensor.untyped_storage().data_ptr() in weights or _is_weight_view(tensor)
            )
            return tensor if stays else _OffloadedTensor(tensor)

        with saved_tensors_hooks(pack, lambda kept: kept.back() if isinstance(kept, _OffloadedTensor) else kept):
            return forward(*args, **kwargs)

    return run


def _is_weight_view(tensor: Tensor) -> bool:
    """Whether it is a weight in another type or turned around, as mixed precision makes them."""
    node = tensor.grad_fn
    while node is not None and node.name() in _CAST_OR_VIEW_NODES:
        node = node.next_functions[0][0]
    return hasattr(node, "variable")


class _OffloadedTensor:
    """A tensor on the host. It leaves on a stream of its own, beside the computing; it comes back when asked for."""

    def __init__(self, tensor: Tensor) -> None:
        self._device = tensor.device
        self._host = _pinned_like(tensor)
        self._left: torch.cuda.Event | None = None
        if tensor.is_cuda:
            side = _copy_stream(tensor.device)
            side.wait_stream(torch.cuda.current_stream(tensor.device))
            with torch.cuda.stream(side):
                self._host.copy_(tensor.detach(), non_blocking=True)
                self._left = side.record_event()
            tensor.record_stream(side)  # its memory is not used for something else before it has left
        else:
            self._host.copy_(tensor.detach())

    def back(self) -> Tensor:
        if self._left is not None:
            torch.cuda.current_stream(self._device).wait_event(self._left)
        return self._host.to(self._device, non_blocking=True)


@functools.cache
def _copy_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


def _pinned_like(tensor: Tensor) -> Tensor:
    """Room for a tensor in the host's memory, in pages that a GPU reads and writes by itself."""
    return torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda, requires_grad=False)


def offload_optimizer_state(optimizer: torch.optim.Optimizer, piece: int = _CHUNK_PARAMETERS) -> None:
    """Make `optimizer` step through its weights in pieces, with the state of one piece on the device at a time.

    Its `state` and `param_groups` are what they were, so that checkpoints are too. An optimizer that keeps all it
    knows of a weight in `state[weight]` computes the same in pieces as at once.
    """
    whole: Callable[[], Any] = optimizer.step

    def step() -> None:
        groups = [list(group["params"]) for group in optimizer.param_groups]
        try:
            for number, weights in _parameter_chunks(groups, piece):
                for other, group in enumerate(optimizer.param_groups):
                    group["params"] = weights if other == number else []
                hosts = {weight: _fetch_state(optimizer.state[weight], weight.device) for weight in weights}
                whole()
                for weight in weights:
                    _store_state(optimizer.state[weight], hosts[weight])
        finally:
            for group, weights in zip(optimizer.param_groups, groups, strict=True):
                group["params"] = weights
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()  # whoever reads the state now finds it whole

    replace_step(optimizer, step)
    optimizer.steps_in_pieces = True  # type: ignore[attr-defined]


def state_to_host(state: dict[str, Any]) -> dict[str, Any]:
    """The same state of a weight with what is large in the host's memory: for optimizers that make theirs at once."""
    for key, value in _large_tensors(state).items():
        if value.is_cuda:
            _set_tensor(state, key, _pinned_like(value).copy_(value))
    return state


def _parameter_chunks(groups: list[list[Tensor]], limit: int) -> Iterator[tuple[int, list[Tensor]]]:
    """(group, some of its weights), in order; a weight larger than the limit is a piece of its own."""
    for number, weights in enumerate(groups):
        piece: list[Tensor] = []
        size = 0
        for weight in weights:
            if piece and size + weight.numel() > limit:
                yield number, piece
                piece, size = [], 0
            piece.append(weight)
            size += weight.numel()
        if piece:
            yield number, piece


def _fetch_state(state: dict[str, Any], device: torch.device) -> dict[str, Tensor]:
    """Bring a weight's state to its device; gives where it was on the host."""
    hosts = _large_tensors(state)
    for key, host in hosts.items():
        _set_tensor(state, key, host.to(device, non_blocking=True))
    return hosts


def _store_state(state: dict[str, Any], hosts: dict[str, Tensor]) -> None:
    """Back to where it was; what the step made is given room there."""
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
