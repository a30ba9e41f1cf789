"""The learning rate of each step, as a pure function."""

from __future__ import annotations

import math
from dataclasses import dataclass

from whet.data.plan.planner import Plan
from whet.training.config import ScheduleConfig


@dataclass(frozen=True, slots=True)
class Position:
    """How far a run is, in each unit that a schedule may count in."""

    step: int
    epoch: float
    conversation: int
    token: int

    def in_units_of(self, schedule: ScheduleConfig) -> float:
        """In the unit of this schedule."""
        return float(getattr(self, schedule.by))


def end_position(plan: Plan) -> Position:
    """The end of a run."""
    conversations = len(plan.documents)
    return Position(len(plan), conversations / plan.stats.per_epoch, conversations, plan.stats.tokens)


def lr_factor(before: float, after: float, whole: float, schedule: ScheduleConfig) -> float:
    """What the highest rate is multiplied by in the step that leads from `before` to `after` in a run that ends at
    `whole`, all counted in the schedule's unit; in steps: `step`, `step + 1` and their number.

    Warm-up rises linearly from init_frac and reaches 1 with its last step; the fall reaches min_frac one step after
    the run's last, so that no step is wasted at rate zero.
    """
    warmup = _units(schedule.warmup, whole, schedule)
    if before < warmup:
        return schedule.init_frac + (1 - schedule.init_frac) * min(after, warmup) / warmup
    if schedule.name == "constant":
        return 1.0
    falling_from = warmup
    if schedule.name == "wsd":
        falling_from = max(warmup, whole - _units(schedule.decay, whole, schedule))
        if before < falling_from:
            return 1.0
    progress = (before - falling_from) / (whole - falling_from)
    height = (1 + math.cos(math.pi * progress)) / 2 if schedule.name == "cosine" else 1 - progress
    return schedule.min_frac + (1 - schedule.min_frac) * height


def warmup_fills_run(whole: float, schedule: ScheduleConfig) -> bool:
    """Whether the warm-up takes the whole run, so that the rate may not even reach its height."""
    return schedule.name != "constant" and _units(schedule.warmup, whole, schedule) >= whole > 1


def _units(given: int | float, whole: float, schedule: ScheduleConfig) -> float:
    """Whole numbers are units, and so is any number of epochs; other fractions are parts of the run."""
    return given if isinstance(given, int) or schedule.by == "epoch" else round(given * whole)
