"""What to do after a run's processes have ended: a pure function of how they ended so far."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from whet.core.errors import DONE, FAILED, INPUT

_LONGEST_WAIT_S = 60.0
_NUMBERS = re.compile(r"0x[0-9a-fA-F]+|\d+")


@dataclass(frozen=True, slots=True)
class Ending:
    """How one attempt ended."""

    kind: Literal["done", "stopped", "input", "crashed"]
    exit_code: int
    """What `whet train` would have ended with, had it been alone."""
    step: int
    """Finished steps, of which the newest checkpoint may hold fewer."""
    message: str = ""
    rank: int | None = None
    """Which process failed first, where that is known."""
    host: str | None = None

    @property
    def who(self) -> str:
        where = f" on {self.host}" if self.host else ""
        return "the run" if self.rank is None else f"rank {self.rank}{where}"


@dataclass(frozen=True, slots=True)
class Restart:
    """Start again from the newest checkpoint."""

    after_s: float


@dataclass(frozen=True, slots=True)
class End:
    """Leave it at that."""

    exit_code: int
    reason: str


def decide(history: Sequence[Ending], max_restarts: int, first_wait_s: float) -> Restart | End:
    """Only a crash is worth another attempt: what was asked for, or is wrong with the input, will not change by it.

    Nor will a crash that comes again in the same step with the same words.
    """
    last = history[-1]
    if last.kind == "done":
        return End(DONE, "finished")
    if last.kind == "stopped":
        return End(last.exit_code, last.message)
    if last.kind == "input":
        return End(INPUT, last.message)
    if len(history) > 1 and is_same(last, history[-2]):
        return End(FAILED, f"{last.who} failed after step {last.step} again, in the same way: {last.message}")
    if len(history) > max_restarts:
        used_up = f"launch.max_restarts = {max_restarts} is used up"
        return End(FAILED, f"{used_up}; at last {last.who} failed after step {last.step}: {last.message}")
    return Restart(min(_LONGEST_WAIT_S, first_wait_s * 2 ** min(len(history) - 1, 30)))


def is_same(one: Ending, other: Ending) -> bool:
    """Whether two failures are one. Addresses, ports and times in messages differ from attempt to attempt."""
    return (one.step, _NUMBERS.sub("#", one.message)) == (other.step, _NUMBERS.sub("#", other.message))
