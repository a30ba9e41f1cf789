"""The newest and the best numbers in metrics.jsonl, without parsing all of its lines: a list has a thousand runs."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

from whet.core.files import parse_json_line
from whet.report.formatting import finite_number

_NUMBER = re.compile(rb": (-?\d+\.?\d*(?:[eE][-+]?\d+)?)[,}]")
_END_BYTES = 2**16


@dataclass
class MetricsTail:
    """Where a run stands. Lines that cannot be read are left out; `whet runs show` names them."""

    content: bytes
    is_whole: bool = True
    """False: these are the last lines, without the best values of earlier ones."""

    @classmethod
    def read(cls, file: Path, only_end: bool = False) -> MetricsTail:
        """Of a file that may be missing; `only_end`: its last 64 KiB, however long it is."""
        try:
            with file.open("rb") as opened:
                size = os.fstat(opened.fileno()).st_size
                start = max(0, size - _END_BYTES) if only_end else 0
                opened.seek(start)
                return cls(opened.read(), start == 0)
        except OSError:
            return cls(b"")

    @cached_property
    def last_step(self) -> dict[str, Any]:
        """The line of the last step; empty before the first."""
        is_step = (line for line in self._from_the_end() if "loss" in line and isinstance(line.get("step"), int))
        return next(is_step, {})

    @property
    def step(self) -> int | None:
        return self.last_step.get("step")

    @property
    def loss(self) -> float | None:
        return finite_number(self.last_step.get("loss"))

    @property
    def tokens_per_s(self) -> float | None:
        return finite_number(self.last_step.get("tokens_per_s"))

    @property
    def tokens(self) -> int | None:
        """All that were trained on so far."""
        tokens = self.last_step.get("tokens")
        return tokens if isinstance(tokens, int) and not isinstance(tokens, bool) else None

    def best(self, metric: str, lower_is_better: bool) -> float | None:
        """The best value of a metric in all lines; None if not all were read."""
        if not self.is_whole:
            return None
        key, values, place = json.dumps(metric, ensure_ascii=False).encode("utf-8", "surrogatepass"), list[float](), -1
        while (place := self.content.find(key, place + 1)) >= 0:  # ten times as fast as a pattern over all lines
            found = _NUMBER.match(self.content, place + len(key))
            value = None if found is None else finite_number(float(found[1]))
            values += [] if value is None else [value]
        return (min if lower_is_better else max)(values, default=None)

    def longest_gap_s(self) -> float:
        """The longest time between two of the last hundred lines: evaluations and slow steps are in it."""
        lines = islice(self._from_the_end(), 100)
        times = [moment for line in lines if (moment := finite_number(line.get("time"))) is not None]
        return max((later - earlier for later, earlier in pairwise(times)), default=0.0)

    def _from_the_end(self) -> Iterator[dict[str, Any]]:
        end = self.content.rfind(b"\n") + 1
        while end > 0:
            start = self.content.rfind(b"\n", 0, end - 1) + 1
            line = parse_json_line(self.content[start:end])
            if line is not None:
                yield line
            end = start
