"""How long steps take, also those that overlap on the host."""

from __future__ import annotations

import time

import torch


class Clock:
    """Steps end when their numbers have come from the device. If the host was busy then, asking for the next step, it
    sees them too late, by as much as that took: what it sees would make steps before a pause too short and those after
    it too long. The device knows the time between two steps' ends."""

    def __init__(self) -> None:
        self._event: torch.cuda.Event | None = None
        self._ended = 0.0

    def seconds(self, began: float | None, came: torch.cuda.Event | None, busy: bool) -> float:
        """Of a step that began at this time of the host, or, if None, with the end of the step before.

        `came`: when the device had its numbers; None: it is the host itself. `busy`: the host was, until now.
        """
        now, ended = time.perf_counter(), None
        if came is not None and self._event is not None and (busy or began is None):
            ended = self._ended + self._event.elapsed_time(came) / 1000
        seconds = (now if ended is None else ended) - (self._ended if began is None else began)
        self._event, self._ended = came, now if ended is None or not busy else ended
        return seconds
