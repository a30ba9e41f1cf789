"""Counters of a server, in the text format of Prometheus."""

from __future__ import annotations

import resource
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

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
