"""Seconds of steps: the sum of all is the time that passed, however late the host looked."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from whet.train import clock
from whet.train.clock import Clock, reached_now


class Event:
    """The moment when the device had a step's numbers."""

    def __init__(self, at: float) -> None:
        self.at = at

    def elapsed_time(self, end: Event) -> float:
        return 1000 * (end.at - self.at)


@pytest.fixture
def seconds(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Asks a clock at a time of the host: (now, began, when the numbers came or None, busy). The device's clock began
    at another time."""
    monkeypatch.setattr(clock.time, "perf_counter", lambda: 9.0)
    reached: Any = Event(9.0 - 500)
    made = Clock(reached)

    def ask(now: float, began: float | None, came: float | None, busy: bool) -> float:
        monkeypatch.setattr(clock.time, "perf_counter", lambda: now)
        event: Any = None if came is None else Event(came - 500)
        lap = made.lap(began, event, busy)
        assert lap.ago == pytest.approx(now - came if busy and came is not None else 0.0)
        return lap.seconds

    return ask


def test_on_the_host_it_is_the_hosts_time(seconds: Any) -> None:
    assert seconds(12.5, 10.0, None, busy=False) == 2.5
    assert seconds(15.5, 13.0, None, busy=False) == 2.5


def test_a_host_that_waits_knows_the_time(seconds: Any) -> None:
    assert seconds(12.0, 10.0, 11.9, busy=False) == 2.0
    assert seconds(15.0, 13.0, 14.9, busy=False) == 2.0  # with a pause before it


def test_steps_that_begin_early_take_as_long_as_the_device_does(seconds: Any) -> None:
    """Steps of 2 s; after the first one, the host is 0.75 s late whenever it was busy."""
    found = [
        seconds(12.0, 10.0, 12.0, busy=False),
        seconds(15.75, 13.0, 15.0, busy=True),  # after a pause of 1 s
        seconds(17.75, None, 17.0, busy=True),
        seconds(19.75, None, 19.0, busy=True),
        seconds(21.0, None, 21.0, busy=False),  # and the next comes after a pause
        seconds(25.75, 23.0, 25.0, busy=True),
    ]
    assert found == pytest.approx([2.0] * 6)


def test_a_step_that_began_in_vain_is_not_counted_twice(seconds: Any) -> None:
    seconds(12.0, 10.0, 12.0, busy=False)
    assert seconds(15.0, 12.0, 14.0, busy=True) == pytest.approx(2.0)  # what was begun is dropped
    assert seconds(19.0, 16.0, 18.5, busy=True) == pytest.approx(2.5)


def test_the_first_step_too(seconds: Any) -> None:
    assert seconds(14.0, 10.0, 13.0, busy=True) == pytest.approx(3.0)
    assert seconds(16.0, None, 15.0, busy=True) == pytest.approx(2.0)


def test_without_a_device_there_is_one_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    made = Clock(reached_now(torch.device("cpu")))
    monkeypatch.setattr(clock.time, "perf_counter", lambda: 7.0)
    assert made.lap(5.0, None, busy=False) == (2.0, 0.0)


def test_clocks_that_drift_apart_do_not_matter(seconds: Any) -> None:
    """The device's is slow by a thousandth; after a thousand steps it is a second behind."""
    seconds(1.0, 0.0, 1.0, busy=False)
    for step in range(1, 1001):
        assert seconds(1.0 + step, None if step > 1 else 1.0, 1.0 + 0.999 * step, busy=True) == pytest.approx(0.999)
    assert seconds(1002.0, None, 1.0 + 0.999 * 1001, busy=False) == pytest.approx(0.999)
    assert seconds(1004.0, 1003.0, 1003.0, busy=False) == pytest.approx(1.0)
