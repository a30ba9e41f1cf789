"""Prefetching: the same results, sooner; never many at a time."""

from __future__ import annotations

import threading
import time

import pytest

from whet.data.loader import Prefetcher

LAST = 9


def following(key: int) -> int | None:
    return key + 1 if key < LAST else None


class Maker:
    def __init__(self) -> None:
        self.made: list[int] = []
        self.threads: set[int] = set()
        self.allowed = threading.Semaphore(0)

    def __call__(self, key: int) -> int:
        assert self.allowed.acquire(timeout=5)
        self.made.append(key)
        self.threads.add(threading.get_ident())
        if key == 5:
            raise ValueError("five")
        return key * key


@pytest.fixture
def maker() -> Maker:
    return Maker()


def wait_for(maker: Maker, count: int) -> None:
    """Until so many were made and the thread has had the time to make one more, if it would."""
    end = time.monotonic() + 5
    while len(maker.made) < count and time.monotonic() < end:
        time.sleep(0.005)
    time.sleep(0.05)


def test_prefetching_is_bounded_by_depth(maker: Maker) -> None:
    ahead = Prefetcher(maker, following, depth=3)
    maker.allowed.release(100)
    assert ahead.get(0) == 0
    wait_for(maker, 4)
    assert maker.made == [0, 1, 2, 3]
    assert ahead.get(1) == 1
    wait_for(maker, 5)
    assert maker.made == [0, 1, 2, 3, 4]
    assert threading.get_ident() not in maker.threads
    assert len(maker.threads) == 1
    ahead.close()


@pytest.mark.parametrize("keys", [[0, 1, 2, 3], [9, 8, 7, 6], [3, 3, 3], [0, 4, 1, 2, 9, 0], [7, 8, 9, 0]])
def test_any_order_gives_the_same(maker: Maker, keys: list[int]) -> None:
    maker.allowed.release(1000)
    ahead = Prefetcher(maker, following, depth=2)
    assert [ahead.get(key) for key in keys] == [key * key for key in keys]
    ahead.close()


def test_an_error_is_raised_when_its_key_is_requested(maker: Maker) -> None:
    maker.allowed.release(1000)
    ahead = Prefetcher(maker, following, depth=3)
    assert ahead.get(3) == 9
    assert ahead.get(4) == 16
    for _ in range(2):
        with pytest.raises(ValueError, match="five"):
            ahead.get(5)
    assert ahead.get(6) == 36
    ahead.close()


def test_closing_stops_the_thread(maker: Maker) -> None:
    ahead = Prefetcher(maker, following, depth=3)
    maker.allowed.release(2)
    assert ahead.get(0) == 0
    wait_for(maker, 2)
    maker.allowed.release(100)
    ahead.close()
    assert len(maker.made) <= 3  # 2 may have begun
    assert not maker.threads & {thread.ident for thread in threading.enumerate()}
    with pytest.raises(RuntimeError):
        ahead.get(1)
