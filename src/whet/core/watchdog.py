"""A watchdog thread per rank: when no rank makes progress, it reports which one the others wait for and ends the run.

Without it a hung collective ends after the process group's timeout, in every process at once, with the name of the
collective but not of the rank that is missing from it.
"""

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
from whet.core.errors import ExitCode, first_line
from whet.core.heartbeat import PHASE, describe_phase, format_age

_PERIOD_S = 5.0
_SILENT_PERIODS = 4  # a rank without a heartbeat for so many periods counts as gone
COLLECTIVE_MARGIN_S = 120.0
"""How much later than the watchdog a collective times out, so that the watchdog reports first."""

Heartbeat = Mapping[str, Any]
"""A `Phase.snapshot` with `host`, and `time`: when this process saw it first, on its own monotonic clock. The clocks of
other machines may be wrong."""


class Watchdog:
    """Publishes this rank's heartbeat in the store, and compares all heartbeats when this rank is stuck."""

    def __init__(self, rank: int, world_size: int, timeout_s: float, on_hang: Callable[[str], None]) -> None:
        """`on_hang` is called in one process, with a description of the hang, before all processes exit."""
        self._rank, self._world_size, self._timeout_s, self._on_hang = rank, world_size, timeout_s, on_hang
        self._period_s = min(_PERIOD_S, timeout_s / 10)
        self._silent_after_s = _SILENT_PERIODS * self._period_s
        self._began, self._closed = time.monotonic(), threading.Event()
        self._seen: dict[int, tuple[bytes, float]] = {}
        """The last heartbeat of each rank, and when it was new to this process."""
        self._next_look, self._count = 0.0, 0
        self._store: TCPStore | None = None
        self._thread = threading.Thread(target=self._run, name="whet-watchdog", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop watching: the run has ended."""
        self._closed.set()
        self._thread.join(timeout=2 * self._period_s)

    def _run(self) -> None:
        while not self._closed.is_set():
            try:
                self._check()
            except (RuntimeError, OSError) as error:  # the store is gone: with the launcher, or a stopped rank 0
                self._store = None
                stuck = time.monotonic() - PHASE.since > self._timeout_s
                if stuck and not PHASE.unbounded and not self._closed.is_set():
                    self._abort(f"the store that connects all processes no longer answers ({first_line(error)})")
            self._closed.wait(self._period_s)

    def _check(self) -> None:
        if self._store is None:
            self._store = connect_store(max(1.0, min(60.0, self._timeout_s)))
        mine = PHASE.snapshot() | {"host": socket.gethostname(), "count": self._count}
        self._count += 1  # two heartbeats of one rank differ
        self._store.set(_heartbeat_key(self._rank), json.dumps(mine))
        now = time.monotonic()
        if mine["for_s"] < 2 * self._period_s or mine["unbounded"]:
            self._seen.clear()
            return
        if mine["for_s"] < self._timeout_s and now < self._next_look:
            return
        # Seldom before the timeout, to know by then since when the others are silent: thousands of ranks may wait
        self._next_look = now + self._timeout_s / 10
        beats = self._read_heartbeats(self._store, now)
        if mine["for_s"] >= self._timeout_s and all(
            stalled_s(beat, now, self._silent_after_s) >= self._timeout_s for beat in beats.values()
        ):
            hang = describe_hang(beats, now, self._timeout_s, self._silent_after_s)
            if self._store.compare_set("whet/hang", "", str(self._rank)) == str(self._rank).encode():
                self._abort(hang)
            time.sleep(self._period_s)  # the rank that reports writes its files first
            os._exit(ExitCode.FAILED)

    def _read_heartbeats(self, store: TCPStore, now: float) -> dict[int, Heartbeat]:
        unheard = {
            "step": 0, "name": "starting", "waits": 0, "waiting": False, "unbounded": False, "for_s": 0.0,
            "time": self._began, "host": "?",
        }  # fmt: skip
        beats: dict[int, Heartbeat] = {}
        for rank in range(self._world_size):
            beats[rank] = unheard
            if store.check([_heartbeat_key(rank)]):
                beat = store.get(_heartbeat_key(rank))
                if rank not in self._seen or self._seen[rank][0] != beat:
                    self._seen[rank] = beat, now
                beats[rank] = json.loads(beat) | {"time": self._seen[rank][1]}
        return beats

    def _abort(self, message: str) -> None:
        if not self._closed.is_set():
            self._on_hang(message)
            os._exit(ExitCode.FAILED)


def stalled_s(beat: Heartbeat, now: float, silent_after_s: float) -> float:
    """For how long a rank has made no progress. One in an unbounded phase is not stuck while its heartbeat is fresh."""
    age_s = now - beat["time"]
    return 0.0 if beat["unbounded"] and not beat["waiting"] and age_s < silent_after_s else beat["for_s"] + age_s


def lagging_ranks(beats: Mapping[int, Heartbeat], now: float, silent_after_s: float) -> list[int]:
    """The ranks that the others wait for: those without a fresh heartbeat, else those that have not entered the
    collective where the others are. Empty if all wait in the same one."""
    silent = [rank for rank, beat in beats.items() if now - beat["time"] >= silent_after_s]
    if silent:
        return silent
    last = max(beat["waits"] for beat in beats.values())
    return [rank for rank, beat in beats.items() if beat["waits"] < last or not beat["waiting"]]


def describe_hang(beats: Mapping[int, Heartbeat], now: float, timeout_s: float, silent_after_s: float) -> str:
    """The message for the user: which ranks lag behind, what they do, and who waits for them."""
    late = lagging_ranks(beats, now, silent_after_s)
    start = f"no process has made progress for {timeout_s:g} s (parallel.timeout = {timeout_s / 60:g} minutes)"
    end = "Start it again to continue from its last checkpoint (whet train: with --resume)"
    if not late:
        place = describe_phase(next(iter(beats.values())))
        return f"{start}: all are {place}, so the network between them is at fault. {end}"
    lagging = [
        f"rank {rank} on {beats[rank]['host']}, last heartbeat {format_age(now - beats[rank]['time'])} "
        f"{describe_phase(beats[rank])}"
        for rank in late[:3]
    ]
    more = f" and {len(late) - 3} more" if len(late) > 3 else ""
    others = [rank for rank in beats if rank not in late]
    place = f". Waiting for it: {_format_ranks(others)}, {describe_phase(beats[others[0]])}" if others else ""
    return f"{start}. Behind the others: {'; '.join(lagging)}{more}{place}. {end}"


def _format_ranks(numbers: list[int]) -> str:
    shown = ", ".join(map(str, numbers[:8])) + (", …" if len(numbers) > 8 else "")
    return f"rank{'s' if len(numbers) > 1 else ''} {shown}"


def _heartbeat_key(rank: int) -> str:
    return f"whet/at/{rank}"
