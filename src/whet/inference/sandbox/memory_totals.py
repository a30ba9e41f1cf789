"""Limits on what all processes of a sandbox use together. The kernel limits each process, and the size of all files.
Their memory in sum it limits only in a cgroup, which few users may create; so whet measures it too, while they run."""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_MAX_FILES = 1000
_PROC = Path("/proc")
_group_numbers = itertools.count()


def find_excess(launcher_pid: int, memory_bytes: int) -> str:
    """What the processes below a launcher use too much of together; empty if nothing."""
    pids = list(_descendants(launcher_pid))
    if sum(map(_memory_bytes, pids)) > memory_bytes:
        return too_much_memory(memory_bytes)
    with contextlib.suppress(OSError, IndexError):
        found = os.statvfs(f"/proc/{pids[0]}/root/work")
        if found.f_files - found.f_ffree > _MAX_FILES:
            return f"\nKilled: more than {_MAX_FILES} files\n"
    return ""


def too_much_memory(memory_bytes: int) -> str:
    """What a program's stderr says at its end when whet or the kernel killed it for its memory."""
    return f"\nKilled: all processes together used more than {memory_bytes >> 20} MiB\n"


def _descendants(pid: int) -> Iterator[int]:
    with contextlib.suppress(OSError):
        for child in map(int, (_PROC / f"{pid}/task/{pid}/children").read_text().split()):
            yield child
            yield from _descendants(child)


def _memory_bytes(pid: int) -> int:
    """The memory of a process; what several share counts in parts."""
    with contextlib.suppress(OSError):
        for line in (_PROC / f"{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) * 1024
    return 0


@dataclass(frozen=True, slots=True)
class MemoryCgroup:
    """A cgroup with a memory limit, or none."""

    folder: Path | None

    def command_prefix(self) -> list[str]:
        """The beginning of a command that runs in the group."""
        if self.folder is None:
            return []
        return ["/bin/sh", "-c", 'echo $$ > "$0" && exec "$@"', str(self.folder / "cgroup.procs")]

    def was_killed(self) -> bool:
        """Whether the kernel killed the group's processes for their memory."""
        if self.folder is None:
            return False
        events = dict(line.split() for line in (self.folder / "memory.events").read_text().splitlines())
        return events.get("oom_kill", "0") != "0"


@contextlib.contextmanager
def memory_cgroup(memory_bytes: int) -> Iterator[MemoryCgroup]:
    """A cgroup with a memory limit where there can be one."""
    parent = _writable_cgroup()
    if parent is None:
        yield MemoryCgroup(None)
        return
    with _new_group(parent, memory_bytes) as group:
        yield group


@contextlib.contextmanager
def _new_group(parent: Path, memory_bytes: int) -> Iterator[MemoryCgroup]:
    folder = parent / f"whet-sandbox-{os.getpid()}-{next(_group_numbers)}"
    folder.mkdir()
    try:
        (folder / "memory.max").write_text(str(memory_bytes))
        (folder / "memory.oom.group").write_text("1")  # all of its processes end together
        if (folder / "memory.swap.max").exists():
            (folder / "memory.swap.max").write_text("0")
        yield MemoryCgroup(folder)
    finally:
        for _ in range(100):
            with contextlib.suppress(OSError):  # busy until its last process is gone
                folder.rmdir()
                break
            time.sleep(0.002)


@functools.cache
def _writable_cgroup() -> Path | None:
    """The cgroup (v2) in which this user can limit the memory of a new group: that of this process, or its parent."""
    with contextlib.suppress(OSError, StopIteration):
        mounts = (line.split() for line in (_PROC / "self/mounts").read_text().splitlines())
        root = Path(next(fields[1] for fields in mounts if fields[2] == "cgroup2"))
        groups = (line.split(":", 2) for line in (_PROC / "self/cgroup").read_text().splitlines())
        own = root / next(path for number, _, path in groups if number == "0").lstrip("/")
        for folder in (own, own.parent):
            if _can_limit_memory(folder):
                return folder
    return None


def _can_limit_memory(folder: Path) -> bool:
    with contextlib.suppress(OSError):
        if "memory" in (folder / "cgroup.subtree_control").read_text().split():
            with _new_group(folder, 2**26) as group:
                return (
                    subprocess.run([*group.command_prefix(), "true"], capture_output=True, check=False).returncode == 0
                )
    return False
