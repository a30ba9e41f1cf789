"""Asynchronous checkpointing: pinned host buffers that parameters and optimizer state are copied into."""

from __future__ import annotations

import mmap
import threading
from collections.abc import Mapping

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from whet.compat.torch_private import dtensor_like
from whet.core import launch_env
from whet.core.resources import available_memory
from whet.parallel.fsdp import local_tensor

# Memory of the host that a CUDA device copies into at the speed of the bus.
#
# torch's own pinned memory takes a power of two of bytes and is made where it is asked for, at about 2 GB/s; this takes
# what is needed, and other threads go on while it is made.

_MIN_PINNED_BYTES = 2**20
"""Bytes below which ordinary memory does as well."""


class PinnedMemory:
    """Lends tensors until it is closed."""

    def __init__(self) -> None:
        self._registered: list[Tensor] = []

    def empty_like(self, tensor: Tensor) -> Tensor:
        """A tensor on the host of the same shape and type, with no values yet."""
        if not tensor.is_cuda or tensor.nbytes < _MIN_PINNED_BYTES:
            return torch.empty_like(tensor, device="cpu", requires_grad=False, memory_format=torch.contiguous_format)
        memory = mmap.mmap(-1, tensor.nbytes)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            memory.madvise(mmap.MADV_HUGEPAGE)
        bytes_ = torch.frombuffer(memory, dtype=torch.uint8).zero_()  # taking the pages is most of the time
        if int(torch.cuda.cudart().cudaHostRegister(bytes_.data_ptr(), bytes_.nbytes, 0)) == 0:
            self._registered.append(bytes_)
        return bytes_.view(tensor.dtype).view(tensor.shape)  # without a registration, copies are only slower

    def close(self) -> None:
        """Take all of it back; nobody may be copying any more."""
        for bytes_ in self._registered:
            torch.cuda.cudart().cudaHostUnregister(bytes_.data_ptr())
        self._registered.clear()


# Copies in the host's memory, from which a checkpoint is written while training goes on.

_MAX_FREE_FRACTION = 0.9  # of the free memory


class HostStaging:
    """Room for a copy of each tensor, made once and used again. From CUDA it is pinned, so that copies run at the
    speed of the bus."""

    def __init__(self) -> None:
        self._host_buffers: dict[str, Tensor] = {}
        self._pinned = PinnedMemory()
        self._allocation_thread: threading.Thread | None = None

    def allocate_async(self, tensors: Mapping[str, Tensor]) -> None:
        """Make room for these in the background: pinned memory is slow to get, and the first save need not wait.
        Whoever asks has seen that there is room."""
        device = next(
            (local_tensor(tensor).device for tensor in tensors.values() if local_tensor(tensor).is_cuda), None
        )
        if device is None:
            return
        self._join_allocation()
        missing = {name: local_tensor(tensor) for name, tensor in tensors.items() if name not in self._host_buffers}

        def make() -> None:
            with torch.cuda.device(device):  # a new thread's is the first, where every process would take memory
                for name, tensor in missing.items():
                    self._host_buffers[name] = self._pinned.empty_like(tensor)

        self._allocation_thread = threading.Thread(target=make, name="make room for checkpoints", daemon=True)
        self._allocation_thread.start()

    def close(self) -> None:
        """Give the room back; the copies are no longer valid."""
        self._join_allocation()
        self._host_buffers.clear()
        self._pinned.close()

    def _join_allocation(self) -> None:
        if self._allocation_thread is not None:
            self._allocation_thread.join()
            self._allocation_thread = None

    def copy(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The same tensors on the host, as they are now; of a sharded one this rank's part, still as a shard."""
        self._join_allocation()
        copies = {name: _shard_like(tensor, self._copy(name, local_tensor(tensor))) for name, tensor in tensors.items()}
        if any(local_tensor(tensor).device.type != "cpu" for tensor in tensors.values()):
            torch.accelerator.synchronize()
        return copies

    def has_room_for(self, tensors: Mapping[str, Tensor]) -> bool:
        """Whether the host's memory holds copies of these; processes on one machine share it."""
        self._join_allocation()
        missing = sum(local_tensor(tensor).nbytes for name, tensor in tensors.items() if name not in self._host_buffers)
        here = launch_env.local_world_size()
        free = available_memory()
        return free is None or missing * here <= _MAX_FREE_FRACTION * free

    def _copy(self, name: str, tensor: Tensor) -> Tensor:
        host = self._host_buffers.get(name)
        if host is None or host.shape != tensor.shape or host.dtype != tensor.dtype:
            host = self._host_buffers[name] = self._pinned.empty_like(tensor)
        return host.copy_(tensor.detach(), non_blocking=tensor.is_cuda)


def _shard_like(tensor: Tensor, host: Tensor) -> Tensor:
    """`from_local` would send the part back to the mesh's device."""
    return dtensor_like(tensor, host) if isinstance(tensor, DTensor) else host
