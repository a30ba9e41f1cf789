"""What changes while the page is open, as server-sent events.

One task for each run that someone watches looks at its files once a second and encodes what is new, once for all
clients. A client that does not read loses its connection, and comes back by itself.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

from whet.core.console import print_traceback
from whet.core.errors import WhetError
from whet.dash.curves import MetricsFile, new_lines
from whet.dash.responses import to_json
from whet.dash.run_details import log_ranks, log_tail, summary_json
from whet.dash.runs_folder import RunsFolder

POLL_S = 1.0
_STATE_EVERY = 3
"""Polls between two looks at processes and Slurm."""
_KEEP_ALIVE_S = 15.0
_MAX_WAITING = 64
MAX_CLIENTS = 256


class TooManyClientsError(Exception):
    """More clients than the page is made for."""


class Feed:
    """The events of one source, sent to all who subscribe to it. It polls only while someone does."""

    def __init__(self, poll: Callable[[], list[tuple[str, Any]]]) -> None:
        self._poll = poll
        self.clients: set[asyncio.Queue[bytes | None]] = set()
        self._task: asyncio.Task[None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    async def subscribe(self) -> AsyncIterator[bytes]:
        """Encoded events, until the client goes or falls behind."""
        queue: asyncio.Queue[bytes | None] = asyncio.Queue(_MAX_WAITING)
        self.clients.add(queue)
        self._loop = asyncio.get_running_loop()
        if self._task is None:
            self._task = asyncio.create_task(self._run())
        try:
            yield b"retry: 2000\n: connected\n\n"
            while True:
                try:
                    event = await asyncio.wait_for(queue.get(), _KEEP_ALIVE_S)
                except TimeoutError:
                    event = b": still here\n\n"
                if event is None:
                    return
                yield event
        finally:
            self.clients.discard(queue)
            if not self.clients and self._task is not None:
                self._task.cancel()
                self._task = None

    async def _run(self) -> None:
        try:
            while True:
                for name, value in await asyncio.to_thread(self._poll):
                    self._send(b"event: " + name.encode() + b"\ndata: " + to_json(value) + b"\n\n")
                await asyncio.sleep(POLL_S)
        except Exception:
            print_traceback()
            for queue in list(self.clients):  # they come back, to a new feed
                _end(queue)

    def close(self) -> None:
        if self._loop is not None:
            for queue in list(self.clients):
                self._loop.call_soon_threadsafe(_end, queue)

    def _send(self, event: bytes) -> None:
        for queue in list(self.clients):
            if queue.full():
                self.clients.discard(queue)
                _end(queue)  # it reconnects, and reads everything again
            else:
                queue.put_nowait(event)


def _end(queue: asyncio.Queue[bytes | None]) -> None:
    with contextlib.suppress(asyncio.QueueEmpty):
        while queue.full():
            queue.get_nowait()
    queue.put_nowait(None)


class Feeds:
    """The feeds that someone listens to, by what they are about."""

    def __init__(self) -> None:
        self._feeds: dict[tuple[str, ...], Feed] = {}

    def close(self) -> None:
        """End all streams: the server stops. Another thread may call it."""
        for feed in list(self._feeds.values()):
            feed.close()

    async def events(
        self, key: tuple[str, ...], poll: Callable[[], Callable[[], list[tuple[str, Any]]]]
    ) -> AsyncIterator[bytes]:
        """The events of a feed, which is made if there is none."""
        if sum(len(feed.clients) for feed in self._feeds.values()) >= MAX_CLIENTS:
            raise TooManyClientsError
        if key not in self._feeds:
            self._feeds[key] = Feed(poll())
        feed = self._feeds[key]
        try:
            async for event in feed.subscribe():
                yield event
        finally:
            if not feed.clients and self._feeds.get(key) is feed:
                del self._feeds[key]


def poll_run(folders: RunsFolder, name: str, file: MetricsFile, rank: int) -> Callable[[], list[tuple[str, Any]]]:
    """What is new about a run since the last call: steps, evaluations, state, lines of a log."""
    folder = folders.find(name)
    with file.lock:
        file.refresh(0.2)
        seen = [file.generation, file.steps.rows, file.evaluations.rows]
    state: dict[str, Any] = {}
    log: list[int | None] = [None]
    turn = 0

    def poll() -> list[tuple[str, Any]]:
        nonlocal turn, state
        events: list[tuple[str, Any]] = []
        with file.lock:
            file.refresh(0.2)
            if seen[0] != file.generation:
                events.append(("reset", {}))
                seen[:] = [file.generation, file.steps.rows, file.evaluations.rows]
            lines, seen[1] = new_lines(file, seen[1])
            if lines:
                events.append(("steps", lines))
            if file.evaluations.rows > seen[2]:
                seen[2] = file.evaluations.rows
                events.append(("evaluation", {"count": seen[2]}))
        start, lines_of_log = log[0], _new_log_lines(folders, folder, rank, log)
        if lines_of_log:
            events.append(("log", {"rank": rank, "start": start, "end": log[0], "lines": lines_of_log}))
        if turn % _STATE_EVERY == 0:
            with contextlib.suppress(WhetError):
                newest = summary_json(folders.summary(name)) | {"name": name}
                if newest != state:
                    state = newest
                    events.append(("state", newest))
        turn += 1
        return events

    return poll


def _new_log_lines(folders: RunsFolder, folder: Path, rank: int, log: list[int | None]) -> list[str]:
    if rank not in log_ranks(folder):
        return []
    try:
        lines, log[0] = log_tail(folders.require_inside(folder / "logs" / f"rank-{rank}.log"), log[0])
    except (OSError, WhetError):
        return []
    return lines


def poll_list(folders: RunsFolder) -> Callable[[], list[tuple[str, Any]]]:
    """The runs whose row has changed since the last call, and those that are gone; at first all, because what a page
    has got may be older or lack what takes long to read."""
    known: dict[str, dict[str, Any]] = {}
    turn = 0

    def poll() -> list[tuple[str, Any]]:
        nonlocal known, turn
        turn += 1
        if turn % 2:  # every other second
            return []
        rows = {run.name: summary_json(run) for run in folders.summaries()}
        changed = [row for name, row in rows.items() if row != known.get(name)]
        gone = [name for name in known if name not in rows]
        known = rows
        return [("runs", {"changed": changed, "gone": gone})] if changed or gone else []

    return poll
