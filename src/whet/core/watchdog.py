"""A watchdog thread per rank: when no rank makes progress, it reports which rank the others wait for and ends the run."""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from whet.core.distributed import connect_store
from whet.core.errors import FAILED
from whet.core.files import format_age
from whet.core.heartbeat import PHASE, describe_phase

# A watch over all processes of a run: when none gets any further, it says which one the others wait for, and ends.
#
# Without it a hung collective ends after the process group's timeout, in every process at once, with the name of the
# collective and not of the process that is missing from it.

_PERIOD_S = 5.0
_SILENT_PERIODS = 4  # periods without a word
COLLECTIVE_MARGIN_S = 120.0
"""What a collective may take longer than the watchdog's patience, so that the watchdog speaks first."""

Heartbeat = Mapping[str, Any]


class Watchdog:
    """A thread beside every rank: publishes where its own is, and compares all when its own is stuck."""

    def __init__(self, rank: int, world: int, patience_s: float, ends: Callable[[str], None]) -> None:
        """`ends` is called in one of the processes, with the words for the user, before they all end."""
        self._rank, self._world, self._patience_s, self._ends = rank, world, patience_s, ends
        self._period_s = min(_PERIOD_S, patience_s / 10)
        self._began, self._over = time.time(), threading.Event()
        self._store: TCPStore | None = None
        self._thread = threading.Thread(target=self._watch, name="whet-watchdog", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """The end of a run is no hang."""
        self._over.set()
        self._thread.join(timeout=2 * self._period_s)

    def _watch(self) -> None:
        while not self._over.is_set():
            try:
                self._look()
            except (RuntimeError, OSError) as error:  # the store is gone: with the launcher, or a stopped rank 0
                self._store = None
                if time.monotonic() - PHASE.since > self._patience_s and not PHASE.long and not self._over.is_set():
                    self._end(f"the store that all processes meet at does not answer any more ({_first_line(error)})")
            self._over.wait(self._period_s)

    def _look(self) -> None:
        if self._store is None:
            self._store = connect_store(max(1.0, min(60.0, self._patience_s)))
        mine = PHASE.told() | {"host": socket.gethostname(), "time": time.time()}
        self._store.set(_heartbeat_key(self._rank), json.dumps(mine))
        if mine["for_s"] < self._patience_s or mine["long"]:
            return
        now, everyone = time.time(), self._everyone()
        if all(stalled_s(told, now, self._quiet_s) >= self._patience_s for told in everyone.values()):
            words = describe_hang(everyone, now, self._patience_s, self._quiet_s)
            if self._store.compare_set("whet/hang", "", str(self._rank)) == str(self._rank).encode():
                self._end(words)
            time.sleep(self._period_s)  # the one that speaks may write it down first
            os._exit(FAILED)

    @property
    def _quiet_s(self) -> float:
        return _SILENT_PERIODS * self._period_s

    def _everyone(self) -> dict[int, Heartbeat]:
        assert self._store is not None
        unheard = {
            "step": 0, "doing": "starting", "meeting": 0, "waiting": False, "long": False, "for_s": 0.0,
            "time": self._began, "host": "?",
        }  # fmt: skip
        return {
            rank: json.loads(self._store.get(_heartbeat_key(rank)))
            if self._store.check([_heartbeat_key(rank)])
            else unheard
            for rank in range(self._world)
        }

    def _end(self, words: str) -> None:
        if not self._over.is_set():
            self._ends(words)
            os._exit(FAILED)


def stalled_s(told: Heartbeat, now: float, quiet_s: float) -> float:
    """For how long a rank has not got any further, as far as is known; one that works at length is not stuck while it
    is heard of."""
    heard_s = now - told["time"]
    return 0.0 if told["long"] and not told["waiting"] and heard_s < quiet_s else told["for_s"] + heard_s


def lagging_ranks(everyone: Mapping[int, Heartbeat], now: float, quiet_s: float) -> list[int]:
    """The ranks that the others wait for: those not heard of any more, else those that have not come to the meeting
    where the others are. None: all wait for each other."""
    silent = [rank for rank, told in everyone.items() if now - told["time"] >= quiet_s]
    if silent:
        return silent
    last = max(told["meeting"] for told in everyone.values())
    return [rank for rank, told in everyone.items() if told["meeting"] < last or not told["waiting"]]


def describe_hang(everyone: Mapping[int, Heartbeat], now: float, patience_s: float, quiet_s: float) -> str:
    """What hangs, in words: the ranks that lag behind, where they are, and who waits."""
    late = lagging_ranks(everyone, now, quiet_s)
    start = f"no process has got any further for {patience_s:g} s (parallel.timeout = {patience_s / 60:g} minutes)"
    end = "Start it again to continue from its last checkpoint (whet train: with --resume)"
    if not late:
        place = describe_phase(next(iter(everyone.values())))
        return f"{start}: all are {place}, so the network between them is at fault. {end}"
    told = [
        f"rank {rank} on {everyone[rank]['host']}, last heard of {format_age(now - everyone[rank]['time'])} "
        f"{describe_phase(everyone[rank])}"
        for rank in late[:3]
    ]
    more = f" and {len(late) - 3} more" if len(late) > 3 else ""
    others = [rank for rank in everyone if rank not in late]
    place = f". Waiting for it: {_format_ranks(others)}, {describe_phase(everyone[others[0]])}" if others else ""
    return f"{start}. Behind the others: {'; '.join(told)}{more}{place}. {end}"


def _format_ranks(numbers: list[int]) -> str:
    shown = ", ".join(map(str, numbers[:8])) + (", …" if len(numbers) > 8 else "")
    return f"rank{'s' if len(numbers) > 1 else ''} {shown}"


def _heartbeat_key(rank: int) -> str:
    return f"whet/at/{rank}"


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
