"""Where trials run: what the search asks of this machine (local.py) or of a scheduler."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from whet.search.script import TrialConfig


@dataclass(frozen=True, slots=True)
class TrialRun:
    """A trial up to its next rung: `whet train RECIPE --resume --until STEP`, or a script of the user's.

    --resume starts a run that does not exist yet, and continues one that has been stopped at an earlier rung.
    """

    number: int
    recipe: Path
    """The trial's own, with values instead of ranges, and with its run.dir."""
    config: TrialConfig
    """The same, read."""
    until: int
    """The step after which it evaluates, saves a checkpoint and ends. The schedule is that of the whole run."""

    @property
    def folder(self) -> Path:
        """The run folder."""
        return self.config.folder


@dataclass(frozen=True, slots=True)
class TrialEnd:
    """The end of the process or job of a TrialRun."""

    number: int
    exit_code: int
    """Of `whet train` (core/errors.py); negative: the signal that killed it."""
    reason: str = ""
    """Why it failed, in a line, where that is known."""


class Place(Protocol):
    """Runs trials. The search calls it from one thread, and starts at most `slots` trials at a time."""

    @property
    def slots(self) -> int:
        """How many trials can run at the same time if search.concurrent is not set."""

    def start(self, trial: TrialRun) -> None:
        """Start a trial; returns at once."""

    def poll(self, seconds: float) -> list[TrialEnd]:
        """The trials that have ended since the last call; waits up to `seconds` for one."""

    def stop(self) -> None:
        """Request every running trial to save a checkpoint and end. `poll` reports the ends."""

    def kill(self) -> None:
        """End every running trial at once; their last checkpoints stay good."""

    def close(self) -> None:
        """Release what the place holds. No trial is running any more, unless an error is on its way."""
