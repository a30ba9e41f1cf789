"""Memory of the host that a CUDA device copies into at the speed of the bus.

torch's own pinned memory takes a power of two of bytes and is made where it is asked for, at about 2 GB/s; this takes
what is needed, and other threads go on while it is made.
"""

from __future__ import annotations

import mmap

import torch
from torch import Tensor

_SMALL = 2**20
"""Bytes below which ordinary memory does as well."""


class Pinned:
    """Lends tensors until it is closed."""

    def __init__(self) -> None:
        self._lent: list[Tensor] = []

    def like(self, tensor: Tensor) -> Tensor:
        """A tensor on the host of the same shape and type, with no values yet."""
        if not tensor.is_cuda or tensor.nbytes < _SMALL:
            return torch.empty_like(tensor, device="cpu", requires_grad=False, memory_format=torch.contiguous_format)
        memory = mmap.mmap(-1, tensor.nbytes)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            memory.madvise(mmap.MADV_HUGEPAGE)
        bytes_ = torch.frombuffer(memory, dtype=torch.uint8).zero_()  # taking the pages is most of the time
        if int(torch.cuda.cudart().cudaHostRegister(bytes_.data_ptr(), bytes_.nbytes, 0)) == 0:
            self._lent.append(bytes_)
        return bytes_.view(tensor.dtype).view(tensor.shape)  # without a registration, copies are only slower

    def close(self) -> None:
        """Take all of it back; nobody may be copying any more."""
        for bytes_ in self._lent:
            torch.cuda.cudart().cudaHostUnregister(bytes_.data_ptr())
        self._lent.clear()
