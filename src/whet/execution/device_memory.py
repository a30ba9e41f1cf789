"""The memory of a device: how much this process may use, and how much it has used."""

from __future__ import annotations

import gc

import torch


def has_own_memory(device: torch.device) -> bool:
    """Whether the device has memory of its own that torch measures. A CPU shares the host's with everything else."""
    return device.type == "cuda"


def capacity(device: torch.device) -> int:
    """The bytes that this process may allocate: what is free now, and what it has already."""
    free, total = torch.cuda.mem_get_info(device)
    limit = int(total * torch.cuda.get_per_process_memory_fraction(device))
    return min(free + torch.cuda.memory_reserved(device), limit)


def allocated(device: torch.device) -> int:
    return torch.cuda.memory_allocated(device)


def peak_allocated(device: torch.device) -> int:
    """Since `reset_peak`."""
    return torch.cuda.max_memory_allocated(device)


def reset_peak(device: torch.device) -> None:
    torch.cuda.reset_peak_memory_stats(device)


def failed_allocations(device: torch.device) -> int:
    """How often torch had to free its cached memory to allocate more, which stalls the device: it is nearly full."""
    return int(torch.cuda.memory_stats(device).get("num_alloc_retries", 0))


def free_cached(device: torch.device, after_failure: bool = False) -> None:
    """Give back what is cached. A failed pass leaves cycles, which hold its activations, to be collected first: that
    takes a third of a second."""
    if after_failure:
        gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
