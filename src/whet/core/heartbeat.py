"""What this process is doing right now, for the watchdog and for error reports; light, without torch."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(slots=True)
class Phase:
    """Of one process. Noting is a few assignments: nothing is written until somebody asks."""

    step: int = 0
    """The step it works on, counted from 1; 0 before the first."""
    doing: str = "starting"
    meeting: int = 0
    """How many times it has met the other processes; the last time may not be over."""
    waiting: bool = False
    """Whether it is waiting for the others there."""
    long: bool = False
    """Whether it does something of its own that may take any time, such as preparing data: being alive is enough."""
    since: float = 0.0
    """When it began with what it is doing, on this process's monotonic clock."""

    def at(self, doing: str, step: int | None = None, long: bool = False) -> None:
        """Begin something."""
        if step is not None:
            self.step = step
        self.doing, self.waiting, self.long = doing, False, long
        self.since = time.monotonic()

    def meets(self) -> None:
        """Begin to wait for all the others, as part of what is being done."""
        self.meeting += 1
        self.waiting = True
        self.since = time.monotonic()

    def met(self) -> None:
        self.waiting = False
        self.since = time.monotonic()

    def told(self) -> dict[str, Any]:
        """For others: `for_s` instead of a clock that they do not have."""
        told = asdict(self)
        return told | {"for_s": time.monotonic() - told.pop("since")}


PHASE = Phase(since=time.monotonic())
"""Of this process."""


def describe_phase(told: Mapping[str, Any]) -> str:
    """In words: `in step 12, computing`."""
    step = f"in step {told['step']}" if told["step"] else "before the first step"
    waiting = ", waiting for the others" if told["waiting"] else ""
    return f"{step}, {told['doing']}{waiting}"
