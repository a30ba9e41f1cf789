"""Step time, smoothed loss, and one line of metrics.jsonl for each step."""

from __future__ import annotations

import math
import resource
import time
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import torch

from whet.data.loader import StepTotals
from whet.model.flops import StepFlops
from whet.training.step import StepResult

# How long steps take, and when they end, also where they overlap on the host.


class StepTime(NamedTuple):
    """One step."""

    seconds: float
    ended_ago_s: float
    """Seconds since it ended."""


class StepTimer:
    """Steps end when their numbers have come from the device. If the host was busy then, asking for the next step, it
    sees them too late, by as much as that took: what it sees would make steps before a pause too short and those after
    it too long. The device knows the time between two steps' ends."""

    def __init__(self, by_device: bool) -> None:
        """`by_device`: steps may overlap, on CUDA; if not, the host knows all."""
        self._by_device = by_device
        self._event: torch.cuda.Event | None = None
        self._since = 0.0

    def start(self) -> None:
        """A step begins that has not begun before; the device has nothing else to do."""
        if self._by_device:
            self._event = torch.cuda.Event(enable_timing=True)
            self._event.record()
            self._event.synchronize()
        self._since = time.perf_counter()

    def stop(self, came: torch.cuda.Event | None) -> StepTime:
        """The step since the start, or since the last one's end; `came`: when the device had its numbers."""
        now = time.perf_counter()
        if self._event is None or came is None:
            return StepTime(now - self._since, 0.0)
        seconds = self._event.elapsed_time(came) / 1000
        self._event, self._since = came, min(now, self._since + seconds)  # two clocks may drift apart
        return StepTime(seconds, now - self._since)


# One line of `metrics.jsonl` for each step.


@dataclass(frozen=True, slots=True)
class RunTotals:
    """What a run has gone through so far, over all ranks."""

    conversations: int = 0
    tokens: int = 0
    supervised_tokens: int = 0
    flops: int = 0

    def add(self, totals: StepTotals, work: StepFlops) -> RunTotals:
        return RunTotals(
            self.conversations + totals.conversations,
            self.tokens + totals.tokens,
            self.supervised_tokens + totals.supervised,
            self.flops + work.for_documents(totals.lengths, totals.supervised),
        )


@dataclass(frozen=True, slots=True)
class StepSpeed:
    """How long a step took, and on what."""

    lap: StepTime
    flops: int
    """Of this step, over all ranks."""
    peak: float | None
    """FLOP/s that all devices could do together; None if not known."""
    warm: bool = True
    """False while kernels are being compiled: such a step's speed says nothing of the others'."""

    def rate(self, count: float) -> float | None:
        """So many a second."""
        return count / self.lap.seconds if self.warm else None

    @property
    def mfu(self) -> float | None:
        """The model's own arithmetic as a part of what the devices could do; what is recomputed does not count."""
        return self.flops / (self.lap.seconds * self.peak) if self.warm and self.peak else None


def step_metrics(
    step: int, result: StepResult, rates: dict[str, float], seen: RunTotals, totals: StepTotals, per_epoch: int,
    pace: StepSpeed, device: torch.device,
) -> dict[str, Any]:  # fmt: skip
    """`step` counts finished steps from 1; counts are cumulative, rates are of this step."""
    return {
        "time": time.time() - pace.lap.ended_ago_s,
        "step": step,
        "epoch": seen.conversations / per_epoch,
        "loss": finite_or_none(result.loss),
        "accuracy": finite_or_none(result.accuracy),
        "grad_norm": finite_or_none(result.grad_norm),
        **rates,
        **asdict(seen),
        "tokens_per_s": pace.rate(totals.tokens),
        "supervised_per_s": pace.rate(totals.supervised),
        "conversations_per_s": pace.rate(totals.conversations),
        "mfu": pace.mfu,
        "peak_gib": peak_gib(device),
        "step_s": pace.lap.seconds,
        "data_s": result.data_s,
    }


def skipped_step_metrics(
    step: int, rates: dict[str, float], seen: RunTotals, per_epoch: int, device: torch.device
) -> dict[str, Any]:
    """Of a step that a rollback left out: its counts move on, nothing was measured and it took no time."""
    return {
        "time": time.time(),
        "step": step,
        "epoch": seen.conversations / per_epoch,
        **dict.fromkeys(("loss", "accuracy", "grad_norm")),
        **rates,
        **asdict(seen),
        **dict.fromkeys(("tokens_per_s", "supervised_per_s", "conversations_per_s", "mfu")),
        "peak_gib": peak_gib(device),
        "step_s": 0.0,
        "data_s": 0.0,
        "skipped": "passed over",
    }


def progress_note(line: dict[str, Any], smoothed: float) -> str:
    """What the progress line says of a step; never a number that was not measured."""
    parts = ["loss not measured" if math.isnan(smoothed) else f"loss {smoothed:.4f}"]
    if line.get("skipped"):
        parts.append("skipped")
    if line["tokens_per_s"] is not None:
        parts.append(f"{line['tokens_per_s']:,.0f} tokens/s")
    if line["mfu"] is not None:
        parts.append(f"mfu {line['mfu']:.1%}")
    return " · ".join(parts)


def finite_or_none(value: float) -> float | None:
    """The number, or nothing: what is not finite was not measured and is not printed as if it were."""
    return value if math.isfinite(value) else None


def peak_gib(device: torch.device) -> float:
    """The most memory held so far: of the accelerator, or of this process on a CPU."""
    if device.type not in ("cpu", "mps"):  # on a Mac they share their memory
        return torch.accelerator.max_memory_allocated(device) / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
