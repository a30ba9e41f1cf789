"""Copies in the host's memory, from which a checkpoint is written while training goes on."""

from __future__ import annotations

import os
from collections.abc import Mapping

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from whet.core.memory import free_memory
from whet.parallel.shard import local

_PART = 0.9  # of the free memory


class Staging:
    """Room for a copy of each tensor, made once and used again. From CUDA it is pinned, so that copies run at the
    speed of the bus."""

    def __init__(self) -> None:
        self._hosts: dict[str, Tensor] = {}

    def copy(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The same tensors on the host, as they are now; of a sharded one this rank's part, still as a shard."""
        copies = {name: _like(tensor, self._copy(name, local(tensor))) for name, tensor in tensors.items()}
        if any(local(tensor).device.type != "cpu" for tensor in tensors.values()):
            torch.accelerator.synchronize()
        return copies

    def has_room_for(self, tensors: Mapping[str, Tensor]) -> bool:
        """Whether the host's memory holds copies of these; processes on one machine share it."""
        missing = sum(local(tensor).nbytes for name, tensor in tensors.items() if name not in self._hosts)
        here = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        free = free_memory()
        return free is None or missing * here <= _PART * free

    def _copy(self, name: str, tensor: Tensor) -> Tensor:
        host = self._hosts.get(name)
        if host is None or host.shape != tensor.shape or host.dtype != tensor.dtype:
            host = torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda, requires_grad=False)
            self._hosts[name] = host
        return host.copy_(tensor.detach(), non_blocking=tensor.is_cuda)


def _like(tensor: Tensor, host: Tensor) -> Tensor:
    """`from_local` would send the part back to the mesh's device."""
    return DTensor(host, tensor._spec, requires_grad=False) if isinstance(tensor, DTensor) else host
