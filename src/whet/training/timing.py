"""Times of a run: how long each step takes, and how long a process takes to its first step."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import NamedTuple

import torch


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


def startup_summary(seconds: dict[str, float]) -> str:
    """For the console, without phases that took no time."""
    phases = [f"{seconds[key]:.1f} s {label}" for key, label in _PHASE_LABELS.items() if seconds[key] >= 0.05]
    return f"first step after {seconds['first_step_s']:.1f} s: {', '.join(phases)}"


def _process_age() -> float:
    """Seconds since this process started; 0 where the system does not tell."""
    try:
        started = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19]) / os.sysconf("SC_CLK_TCK")
        return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - started)
    except (OSError, ValueError, IndexError, AttributeError):
        return 0.0
