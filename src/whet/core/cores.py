"""The processor cores that this process may use."""

from __future__ import annotations

import os


def usable_cores() -> int:
    """Fewer than the machine has, where a scheduler or a container has given out only some."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
