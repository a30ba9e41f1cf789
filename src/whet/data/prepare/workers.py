"""Forked worker processes that claim numbered work items from a shared queue."""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import os
import signal
import threading
import traceback
from collections.abc import Callable, Iterator
from multiprocessing import connection
from multiprocessing.sharedctypes import Synchronized
from typing import Any

from whet.core.errors import RunFailedError, WhetError

# Several processes that share numbered pieces of work.
#
# Each process takes the next free number whenever it is done with one, so that a slow piece holds up nobody. They are
# forked: they start in milliseconds and find everything loaded. They live no longer than the one that started them.

_POLL_S = 0.05
_fork_context = multiprocessing.get_context("fork")

fork_lock = threading.Lock()
"""Held by a thread at work and by who forks. A forked process has the locks of all threads and none of the threads: one
that was held, of a module being imported for example, is never let go there."""
_waiting_callbacks: list[Callable[[], None]] = []


@contextlib.contextmanager
def run_while_waiting(begin: Callable[[], None]) -> Iterator[None]:
    """Have `begin` called, perhaps several times, when this process only waits for others, and at the end.

    What it begins, in a thread that holds `no_fork`, costs no time then and is in the way of no fork before.
    """
    _waiting_callbacks.append(begin)
    try:
        yield
        begin()
    finally:
        _waiting_callbacks.remove(begin)


def notify_waiting() -> None:
    """Said where other processes do the work from now on."""
    for begin in _waiting_callbacks:
        begin()


class WorkQueue:
    """What the processes see of each other: the next free number, what is done, and whether to stop."""

    def __init__(self, first: int, step: int, workers: int) -> None:
        """Numbers are first, first + step, first + 2 · step, …"""
        self._step = step
        self._next: Synchronized[int] = _fork_context.Value("q", first)
        self._last: Synchronized[int] = _fork_context.Value("q", 2**62)
        self.is_shared = workers > 1
        self.done = _fork_context.RawArray("q", workers)
        self.tokens = _fork_context.RawArray("q", workers)
        self._parent = os.getpid()

    def numbers(self) -> Iterator[int]:
        """Free numbers, one at a time, until the work is to stop."""
        while True:
            with self._next.get_lock():
                number = self._next.value
                self._next.value += self._step
            if number > self._last.value or os.getpid() != self._parent != os.getppid():
                return
            yield number

    @property
    def last(self) -> int:
        """The last number that has work, once a process has found the end."""
        return self._last.value

    def stop_after(self, number: int) -> None:
        """Give out no number beyond this one: there is no more work, or something failed there."""
        with self._last.get_lock():
            self._last.value = min(self._last.value, number)


WorkerFunction = Callable[[int, WorkQueue], None]
"""What one process does: (its number, the share)."""


class WorkerPool:
    """Processes at work."""

    def __init__(self, work: WorkerFunction, workers: int, share: WorkQueue) -> None:
        """Start them. They are forked, so nothing that has threads (a progress bar) may be open, `beside` apart."""
        self._failures = _fork_context.SimpleQueue()
        self._processes = [
            _fork_context.Process(target=_worker_main, args=(work, worker, share, self._failures), daemon=True)
            for worker in range(workers)
        ]
        with fork_lock:
            for process in self._processes:
                process.start()
        notify_waiting()

    def wait(self, watch: Callable[[], None]) -> None:
        """Until all are done; `watch` is called a few times a second meanwhile.

        An error of a worker is raised here; of several the one with the smallest number of work.
        """
        failed: list[tuple[int, Exception]] = []
        died: int | None = None
        try:
            while any(process.is_alive() for process in self._processes):
                connection.wait([process.sentinel for process in self._processes if process.is_alive()], _POLL_S)
                watch()
                self._collect(failed)
                if died is None and (died := self._exit_code()) is not None:
                    self._end()  # it may have died with a lock that the others wait for
        except BaseException:
            self._end()
            raise
        finally:
            for process in self._processes:
                process.join()
        self._collect(failed)
        died = self._exit_code() if died is None else died
        if died is not None:
            raise RunFailedError(
                f"a process that prepared data died (exit code {died}; −9 is often too little memory). What was "
                "finished is kept: start it again to continue"
            )
        if failed:
            raise min(failed, key=lambda pair: pair[0])[1]

    def _exit_code(self) -> int | None:
        """Of a process that ended as none should."""
        return next((process.exitcode for process in self._processes if process.exitcode), None)

    def _end(self) -> None:
        for process in self._processes:
            process.terminate()

    def _collect(self, failed: list[tuple[int, Exception]]) -> None:
        while not self._failures.empty():
            failed.append(self._failures.get())


class WorkItemError(Exception):
    """Something failed at a numbered piece of work."""

    def __init__(self, number: int, error: Exception) -> None:
        super().__init__(str(error))
        self.number, self.error = number, error


def _worker_main(work: WorkerFunction, worker: int, share: WorkQueue, failures: Any) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent gets it too, and ends its children
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # Slurm warns all processes of a job
    gc.freeze()  # what is there already is never garbage here: looking at it would copy shared pages
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # a forked thread pool would wait for ever
    try:
        work(worker, share)
    except WorkItemError as failure:
        share.stop_after(failure.number)
        failures.put((failure.number, failure.error))
    except Exception as error:
        share.stop_after(-1)
        text = "".join(traceback.format_exception(error))
        failures.put((-1, error if isinstance(error, WhetError) else RuntimeError(text)))
