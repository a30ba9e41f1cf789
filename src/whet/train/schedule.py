"""The learning rate of each step, as a pure function."""

from __future__ import annotations

import math

from whet.train.config import ScheduleConfig


def rate_factor(step: int, steps: int, schedule: ScheduleConfig) -> float:
    """What the highest rate is multiplied by in step `step` (from 0) of `steps`.

    Warm-up rises linearly from init_frac and reaches 1 with its last step; the fall reaches min_frac one step after
    the run's last, so that no step is wasted at rate zero.
    """
    warmup = _steps(schedule.warmup, steps)
    if step < warmup:
        return schedule.init_frac + (1 - schedule.init_frac) * (step + 1) / warmup
    if schedule.name == "constant":
        return 1.0
    falling_from = warmup
    if schedule.name == "wsd":
        falling_from = max(warmup, steps - _steps(schedule.decay, steps))
        if step < falling_from:
            return 1.0
    progress = (step - falling_from) / max(1, steps - falling_from)
    height = (1 + math.cos(math.pi * progress)) / 2 if schedule.name == "cosine" else 1 - progress
    return schedule.min_frac + (1 - schedule.min_frac) * height


def _steps(given: int | float, steps: int) -> int:
    """Whole numbers are steps; fractions are parts of the run."""
    return given if isinstance(given, int) else round(given * steps)
