"""The processor cores that this process may use."""

from __future__ import annotations

import os


def usable_cores() -> int:
    """Fewer than the machine has, where a scheduler or a container has given out only some."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def my_cores(processes: int = 1) -> int:
    """This process's share of them: all processes of this machine, `processes` where the launcher does not say."""
    return max(1, usable_cores() // int(os.environ.get("LOCAL_WORLD_SIZE", processes)))
