"""How long steps take, and when they end, also where they overlap on the host."""

from __future__ import annotations

import time
from typing import NamedTuple

import torch


class Lap(NamedTuple):
    """One step."""

    seconds: float
    ago: float
    """Seconds since it ended."""


class Clock:
    """Steps end when their numbers have come from the device. If the host was busy then, asking for the next step, it
    sees them too late, by as much as that took: what it sees would make steps before a pause too short and those after
    it too long. The device knows the time between two steps' ends."""

    def __init__(self, by_device: bool) -> None:
        """`by_device`: steps may overlap, on CUDA; if not, the host knows all."""
        self._by_device = by_device
        self._event: torch.cuda.Event | None = None
        self._since = 0.0

    def start(self) -> None:
        """A step begins that has not begun before; the device has nothing else to do."""
        if self._by_device:
            self._event = torch.cuda.Event(enable_timing=True)
            self._event.record()
            self._event.synchronize()
        self._since = time.perf_counter()

    def lap(self, came: torch.cuda.Event | None) -> Lap:
        """The step since the start, or since the last one's end; `came`: when the device had its numbers."""
        now = time.perf_counter()
        if self._event is None or came is None:
            return Lap(now - self._since, 0.0)
        seconds = self._event.elapsed_time(came) / 1000
        self._event, self._since = came, min(now, self._since + seconds)  # two clocks may drift apart
        return Lap(seconds, now - self._since)
