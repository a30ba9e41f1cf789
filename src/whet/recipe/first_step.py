"""From the start of the process to the end of the first step: how long, and on what."""

from __future__ import annotations

import os
import time
from pathlib import Path

_NAMES = {
    "import_s": "imports", "prepare_s": "data", "load_s": "model", "measure_s": "measuring", "step_s": "the step",
}  # fmt: skip
_told = False


class FirstStep:
    """A watch whose parts follow on each other without a gap, so that they add up to the whole."""

    def __init__(self) -> None:
        """Counts from the start of the process; in a process that has trained already, from now."""
        global _told
        self._began = self._last = time.monotonic() - (0.0 if _told else _age())
        self._parts = dict.fromkeys(_NAMES, 0.0)
        self.is_done = False
        _told = True

    def ends(self, part: str) -> None:
        """All time since the last part ended was this part's."""
        now = time.monotonic()
        self._parts[part] += now - self._last
        self._last = now

    def done(self) -> dict[str, float]:
        """The first step is done: the seconds until then, and their parts."""
        self.ends("step_s")
        self.is_done = True
        return {"first_step_s": self._last - self._began, **self._parts}


def _age() -> float:
    """Seconds that this process has lived; 0 where the system does not tell."""
    try:
        started = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19]) / os.sysconf("SC_CLK_TCK")
        return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - started)
    except (OSError, ValueError, IndexError, AttributeError):
        return 0.0


def sentence(seconds: dict[str, float]) -> str:
    """For the console; parts that took no time are left out."""
    parts = [f"{seconds[key]:.1f} s {name}" for key, name in _NAMES.items() if seconds[key] >= 0.05]
    return f"first step after {seconds['first_step_s']:.1f} s: {', '.join(parts)}"
