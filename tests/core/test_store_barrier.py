"""The barrier in the TCPStore: no deadline, and it reports how many ranks are missing."""

from __future__ import annotations

import threading
import time

import pytest
from torch.distributed import TCPStore

import whet.core.distributed as distributed
from whet.core.distributed import store_barrier


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> TCPStore:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(store.port))
    return store


def test_a_barrier_blocks_until_the_last_rank_and_reports_the_missing(
    store: TCPStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(distributed, "_LOG_AFTER_S", 0.2)
    missing, came = list[int](), list[int]()

    def come(rank: int) -> None:
        store_barrier("here", rank, 3, missing.append)
        came.append(rank)

    threads = [threading.Thread(target=come, args=(rank,)) for rank in (0, 1)]
    for thread in threads:
        thread.start()
    time.sleep(1.0)
    assert (came, missing) == ([], [1, 1])
    store_barrier("here", 2, 3)
    for thread in threads:
        thread.join(10)
    assert sorted(came) == [0, 1]


def test_barriers_of_different_names_are_independent(store: TCPStore) -> None:
    store_barrier("one", 0, 1)
    late = threading.Thread(target=store_barrier, args=("two", 0, 2), daemon=True)
    late.start()
    late.join(0.5)
    assert late.is_alive()
    store_barrier("two", 1, 2)
    late.join(10)
    assert not late.is_alive()
