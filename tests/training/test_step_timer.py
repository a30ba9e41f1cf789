"""Seconds of steps: the sum of all is the time that passed, however late the host looked."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from whet.training import metrics
from whet.training.metrics import StepTime, StepTimer


class Event:
    """A moment of the device, whose clock goes at its own speed and began at another time."""

    speed = 1.0
    now = 0.0

    def __init__(self, enable_timing: bool = True) -> None:
        self.at = 0.0

    def record(self) -> None:
        self.at = Event.now

    def synchronize(self) -> None:
        """It is there at once."""

    def elapsed_time(self, end: Event) -> float:
        return 1000 * self.speed * (end.at - self.at)


@pytest.fixture
def at(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Sets the time."""
    monkeypatch.setattr(torch.cuda, "Event", Event)

    def set_time(now: float) -> None:
        Event.now = now
        monkeypatch.setattr(metrics.time, "perf_counter", lambda: 500 + now)

    return set_time


def came(when: float) -> Any:
    event = Event()
    event.at = when
    return event


def test_without_overlap_the_hosts_clock_counts(at: Callable[[float], None]) -> None:
    made = StepTimer(by_device=False)
    for start, end in ((10.0, 12.5), (13.0, 15.5)):  # with a pause between them
        at(start)
        made.start()
        at(end)
        assert made.stop(None) == StepTime(2.5, 0.0)
        assert made.stop(came(end - 1)) == StepTime(2.5, 0.0)  # as where the optimizer waits for the host


def test_steps_that_overlap_take_as_long_as_the_device_does(at: Callable[[float], None]) -> None:
    """Steps of 2 s; the host is 0.75 s late, but at the end of each go of three."""
    made = StepTimer(by_device=True)
    for start in (10.0, 19.0):
        at(start)
        made.start()
        for number, late in enumerate((0.75, 0.75, 0.0)):
            end = start + 2 * (number + 1)
            at(end + late)
            assert made.stop(came(end))[:2] == pytest.approx((2.0, late))


def test_a_discarded_early_start_is_not_counted(at: Callable[[float], None]) -> None:
    made = StepTimer(by_device=True)
    at(10.0)
    made.start()
    at(13.0)
    assert made.stop(came(12.0))[:2] == pytest.approx((2.0, 1.0))
    at(16.0)
    made.start()  # what had begun was dropped
    at(19.0)
    assert made.stop(came(18.5))[:2] == pytest.approx((2.5, 0.5))


@pytest.mark.parametrize("speed", [0.999, 1.001])
def test_clocks_that_drift_apart_do_not_matter(
    at: Callable[[float], None], speed: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a thousand steps of a second they are a second apart."""
    monkeypatch.setattr(Event, "speed", speed)
    made = StepTimer(by_device=True)
    at(0.0)
    made.start()
    for step in range(1, 1001):
        at(step + 0.25)
        lap = made.stop(came(step))
        assert lap.seconds == pytest.approx(speed)
        assert lap.ended_ago_s >= 0
    at(1005.0)
    made.start()
    at(1006.25)
    assert made.stop(came(1006))[:2] == pytest.approx((speed, 0.25), abs=0.002)
