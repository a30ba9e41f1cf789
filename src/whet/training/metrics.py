"""Metrics of a step: its times, its line in metrics.jsonl, and what the progress line shows of it."""

from __future__ import annotations

import math
import os
import resource
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from whet.core.costs import format_estimate
from whet.data.loader import StepTotals
from whet.model.experts.routing import StepLoad
from whet.model.flops import StepFlops
from whet.training.step import StepResult

# Times: how long each step takes, and how long a process takes to its first step.


class StepTime(NamedTuple):
    """How long a step took."""

    seconds: float
    ended_ago_s: float
    """Seconds since it ended."""
    is_steady: bool = True
    """False if kernels were compiled or graphs captured meanwhile: the time is not representative."""


class StepTimer:
    """Times steps that may overlap. A step ends when its numbers have left the device.

    While the host launches the next step it notices that end late. By its clock, steps before a pause would be too
    short and steps after it too long; the device's events give the time between the ends of two steps.
    """

    def __init__(self, by_device: bool) -> None:
        """`by_device`: steps may overlap, on CUDA; otherwise the host's clock serves."""
        self._by_device = by_device
        self._event: torch.cuda.Event | None = None
        self._since = 0.0

    def start(self) -> None:
        """Start a step while the device is idle."""
        if self._by_device:
            self._event = torch.cuda.Event(enable_timing=True)
            self._event.record()
            self._event.synchronize()
        self._since = time.perf_counter()

    def stop(self, copied: torch.cuda.Event | None, is_steady: bool = True) -> StepTime:
        """The time since the start, or since the last step ended; `copied`: when the device had copied the numbers."""
        now = time.perf_counter()
        if self._event is None or copied is None:
            return StepTime(now - self._since, 0.0, is_steady)
        seconds = self._event.elapsed_time(copied) / 1000
        self._event, self._since = copied, min(now, self._since + seconds)  # two clocks may drift apart
        return StepTime(seconds, now - self._since, is_steady)


_PHASE_LABELS = {
    "import_s": "imports", "prepare_s": "data", "load_s": "model", "fit_s": "worst batch",
    "measure_s": "evaluation", "step_s": "the step",
}  # fmt: skip
_has_run_before = False


class StartupTimer:
    """Seconds from the start of the process to the end of its first step, by phases that add up to the whole."""

    def __init__(self) -> None:
        """Counts from the start of the process; in a process that has trained before, from now."""
        global _has_run_before
        self._began = self._last = time.monotonic() - (0.0 if _has_run_before else _process_age())
        self._phases = dict.fromkeys(_PHASE_LABELS, 0.0)
        self.is_done = False
        _has_run_before = True

    def end_phase(self, phase: str) -> None:
        """Add the time since the last phase ended to this one."""
        now = time.monotonic()
        self._phases[phase] += now - self._last
        self._last = now

    def finish(self) -> dict[str, float]:
        """The seconds up to the end of the first step, in total and by phase."""
        self.end_phase("step_s")
        self.is_done = True
        return {"first_step_s": self._last - self._began, **self._phases}


def startup_summary(seconds: dict[str, float], steps_left: int = 0) -> str:
    """For the console, without phases that took no time. `steps_left`: how many steps will take as long as the first;
    0 where it compiled."""
    phases = [f"{seconds[key]:.1f} s {label}" for key, label in _PHASE_LABELS.items() if seconds[key] >= 0.05]
    text = f"first step after {seconds['first_step_s']:.1f} s" + (f": {', '.join(phases)}" if phases else "")
    left = format_estimate(steps_left * seconds["step_s"])
    return f"{text}; about {left} for the {steps_left:,} to come" if steps_left else text


def _process_age() -> float:
    """Seconds since this process started; 0 where the system does not tell."""
    try:
        started = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19]) / os.sysconf("SC_CLK_TCK")
        return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - started)
    except (OSError, ValueError, IndexError, AttributeError):
        return 0.0


@dataclass(frozen=True, slots=True)
class RunTotals:
    """What a run has processed so far, over all ranks. The names are keys of metrics.jsonl and of checkpoints."""

    conversations: int = 0
    tokens: int = 0
    supervised_tokens: int = 0
    flops: int = 0

    def add(self, totals: StepTotals, flops: StepFlops) -> RunTotals:
        return RunTotals(
            self.conversations + totals.conversations,
            self.tokens + totals.tokens,
            self.supervised_tokens + totals.supervised,
            self.flops + flops.for_documents(totals.lengths, totals.supervised),
        )


@dataclass(frozen=True, slots=True)
class StepSpeed:
    """The speed of a step; None for all of it where its time is not representative."""

    time: StepTime
    flops: int
    """Of this step, over all ranks."""
    peak_flops: float | None
    """Per second, of all devices together; None if unknown."""

    def rate(self, count: float) -> float | None:
        """`count` per second."""
        return count / self.time.seconds if self.time.is_steady else None

    @property
    def mfu(self) -> float | None:
        """Model FLOPs utilisation: the FLOPs of the model, without recomputation, ÷ the devices' peak."""
        is_known = self.time.is_steady and self.peak_flops
        return self.flops / (self.time.seconds * self.peak_flops) if is_known and self.peak_flops else None


def step_metrics(
    step: int, result: StepResult, rates: dict[str, float], totals: RunTotals, batch: StepTotals, per_epoch: int,
    speed: StepSpeed, device: torch.device,
) -> dict[str, Any]:  # fmt: skip
    """The line of a step, counted from 1: `totals` are cumulative, all else is of this step alone."""
    return {
        "time": time.time() - speed.time.ended_ago_s,
        "step": step,
        "epoch": totals.conversations / per_epoch,
        "loss": finite_or_none(result.loss),
        "accuracy": finite_or_none(result.accuracy),
        "grad_norm": finite_or_none(result.grad_norm),
        **({} if math.isnan(result.router_aux_loss) else {"router_aux_loss": result.router_aux_loss}),
        **_load_metrics(result.expert_load),
        **rates,
        **asdict(totals),
        "tokens_per_s": speed.rate(batch.tokens),
        "supervised_per_s": speed.rate(batch.supervised),
        "conversations_per_s": speed.rate(batch.conversations),
        "mfu": speed.mfu,
        "peak_gib": peak_gib(device),
        "step_s": speed.time.seconds,
        "data_s": result.data_s,
    }


def _load_metrics(load: StepLoad | None) -> dict[str, Any]:
    return {} if load is None else {"expert_load_max": load.max_load, "experts_idle": int(load.idle)}


def excluded_step_metrics(
    step: int, rates: dict[str, float], totals: RunTotals, per_epoch: int, device: torch.device
) -> dict[str, Any]:
    """The line of a step that a rollback excluded: it counts, but nothing was computed."""
    return {
        "time": time.time(),
        "step": step,
        "epoch": totals.conversations / per_epoch,
        **dict.fromkeys(("loss", "accuracy", "grad_norm")),
        **rates,
        **asdict(totals),
        **dict.fromkeys(("tokens_per_s", "supervised_per_s", "conversations_per_s", "mfu")),
        "peak_gib": peak_gib(device),
        "step_s": 0.0,
        "data_s": 0.0,
        "skipped": "passed over",
    }


_BETA = 0.9


class ExponentialAverage:
    """An exponential moving average, unbiased from the first value on.

    The plain average starts at 0, so after n values only a share 1 − βⁿ of it is data. Dividing by that share makes
    the first output the first value. A missing or non-finite value adds no data and does not count.
    """

    def __init__(self) -> None:
        self._sum, self._count = 0.0, 0

    def add(self, value: float | None) -> float:
        """Add a value and return the average; NaN before the first finite value."""
        if value is not None and math.isfinite(value):
            self._sum = _BETA * self._sum + (1 - _BETA) * value
            self._count += 1
        return self._sum / (1 - _BETA**self._count) if self._count else math.nan


class ProgressMeans:
    """Running means for the progress line: one step says little, and the last of an epoch may be a short one."""

    def __init__(self) -> None:
        self._means = {key: ExponentialAverage() for key in ("loss", "tokens_per_s", "mfu")}

    def add(self, line: dict[str, Any]) -> dict[str, Any]:
        """The line of a step with `mean_loss`, and with means as its speeds; None for what was never measured."""
        means = {key: finite_or_none(mean.add(line[key])) for key, mean in self._means.items()}
        return line | means | {"loss": line["loss"], "mean_loss": means["loss"]}


def progress_note(line: dict[str, Any]) -> str:
    """What the progress line of a log shows after a step, from a line with means."""
    parts = ["loss not measured" if line["mean_loss"] is None else f"mean loss {line['mean_loss']:.4f}"]
    if line.get("skipped"):
        parts.append("skipped")
    if line["tokens_per_s"] is not None:
        parts.append(f"{line['tokens_per_s']:,.0f} tokens/s")
    if line["mfu"] is not None:
        parts.append(f"mfu {line['mfu']:.1%}")
    return " · ".join(parts)


def finite_or_none(value: float) -> float | None:
    """JSON has no NaN: a number that is not finite becomes null."""
    return value if math.isfinite(value) else None


def peak_gib(device: torch.device) -> float:
    """Peak memory so far: of the accelerator, or of this process on a CPU."""
    if device.type not in ("cpu", "mps"):  # a Mac's GPU shares the memory of its CPU
        return torch.accelerator.max_memory_allocated(device) / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
