"""CUDA graphs: what was asked of the device, asked for again in one call."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import torch

Capture = Callable[[Callable[[], None]], Callable[[], None]]
"""Takes what asks the device for something, and gives what asks for it again."""


def by_graphs() -> Capture:
    """Graphs that share their memory: only one of them is on its way at a time.

    One that cannot be recorded is a RuntimeError, which leaves torch able to compute without."""
    pool = torch.cuda.graph_pool_handle()

    def capture(ask: Callable[[], None]) -> Callable[[], None]:
        graph, here = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
        try:
            # other threads may go on using the device, as for the next batch, a checkpoint, or NCCL's own
            with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
                ask()
        except RuntimeError:
            # torch leaves both as they were in the middle of it where the driver has given up the recording
            torch.cuda.set_stream(here)
            with contextlib.suppress(RuntimeError):
                torch._C._cuda_endAllocateToPool(here.device_index, pool)
                torch._C._cuda_releasePool(here.device_index, pool)
            raise
        return graph.replay

    return capture


def why_not(error: BaseException) -> str:
    """The first line of what came first: what ends a recording fails too, and says no more than that."""
    while error.__context__ is not None:
        error = error.__context__
    return (str(error).splitlines() or [type(error).__name__])[0]
