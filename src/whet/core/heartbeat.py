"""What this process is doing right now: read by the watchdog and by error reports. No torch."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(slots=True)
class Phase:
    """The phase of one process. Entering one is a few assignments; nothing is written until someone reads it."""

    step: int = 0
    """The current step, counted from 1; 0 before the first."""
    name: str = "starting"
    waits: int = 0
    """How many collectives and barriers it has entered; it may still be inside the last one."""
    waiting: bool = False
    """Whether it is inside one."""
    unbounded: bool = False
    """Whether the phase may take any time, such as preparing data: then being alive is enough for the watchdog."""
    since: float = 0.0
    """When the phase began, on this process's monotonic clock."""

    def enter(self, name: str, step: int | None = None, unbounded: bool = False) -> None:
        """Begin a phase."""
        if step is not None:
            self.step = step
        self.name, self.waiting, self.unbounded = name, False, unbounded
        self.since = time.monotonic()

    def begin_wait(self) -> None:
        """Enter a collective or a barrier within the current phase."""
        self.waits += 1
        self.waiting = True
        self.since = time.monotonic()

    def end_wait(self) -> None:
        self.waiting = False
        self.since = time.monotonic()

    def snapshot(self) -> dict[str, Any]:
        """For other processes: `for_s` replaces the monotonic clock, which they do not share."""
        fields = asdict(self)
        return fields | {"for_s": time.monotonic() - fields.pop("since")}


PHASE = Phase(since=time.monotonic())
"""The phase of this process."""


def describe_phase(snapshot: Mapping[str, Any]) -> str:
    """Such as `in step 12, computing gradients, waiting for the others`."""
    step = f"in step {snapshot['step']}" if snapshot["step"] else "before the first step"
    waiting = ", waiting for the others" if snapshot["waiting"] else ""
    return f"{step}, {snapshot['name']}{waiting}"


def format_age(seconds: float) -> str:
    """How long ago something was: `5 s ago`, `3 h ago`."""
    seconds = max(0, round(seconds))
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds // size} {unit} ago"
    return f"{seconds} s ago"
