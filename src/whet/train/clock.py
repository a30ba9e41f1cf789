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

    def __init__(self, reached: torch.cuda.Event | None) -> None:
        """`reached`: what the device has reached just now; None: there is no device but the host."""
        self._event, self._ended = reached, time.perf_counter()

    def lap(self, began: float | None, came: torch.cuda.Event | None, busy: bool) -> Lap:
        """A step that began at this time of the host, or, if None, with the end of the step before.

        `came`: when the device had its numbers; None: it is the host itself. `busy`: the host was, until now.
        """
        now = ended = time.perf_counter()
        if came is not None and self._event is not None and (busy or began is None):
            ended = self._ended + self._event.elapsed_time(came) / 1000
        seconds = ended - (self._ended if began is None else began)
        self._event, self._ended = came, ended if busy else now
        return Lap(seconds, max(0.0, now - ended) if busy else 0.0)


def reached_now(device: torch.device) -> torch.cuda.Event | None:
    """Wait until the device has done what it was asked for, and note that moment."""
    if device.type != "cuda":
        return None
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    event.synchronize()
    return event
