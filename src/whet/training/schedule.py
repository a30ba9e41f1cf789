"""The learning-rate schedule, as a pure function of the position in the run."""

from __future__ import annotations

import math
from dataclasses import dataclass

from whet.data.plan.planner import Plan
from whet.training.config import ScheduleConfig
from whet.training.metrics import RunTotals


@dataclass(frozen=True, slots=True)
class Position:
    """A position in a run, in each unit of train.schedule.by."""

    step: int
    epoch: float
    conversation: int
    token: int

    def in_units_of(self, schedule: ScheduleConfig) -> float:
        """The position in the unit of this schedule."""
        return float(getattr(self, schedule.by))


def end_position(plan: Plan) -> Position:
    """The end of a run."""
    conversations = len(plan.documents)
    return Position(len(plan), conversations / plan.stats.per_epoch, conversations, plan.stats.tokens)


def step_lr_factor(plan: Plan, schedule: ScheduleConfig, step: int, before: RunTotals, after: RunTotals) -> float:
    """The factor of the peak learning rate in the step after `step` finished ones, which leads from `before` to
    `after`."""
    at, then = (
        Position(number, totals.conversations / plan.stats.per_epoch, totals.conversations, totals.tokens)
        for number, totals in ((step - plan.step_offset, before), (step - plan.step_offset + 1, after))
    )
    end = end_position(plan).in_units_of(schedule)
    return lr_factor(at.in_units_of(schedule), then.in_units_of(schedule), end, schedule)


def lr_factor(before: float, after: float, whole: float, schedule: ScheduleConfig) -> float:
    """The factor of the peak learning rate in the step from `before` to `after`, in a run that ends at `whole`; all
    three in the schedule's unit.

    Warm-up rises linearly from init_frac and reaches 1 in its last step. The first decaying step of linear and cosine
    is still at 1; that of wsd, which follows constant steps, is below: of N equal steps, the k-th is (k − 1)/N of the
    way down, and k/(N + 1) with wsd. All reach min_frac one step after the last: no step is wasted at a rate of zero.
    """
    warmup = _units(schedule.warmup, whole, schedule)
    if before < warmup:
        return schedule.init_frac + (1 - schedule.init_frac) * min(after, warmup) / warmup
    if schedule.name == "constant":
        return 1.0
    if schedule.name == "wsd":
        decay_start = max(warmup, whole - _units(schedule.decay, whole, schedule))
        if before < decay_start:
            return 1.0
        progress = (after - decay_start) / (whole + (after - before) - decay_start)
    else:
        progress = (before - warmup) / (whole - warmup)
    height = (1 + math.cos(math.pi * progress)) / 2 if schedule.name == "cosine" else 1 - progress
    return schedule.min_frac + (1 - schedule.min_frac) * height


def warmup_fills_run(whole: float, schedule: ScheduleConfig) -> bool:
    """Whether the warm-up takes the whole run, so that the learning rate may never reach its peak."""
    return schedule.name != "constant" and _units(schedule.warmup, whole, schedule) >= whole > 1


def in_fractions(schedule: ScheduleConfig, whole: float) -> ScheduleConfig:
    """The same shape for a run of any length: warm-up and decay as fractions of the run that ends at `whole`."""
    lengths = {key: min(1.0, _units(getattr(schedule, key), whole, schedule) / whole) for key in ("warmup", "decay")}
    return schedule.model_copy(update={**lengths, "by": "step"})


def _units(given: int | float, whole: float, schedule: ScheduleConfig) -> float:
    """Integers and epochs are in the schedule's unit; other fractions are fractions of the run."""
    return given if isinstance(given, int) or schedule.by == "epoch" else round(given * whole)
