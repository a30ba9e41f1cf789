"""Other processes of this machine, read from /proc: who they are, what they hold open, their children. No torch."""

from __future__ import annotations

import contextlib
import functools
import os
import signal
from pathlib import Path


@functools.cache
def machine_id() -> str:
    """Equal for two processes that see each other's process ids: the same boot of a machine, and the same PID namespace
    (a container has its own). Host names do not tell: clones and containers share them."""
    boot, namespace = "", ""
    with contextlib.suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        namespace = str(Path("/proc/self/ns/pid").readlink())
    return f"{boot} {namespace}"


def holds_open(pid: int, path: Path) -> bool:
    """Whether a process of this machine lives and has the file open. Of another user's process only the first is known;
    an id that was given to a new process since then does not have the file open."""
    try:
        wanted = path.stat()
        handles = list(Path(f"/proc/{pid}/fd").iterdir())
    except PermissionError:
        return is_alive(pid)
    except OSError:
        return False
    for handle in handles:
        with contextlib.suppress(OSError):
            if os.path.samestat(handle.stat(), wanted):
                return True
    return False


def is_alive(pid: int) -> bool:
    """Whether there is such a process, and it has not ended: one that its parent has not waited for yet has."""
    return identify_process(pid) is not None


def identify_process(pid: int) -> str | None:
    """Its id and the time at which it began: an id is given again, both together are not. None if it has ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
        return None if fields[0] in ("Z", "X") else f"{pid}:{fields[19]}"
    except (OSError, IndexError):
        return None


def child_pids(pid: int) -> list[int]:
    """The direct children of a process."""
    found: list[int] = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            found += map(int, task.read_text().split())
    return found


def process_tree(pid: int) -> list[int]:
    """A process and all that it started, parents first."""
    return [pid, *(each for child in child_pids(pid) for each in process_tree(child))]


def ignores_signal(pid: int, number: signal.Signals) -> bool:
    """Whether a process ignores a signal, as what a shell starts in the background does with Ctrl-C's."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        text = Path(f"/proc/{pid}/status").read_text(errors="replace")
        return bool(int(text.partition("SigIgn:")[2].split()[0], 16) >> (number - 1) & 1)
    return False
