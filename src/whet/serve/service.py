"""The engine in a thread of its own, the requests that wait for it, and its counters."""

from __future__ import annotations

import asyncio
import contextlib
import queue
import resource
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from whet.core.console import print_traceback
from whet.core.errors import first_line
from whet.core.limits import ENGINE_THREAD
from whet.inference.online_engine import OnlineSequence
from whet.web.request_guard import Rejection

_RETRY_AFTER_S = 5


class StepEngine(Protocol):
    """What the service drives: `OnlineEngine`, or `SerialEngine` for models without a KV cache."""

    @property
    def running(self) -> list[OnlineSequence]: ...

    @property
    def waiting(self) -> list[OnlineSequence]: ...

    def submit(self, sequence: OnlineSequence) -> None: ...

    def step(self) -> None: ...


@dataclass(slots=True, eq=False)
class Generation:
    """One request in progress: its sequences, and the queue in which the event loop finds what they generate."""

    sequences: list[OnlineSequence]
    events: asyncio.Queue[tuple[int, int | None]] = field(default_factory=asyncio.Queue)
    """(number of the sequence, token), and (number, None) when it is done."""
    failure: str | None = None
    began: float = field(default_factory=time.monotonic)
    first_token: float | None = None

    async def __aiter__(self) -> AsyncIterator[tuple[int, int | None]]:
        """Tokens as they are generated; a Rejection if the engine failed."""
        unfinished = len(self.sequences)
        while unfinished:
            number, token = await self.events.get()
            if self.failure is not None:
                raise Rejection(500, f"generation failed: {self.failure}")
            unfinished -= token is None
            yield number, token


class GenerationService:
    """Accepts generations up to a limit and delivers their tokens to the event loop that started it."""

    def __init__(self, engine: StepEngine, max_requests: int, metrics: Metrics) -> None:
        """`max_requests`: sequences that run or wait; one more is refused with 429."""
        self._engine, self.max_requests, self._metrics = engine, max_requests, metrics
        self._inbox: queue.SimpleQueue[OnlineSequence | None] = queue.SimpleQueue()
        self._owners: dict[OnlineSequence, tuple[Generation, int]] = {}  # of the event loop
        self._updates: list[tuple[OnlineSequence, int | None]] = []  # of the engine's thread
        self._thread = threading.Thread(target=self._run, name=ENGINE_THREAD, daemon=True)
        self._is_stopping = False
        self._next_index = 0

    def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    def stop(self) -> None:
        """End the thread after its current step."""
        self._is_stopping = True
        self._inbox.put(None)
        self._thread.join(timeout=60)

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    @contextlib.contextmanager
    def generate(self, sequences: Sequence[OnlineSequence]) -> Iterator[Generation]:
        """Run sequences; when the block ends, for whatever reason, what still runs is cancelled and its slot freed."""
        self.require_room(len(sequences))
        generation = Generation(list(sequences))
        for number, sequence in enumerate(sequences):
            self._next_index += 1
            sequence.index = self._next_index
            self._owners[sequence] = generation, number
            self._inbox.put(sequence)
        self._metrics.prompt_tokens += sum(len(sequence.prompt) for sequence in sequences)
        try:
            yield generation
        finally:
            for sequence in sequences:
                sequence.done = True
                self._owners.pop(sequence, None)
            self._metrics.request_seconds.add(time.monotonic() - generation.began)

    def require_room(self, count: int) -> None:
        """A Rejection if the queue has no room for so many sequences."""
        if self._owners and len(self._owners) + count > self.max_requests:
            self._metrics.rejected += 1
            full = Rejection(
                429, f"the server has {len(self._owners)} of at most {self.max_requests} requests; try again later",
                code="server_busy",
            )  # fmt: skip
            full.headers["retry-after"] = str(_RETRY_AFTER_S)
            raise full

    def on_token(self, sequence: OnlineSequence, token: int) -> None:
        """Called by the engine."""
        self._updates.append((sequence, token))

    def _run(self) -> None:
        engine = self._engine
        tracked: set[OnlineSequence] = set()
        while not self._is_stopping:
            is_idle = not tracked
            with contextlib.suppress(queue.Empty):
                while True:
                    sequence = self._inbox.get(block=is_idle)
                    is_idle = False
                    if sequence is None:
                        return
                    tracked.add(sequence)
                    engine.submit(sequence)
            try:
                engine.step()
            except Exception as error:  # such as a device without memory: these requests fail, the next may not
                print_traceback()
                for sequence in tracked:
                    sequence.done = True
                self._call_soon(self._fail, list(tracked), first_line(error))
                with contextlib.suppress(Exception):
                    engine.step()  # drops them
                tracked, self._updates = set(), []
                continue
            finished = [sequence for sequence in tracked if sequence.done]
            tracked.difference_update(finished)
            updates: list[tuple[OnlineSequence, int | None]] = [*self._updates, *((each, None) for each in finished)]
            self._updates = []
            self._metrics.running, self._metrics.waiting = len(engine.running), len(engine.waiting)
            if updates:
                self._call_soon(self._deliver, updates)

    def _call_soon(self, function: Any, *arguments: Any) -> None:
        with contextlib.suppress(RuntimeError):  # the event loop is closed
            self._loop.call_soon_threadsafe(function, *arguments)

    def _deliver(self, updates: Sequence[tuple[OnlineSequence, int | None]]) -> None:
        for sequence, token in updates:
            owner = self._owners.get(sequence)
            if owner is None:  # its client left
                continue
            generation, number = owner
            if token is not None:
                self._metrics.generated_tokens += 1
                if generation.first_token is None:
                    generation.first_token = time.monotonic()
                    self._metrics.first_token_seconds.add(generation.first_token - generation.began)
            else:
                self._owners.pop(sequence)
                generation.failure = generation.failure or sequence.failure
            generation.events.put_nowait((number, token))

    def _fail(self, sequences: Sequence[OnlineSequence], reason: str) -> None:
        for sequence in sequences:
            owner = self._owners.pop(sequence, None)
            if owner is not None:
                owner[0].failure = reason
                owner[0].events.put_nowait((owner[1], None))


# Counters of a server, in the text format of Prometheus.

_BOUNDS = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)


@dataclass(slots=True)
class Histogram:
    """Seconds, counted by upper bounds."""

    buckets: list[int] = field(default_factory=lambda: [0] * len(_BOUNDS))
    total: float = 0.0
    count: int = 0

    def add(self, seconds: float) -> None:
        self.count += 1
        self.total += seconds
        for index, bound in enumerate(_BOUNDS):
            self.buckets[index] += seconds <= bound

    def lines(self, name: str) -> Iterator[str]:
        for bound, value in zip(_BOUNDS, self.buckets, strict=True):
            yield f'{name}_bucket{{le="{bound:g}"}} {value}'
        yield f'{name}_bucket{{le="+Inf"}} {self.count}'
        yield f"{name}_sum {self.total:.6f}"
        yield f"{name}_count {self.count}"


@dataclass(slots=True)
class Metrics:
    """What a server did since it started."""

    responses: Counter[tuple[str, int]] = field(default_factory=Counter)
    """By endpoint and status."""
    running: int = 0
    waiting: int = 0
    rejected: int = 0
    disconnected: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    first_token_seconds: Histogram = field(default_factory=Histogram)
    request_seconds: Histogram = field(default_factory=Histogram)

    def as_text(self) -> str:
        """All metrics, for Prometheus."""
        lines: list[str] = []

        def add(name: str, kind: str, meaning: str, values: Iterator[str] | list[str]) -> None:
            lines.extend((f"# HELP whet_{name} {meaning}", f"# TYPE whet_{name} {kind}"))
            lines.extend(f"whet_{value}" for value in values)

        counted = sorted(self.responses.items())
        answers = [f'responses_total{{path="{path}",status="{status}"}} {count}' for (path, status), count in counted]
        add("responses_total", "counter", "Responses by path and status.", answers)
        for name, kind, meaning, value in (
            ("sequences_running", "gauge", "Sequences in the batch.", self.running),
            ("sequences_waiting", "gauge", "Sequences that wait for a slot.", self.waiting),
            ("rejected_total", "counter", "Requests over the limit of the queue (429).", self.rejected),
            ("disconnected_total", "counter", "Clients that left before their answer ended.", self.disconnected),
            ("prompt_tokens_total", "counter", "Tokens of prompts, for each answer.", self.prompt_tokens),
            ("generated_tokens_total", "counter", "Tokens generated.", self.generated_tokens),
            ("resident_bytes", "gauge", "Memory of the server.", resident_bytes()),
        ):
            add(name, kind, meaning, [f"{name} {value}"])
        first, whole = "time_to_first_token_seconds", "request_seconds"
        add(first, "histogram", "From request to first token.", self.first_token_seconds.lines(first))
        add(whole, "histogram", "From request to end of answer.", self.request_seconds.lines(whole))
        return "\n".join(lines) + "\n"


def resident_bytes() -> int:
    """The memory that this process occupies now."""
    return int(Path("/proc/self/statm").read_bytes().split()[1]) * resource.getpagesize()
