"""Forked worker processes that claim numbered work items from a shared queue.

A worker claims the next free number whenever it has finished one, so a slow item delays only itself. Workers are
forked: they start in milliseconds with everything loaded. They exit when their parent does.
"""

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

_POLL_S = 0.05
_fork_context = multiprocessing.get_context("fork")

fork_lock = threading.Lock()
"""Held while forking and by background threads at work. A forked process inherits the locks of all threads but not the
threads: a lock that is held at that moment, of a module being imported for example, is never released in the child."""
_waiting_callbacks: list[Callable[[], None]] = []


@contextlib.contextmanager
def run_while_waiting(begin: Callable[[], None]) -> Iterator[None]:
    """Call `begin`, possibly several times, when this process waits for workers or for a lock, and at the end.

    A thread that `begin` starts, and that holds `fork_lock` while it works, then takes no time from the preparation and
    delays no fork.
    """
    _waiting_callbacks.append(begin)
    try:
        yield
        begin()
    finally:
        _waiting_callbacks.remove(begin)


def notify_waiting() -> None:
    """Run the callbacks of `run_while_waiting`: from now on other processes do the work."""
    for begin in _waiting_callbacks:
        begin()


class WorkQueue:
    """Shared memory of the workers: the next free number, the last one, and what each worker has done."""

    def __init__(self, first: int, step: int, workers: int) -> None:
        """Numbers are first, first + step, first + 2 · step, …"""
        self._step = step
        self._next: Synchronized[int] = _fork_context.Value("q", first)
        self._last: Synchronized[int] = _fork_context.Value("q", 2**62)
        self.is_parallel = workers > 1
        self.done = _fork_context.RawArray("q", workers)
        self.tokens = _fork_context.RawArray("q", workers)
        self._parent = os.getpid()

    def claim(self) -> Iterator[int]:
        """Claim free numbers, one at a time, until there are no more."""
        while True:
            with self._next.get_lock():
                number = self._next.value
                self._next.value += self._step
            if number > self._last.value or os.getpid() != self._parent != os.getppid():
                return
            yield number

    @property
    def last(self) -> int:
        """The last number, once a worker has reached the end."""
        return self._last.value

    def stop_after(self, number: int) -> None:
        """Hand out no number beyond this one: it is the last, or it failed."""
        with self._last.get_lock():
            self._last.value = min(self._last.value, number)


WorkerFunction = Callable[[int, WorkQueue], None]
"""(number of the worker, queue): what a worker runs."""


class WorkerPool:
    """Running workers."""

    def __init__(self, work: WorkerFunction, workers: int, queue: WorkQueue) -> None:
        """Fork the workers. No threads may run, such as those of a progress bar, except with `fork_lock`."""
        self._failures = _fork_context.SimpleQueue()
        self._processes = [
            _fork_context.Process(target=_worker_main, args=(work, worker, queue, self._failures), daemon=True)
            for worker in range(workers)
        ]
        with fork_lock:
            for process in self._processes:
                process.start()
        notify_waiting()

    def wait(self, on_poll: Callable[[], None]) -> None:
        """Block until all workers have exited; call `on_poll` a few times a second.

        Raise the error of a worker; of several, the one with the smallest number.
        """
        failed: list[tuple[int, Exception]] = []
        died: int | None = None
        try:
            while any(process.is_alive() for process in self._processes):
                connection.wait([process.sentinel for process in self._processes if process.is_alive()], _POLL_S)
                on_poll()
                self._collect_failures(failed)
                if died is None and (died := self._exit_code()) is not None:
                    self._terminate()  # it may have died holding a lock that the others need
        except BaseException:
            self._terminate()
            raise
        finally:
            for process in self._processes:
                process.join()
        self._collect_failures(failed)
        died = self._exit_code() if died is None else died
        if died is not None:
            raise RunFailedError(
                f"a worker process died while preparing data (exit code {died}; −9 often means out of memory). "
                "Finished chunks are kept: run the command again to continue"
            )
        if failed:
            raise min(failed, key=lambda pair: pair[0])[1]

    def _exit_code(self) -> int | None:
        """The exit code of a worker that failed, if any."""
        return next((process.exitcode for process in self._processes if process.exitcode), None)

    def _terminate(self) -> None:
        for process in self._processes:
            process.terminate()

    def _collect_failures(self, failed: list[tuple[int, Exception]]) -> None:
        while not self._failures.empty():
            failed.append(self._failures.get())


class WorkItemError(Exception):
    """A work item failed."""

    def __init__(self, number: int, error: Exception) -> None:
        super().__init__(str(error))
        self.number, self.error = number, error


def _worker_main(work: WorkerFunction, worker: int, queue: WorkQueue, failures: Any) -> None:
    # a terminal sends SIGINT and SIGHUP, Slurm SIGUSR1, to the parent too, which terminates its workers
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    gc.freeze()  # objects of the parent are never garbage here; scanning them would copy shared pages
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # a forked thread pool would block forever
    try:
        work(worker, queue)
    except WorkItemError as failure:
        queue.stop_after(failure.number)
        failures.put((failure.number, failure.error))
    except Exception as error:
        queue.stop_after(-1)
        text = "".join(traceback.format_exception(error))
        failures.put((-1, error if isinstance(error, WhetError) else RuntimeError(text)))
