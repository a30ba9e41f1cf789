"""Time and memory limits for foreign programs that run inside this process: chat templates, JSON schemas, patterns.

A timer signal ends Python code and Python's `re` between two steps, and the kernel's limit of private memory makes
a huge allocation fail, such as `'a' * 10**10`. Together they cost 40 µs a time and nothing while the program runs;
counting its steps, or a process for each rendering, would cost more than the rendering.
"""

from __future__ import annotations

import resource
import signal
import sys
import threading
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import FrameType

from whet.core.resources import available_memory

_MEMORY_BYTES = 2**31
ENGINE_THREAD = "generation engine"
_LARGE_THREADS = ("load the model", "checkpoint staging", "checkpoint writer", ENGINE_THREAD)
"""Threads of whet that allocate gigabytes, and must not fail because a template is rendered meanwhile."""
_REPEAT_S = 0.1
"""A signal that comes at a time when nothing can be raised is sent again."""


class _TimeUp(BaseException):
    """What the timer raises. A BaseException, because foreign programs catch others."""


class limited:  # noqa: N801
    """`with limited(seconds, make_error):` raises `make_error(reason)` if the block uses more CPU time than `seconds`,
    or 2 GiB more memory than before it.

    A block inside another starts the time anew and costs next to nothing; otherwise the outer one's limits hold. Only
    the main thread gets signals: there are no limits in others.
    """

    _active: limited | None = None
    _has_new_block = False
    _can_raise = True

    def __init__(self, seconds: float, make_error: Callable[[str], Exception]) -> None:
        self._seconds, self._make_error = seconds, make_error

    def __enter__(self) -> None:
        if threading.current_thread() is not threading.main_thread():
            return
        if limited._active is not None:
            limited._active._has_new_block = True
            return
        self._began = time.thread_time()
        self._memory_limits = resource.getrlimit(resource.RLIMIT_DATA)
        _limit_memory(*self._memory_limits)
        limited._active = self
        self._unraisable_hook, sys.unraisablehook = sys.unraisablehook, self._report_unraisable
        self._handler = signal.signal(signal.SIGALRM, self._check_time)
        self._timer = signal.setitimer(signal.ITIMER_REAL, self._seconds, _REPEAT_S)

    def _check_time(self, _: int, frame: FrameType | None) -> None:
        """Wall-clock time brings the signal, CPU time decides: the process may have been suspended."""
        if self._has_new_block:  # the time of an inner block counts from the first signal in it
            self._began, self._has_new_block = time.thread_time(), False
        can_raise = self._can_raise and frame is not None and frame.f_code.co_name not in ("__exit__", "__del__")
        if limited._active is self and can_raise and time.thread_time() - self._began >= self._seconds:
            raise _TimeUp

    def _report_unraisable(self, unraisable: sys.UnraisableHookArgs) -> None:
        """Python drops what is raised while it collects garbage. The next signal raises _TimeUp again."""
        if unraisable.exc_type is not _TimeUp:
            self._can_raise = False
            self._unraisable_hook(unraisable)
            self._can_raise = True

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        if limited._active is self:
            limited._active = None
            resource.setrlimit(resource.RLIMIT_DATA, self._memory_limits)
            signal.setitimer(signal.ITIMER_REAL, *self._timer)
            signal.signal(signal.SIGALRM, self._handler)
            sys.unraisablehook = self._unraisable_hook
        if kind is _TimeUp:
            raise self._make_error(f"it ran for more than {self._seconds:g} s") from None
        if isinstance(error, MemoryError):
            raise self._make_error(f"it needs more than {_MEMORY_BYTES >> 30} GiB of memory") from None


def _limit_memory(soft: int, hard: int) -> None:
    """Allow 2 GiB more than now; beside a thread that needs memory itself, half of what is free if that is more."""
    now = int(Path("/proc/self/statm").read_bytes().split()[5]) * resource.getpagesize()
    is_shared = any(thread.name in _LARGE_THREADS for thread in threading.enumerate())
    more = max(_MEMORY_BYTES, _half_of_memory()) if is_shared else _MEMORY_BYTES
    limits = [limit for limit in (now + more, soft, hard) if limit != resource.RLIM_INFINITY]
    resource.setrlimit(resource.RLIMIT_DATA, (min(limits), hard))


@cache
def _half_of_memory() -> int:
    return (available_memory() or 0) // 2
