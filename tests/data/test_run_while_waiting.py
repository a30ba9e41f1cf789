"""Work in a thread beside processes: it begins when this process has nothing but to wait, and no fork cuts into it."""

from __future__ import annotations

import multiprocessing
import threading
import time
from pathlib import Path

import pytest

from whet.core.files import file_lock
from whet.data.prepare.workers import WorkerPool, WorkQueue, fork_lock, notify_waiting, run_while_waiting


def test_the_callback_runs_when_workers_start_and_at_the_end() -> None:
    begun: list[int] = []
    share = WorkQueue(0, 1, 2)
    with run_while_waiting(lambda: begun.append(len(multiprocessing.active_children()))):
        team = WorkerPool(lambda worker, share: time.sleep(0.3), 2, share)
        assert begun == [2]
        team.wait(lambda: None)
    assert begun == [2, 0]
    notify_waiting()
    assert len(begun) == 2  # over


def test_the_callback_does_not_run_after_an_error() -> None:
    begun: list[int] = []
    with pytest.raises(ValueError, match="data"), run_while_waiting(lambda: begun.append(1)):
        raise ValueError("data")
    notify_waiting()
    assert begun == []


def test_a_fork_waits_for_the_fork_lock() -> None:
    """Every process that is forked finds the lock free, and so no module half imported."""
    inside, done = threading.Event(), threading.Event()

    def thread() -> None:
        with fork_lock:
            inside.set()
            time.sleep(0.3)
            done.set()

    running = threading.Thread(target=thread)
    running.start()
    assert inside.wait(5)
    assert not done.is_set()
    WorkerPool(lambda worker, share: None, 2, WorkQueue(0, 1, 2)).wait(lambda: None)
    assert done.is_set()
    running.join()


def test_waiting_for_a_lock_runs_the_callback(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    go, waiting = context.Event(), context.Event()

    def other() -> None:
        go.wait()
        with file_lock(tmp_path / "lock", waiting.set):
            pass

    process = context.Process(target=other)  # before the lock is taken: a fork would share it
    process.start()
    said: list[str] = []
    with file_lock(tmp_path / "lock", lambda: said.append("early")):
        go.set()
        assert waiting.wait(10)
    process.join(10)
    assert process.exitcode == 0
    assert said == []
