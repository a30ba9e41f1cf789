"""The memory that this process may still take."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path


def free_memory(system: Path = Path("/")) -> int | None:
    """Bytes that programs can still take: of the machine, or less where a container or a scheduler has set a limit.

    None where the system does not tell. `system`: where its files (/proc, /sys) are.
    """
    known = [free for free in (_of_machine(system), *_of_groups(system)) if free is not None]
    return max(0, min(known)) if known else None


def _of_machine(system: Path) -> int | None:
    with contextlib.suppress(OSError, ValueError):
        for line in (system / "proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return None


def _of_groups(system: Path) -> Iterator[int | None]:
    """Of each control group around this process: the limit of an outer one holds for all inside."""
    groups: list[str] = []
    with contextlib.suppress(OSError):
        groups = (system / "proc/self/cgroup").read_text().splitlines()
    for number, controllers, path in (line.split(":", 2) for line in groups if line.count(":") >= 2):
        if number == "0":
            for folder in _upwards(system / "sys/fs/cgroup", path):
                yield _free(folder, "memory.max", "memory.current", "")
        elif "memory" in controllers.split(","):  # version 1
            for folder in _upwards(system / "sys/fs/cgroup/memory", path):
                yield _free(folder, "memory.limit_in_bytes", "memory.usage_in_bytes", "total_")


def _upwards(mount: Path, path: str) -> Iterator[Path]:
    """A group's folder and those above it. Inside a container its path may be the host's, which is not seen there."""
    inside = Path(path.lstrip("/"))
    for part in (inside, *inside.parents):
        yield mount / part


def _free(folder: Path, limit: str, used: str, prefix: str) -> int | None:
    """What is used counts pages of files too, which are given up when programs want them: a checkpoint that was just
    written would else look like memory that is gone."""
    with contextlib.suppress(OSError, ValueError):  # no limit is "max", which is no number
        free = int((folder / limit).read_text()) - int((folder / used).read_text())
        with contextlib.suppress(OSError, ValueError):
            stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
            free += sum(int(stat.get(f"{prefix}{kind}_file", 0)) for kind in ("active", "inactive"))
        return free
    return None
