"""What this process can use: CPU cores and memory, within the limits of schedulers and containers; Triton."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path

from whet.core.launch_env import cpus_of_task, local_world_size


def available_cores() -> int:
    """CPU cores that this process may use, as limited by the scheduler or the container."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def cores_per_process(processes: int = 1) -> int:
    """This process's share of the cores. `processes` on this machine, where the launcher does not set their number."""
    own = cpus_of_task()
    return min(own, available_cores()) if own else max(1, available_cores() // local_world_size(processes))


def available_memory(system: Path = Path("/")) -> int | None:
    """Bytes of memory that are free, within the limits of containers and schedulers; None if unknown.

    `system` is the root of /proc and /sys.
    """
    known = [free for free in (_machine_memory(system), *_cgroup_memory(system)) if free is not None]
    return max(0, min(known)) if known else None


def device_count() -> int:
    """Accelerators of this machine; the CPU counts as one where there is none."""
    import torch

    return max(1, torch.accelerator.device_count())


@functools.cache
def has_triton() -> bool:
    """Whether whet's Triton kernels can be compiled. Only torch for CUDA depends on Triton."""
    return importlib.util.find_spec("triton") is not None


def multiplies_bf16(system: Path = Path("/")) -> bool:
    """Whether this CPU has instructions for bf16 products (AVX512-BF16, AMX). With them a matmul takes half the time of
    one in fp32, without them many times as long."""
    with contextlib.suppress(OSError):
        for line in (system / "proc/cpuinfo").read_text().splitlines():
            if line.startswith("flags"):
                return not {"avx512_bf16", "amx_bf16"}.isdisjoint(line.split())
    return False


def _machine_memory(system: Path) -> int | None:
    with contextlib.suppress(OSError, ValueError):
        for line in (system / "proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return None


def _cgroup_memory(system: Path) -> Iterator[int | None]:
    """Free bytes of each control group around this process: an outer limit holds for all groups inside."""
    groups: list[str] = []
    with contextlib.suppress(OSError):
        groups = (system / "proc/self/cgroup").read_text().splitlines()
    for number, controllers, path in (line.split(":", 2) for line in groups if line.count(":") >= 2):
        if number == "0":
            for folder in _cgroup_folders(system / "sys/fs/cgroup", path):
                yield _cgroup_available(folder, "memory.max", "memory.current", "")
        elif "memory" in controllers.split(","):  # version 1
            for folder in _cgroup_folders(system / "sys/fs/cgroup/memory", path):
                yield _cgroup_available(folder, "memory.limit_in_bytes", "memory.usage_in_bytes", "total_")


def _cgroup_folders(mount: Path, path: str) -> Iterator[Path]:
    """A group's folder and its parents. Inside a container the path may be the host's, which does not exist there."""
    inside = Path(path.lstrip("/"))
    for part in (inside, *inside.parents):
        yield mount / part


def _cgroup_available(folder: Path, limit: str, used: str, prefix: str) -> int | None:
    """Limit − usage + page cache. The kernel counts cached file pages as used but reclaims them on demand; without them
    a checkpoint just written would look like lost memory."""
    with contextlib.suppress(OSError, ValueError):  # "max" means no limit
        free = int((folder / limit).read_text()) - int((folder / used).read_text())
        with contextlib.suppress(OSError, ValueError):
            stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
            free += sum(int(stat.get(f"{prefix}{kind}_file", 0)) for kind in ("active", "inactive"))
        return free
    return None
