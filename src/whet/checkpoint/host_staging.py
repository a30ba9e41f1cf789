"""Host copies of weights and optimizer state, from which a checkpoint is written while training continues."""

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
from whet.parallel.dtensor import local_tensor

_MIN_PINNED_BYTES = 2**20  # smaller copies are as fast from pageable memory
_MAX_FREE_FRACTION = 0.9  # of the free host memory


class PinnedMemory:
    """Page-locked host tensors of exact size.

    torch's pinned allocator rounds up to a power of two and holds the GIL while it allocates, at about 2 GB/s. This one
    takes what is needed, and other threads keep running.
    """

    def __init__(self) -> None:
        self._registered: list[Tensor] = []

    def empty_like(self, tensor: Tensor) -> Tensor:
        """An uninitialised host tensor of the same shape and dtype; pinned if `tensor` is on a GPU."""
        if not tensor.is_cuda or tensor.nbytes < _MIN_PINNED_BYTES:
            return torch.empty_like(tensor, device="cpu", requires_grad=False, memory_format=torch.contiguous_format)
        memory = mmap.mmap(-1, tensor.nbytes)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            memory.madvise(mmap.MADV_HUGEPAGE)
        content = torch.frombuffer(memory, dtype=torch.uint8).zero_()  # faulting in the pages takes most of the time
        if int(torch.cuda.cudart().cudaHostRegister(content.data_ptr(), content.nbytes, 0)) == 0:
            self._registered.append(content)
        return content.view(tensor.dtype).view(tensor.shape)  # copies also work unregistered, only slower

    def close(self) -> None:
        """Unregister all memory. No copy may be in flight."""
        for content in self._registered:
            torch.cuda.cudart().cudaHostUnregister(content.data_ptr())
        self._registered.clear()


class HostStaging:
    """A host buffer for each tensor, allocated once and reused by every save."""

    def __init__(self) -> None:
        self._host_buffers: dict[str, Tensor] = {}
        self._pinned = PinnedMemory()
        self._allocation_thread: threading.Thread | None = None

    def allocate_async(self, tensors: Mapping[str, Tensor]) -> None:
        """Allocate pinned buffers in a thread, so that the first save does not wait for them. The caller has checked
        `has_room_for`."""
        device = next(
            (local_tensor(tensor).device for tensor in tensors.values() if local_tensor(tensor).is_cuda), None
        )
        if device is None:
            return
        self._join_allocation()
        missing = {name: local_tensor(tensor) for name, tensor in tensors.items() if name not in self._host_buffers}

        def allocate() -> None:
            with torch.cuda.device(device):  # a new thread starts on GPU 0, where every rank would create a context
                for name, tensor in missing.items():
                    self._host_buffers[name] = self._pinned.empty_like(tensor)

        self._allocation_thread = threading.Thread(target=allocate, name="checkpoint staging", daemon=True)
        self._allocation_thread.start()

    def close(self) -> None:
        """Free the buffers; copies become invalid."""
        self._join_allocation()
        self._host_buffers.clear()
        self._pinned.close()

    def _join_allocation(self) -> None:
        if self._allocation_thread is not None:
            self._allocation_thread.join()
            self._allocation_thread = None

    def copy(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Copies in host memory; of a sharded tensor this rank's shard, still as a DTensor."""
        self._join_allocation()
        copies = {name: _shard_like(tensor, self._copy(name, local_tensor(tensor))) for name, tensor in tensors.items()}
        if any(local_tensor(tensor).device.type != "cpu" for tensor in tensors.values()):
            torch.accelerator.synchronize()
        return copies

    def has_room_for(self, tensors: Mapping[str, Tensor]) -> bool:
        """Whether host memory holds copies of these on every rank of this host."""
        self._join_allocation()
        missing = sum(local_tensor(tensor).nbytes for name, tensor in tensors.items() if name not in self._host_buffers)
        local_ranks = launch_env.local_world_size()
        free = available_memory()
        return free is None or missing * local_ranks <= _MAX_FREE_FRACTION * free

    def _copy(self, name: str, tensor: Tensor) -> Tensor:
        host = self._host_buffers.get(name)
        if host is None or host.shape != tensor.shape or host.dtype != tensor.dtype:
            host = self._host_buffers[name] = self._pinned.empty_like(tensor)
        return host.copy_(tensor.detach(), non_blocking=tensor.is_cuda)


def _shard_like(tensor: Tensor, host: Tensor) -> Tensor:
    """`host` as a shard of the same DTensor. DTensor.from_local would copy it to the mesh's device."""
    return dtensor_like(tensor, host) if isinstance(tensor, DTensor) else host
