"""Copies in the host's memory, from which a checkpoint is written while training goes on."""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from whet.checkpoint.pinned import Pinned
from whet.core.memory import free_memory
from whet.parallel.shard import local

_PART = 0.9  # of the free memory


class Staging:
    """Room for a copy of each tensor, made once and used again. From CUDA it is pinned, so that copies run at the
    speed of the bus."""

    def __init__(self) -> None:
        self._hosts: dict[str, Tensor] = {}
        self._pinned = Pinned()
        self._ahead: threading.Thread | None = None

    def prepare(self, tensors: Mapping[str, Tensor]) -> None:
        """Make room for these in the background: pinned memory is slow to get, and the first save need not wait.
        Whoever asks has seen that there is room."""
        device = next((local(tensor).device for tensor in tensors.values() if local(tensor).is_cuda), None)
        if device is None:
            return
        self._settle()
        missing = {name: local(tensor) for name, tensor in tensors.items() if name not in self._hosts}

        def make() -> None:
            with torch.cuda.device(device):  # a new thread's is the first, where every process would take memory
                for name, tensor in missing.items():
                    self._hosts[name] = self._pinned.like(tensor)

        self._ahead = threading.Thread(target=make, name="make room for checkpoints", daemon=True)
        self._ahead.start()

    def close(self) -> None:
        """Give the room back; the copies are no longer valid."""
        self._settle()
        self._hosts.clear()
        self._pinned.close()

    def _settle(self) -> None:
        if self._ahead is not None:
            self._ahead.join()
            self._ahead = None

    def copy(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The same tensors on the host, as they are now; of a sharded one this rank's part, still as a shard."""
        self._settle()
        copies = {name: _like(tensor, self._copy(name, local(tensor))) for name, tensor in tensors.items()}
        if any(local(tensor).device.type != "cpu" for tensor in tensors.values()):
            torch.accelerator.synchronize()
        return copies

    def has_room_for(self, tensors: Mapping[str, Tensor]) -> bool:
        """Whether the host's memory holds copies of these; processes on one machine share it."""
        self._settle()
        missing = sum(local(tensor).nbytes for name, tensor in tensors.items() if name not in self._hosts)
        here = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        free = free_memory()
        return free is None or missing * here <= _PART * free

    def _copy(self, name: str, tensor: Tensor) -> Tensor:
        host = self._hosts.get(name)
        if host is None or host.shape != tensor.shape or host.dtype != tensor.dtype:
            host = self._hosts[name] = self._pinned.like(tensor)
        return host.copy_(tensor.detach(), non_blocking=tensor.is_cuda)


def _like(tensor: Tensor, host: Tensor) -> Tensor:
    """`from_local` would send the part back to the mesh's device."""
    return DTensor(host, tensor._spec, requires_grad=False) if isinstance(tensor, DTensor) else host
