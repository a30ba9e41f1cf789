"""Which learning rate a run should have, from short probes that all start at one checkpoint.

A probe is the run in miniature: the whole schedule, warm-up and decay included, in a fraction of the steps. Cutting the
full schedule short would compare rates in their warm-up, and before the decay that high rates need. Rates are compared
pairwise on the same validation conversations, because conversations differ from each other more than rates do.

First a ladder of rates at half-decade steps, each for 1/50 of the run, extended until its best is not at an end and its
lowest learns less than half as much. It says where to look. Then four rates for 1/14 of the run, each half of the one
before: two that learn about as much as any, and two around the half-learning rate.

Which probe is the best, chance would decide: near the best rate and above, losses of probes differ by 5 to 10 % between
rates that are equally good. Where rates are too low, losses rise smoothly, the same for every seed. So the proposal is
a multiple of the half-learning rate: that with which a probe learns half as much as with the best rate. There the curve
is steepest, and the luck of the best probe hardly moves it.

Six settings gave that law: the tiny model on the four built-in tasks, with a quarter of the batch, and a model with 6
times the weights, one seed each, 320 steps. In each, its rate is within 2 % of the loss of the best rate, by a smooth
curve through five or six whole runs (2026-11-17). docs/search.md has what it gave on other seeds.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from whet.evaluation.statistics import PairedDifference, paired_loss_difference

if TYPE_CHECKING:
    from numpy.typing import NDArray

MIN_STEPS = 28
"""Of a run with two steps in its long probes."""
_SHORT, _LONG = 50, 14
_LADDER_STEP = math.sqrt(10)
_MAX_RATES, _MAX_LONG = 16, 6
_SIGNIFICANCE = 0.01
"""Stricter than usual: about ten pairs are compared."""
_MATERIAL, _MATERIAL_NATS = 0.01, 0.002
"""Of the loss, and per token: rates whose losses differ by less are equally good."""
_UNTOUCHED = 0.001
"""Of the loss: a rate that changes it by less is too low; lower ones need no probe."""


@dataclass(frozen=True, slots=True)
class Probe:
    """A rate, trained for some steps."""

    lr: float
    steps: int
    tokens: int
    """Trained on."""
    nats: NDArray[np.float64] | None
    """The summed loss of each validation conversation; None: it diverged."""


class Comparison(NamedTuple):
    """A probe beside the best one of the same length."""

    probe: Probe
    loss: float | None
    """Per token; None: it diverged."""
    difference: PairedDifference | None
    """Its loss − that of the best; None for the best itself and for rates that diverged."""


@dataclass(frozen=True, slots=True)
class LearningRateResult:
    """What the probes say."""

    lr: float | None
    """The proposal; None: cannot tell."""
    reason: str
    comparisons: tuple[Comparison, ...]
    """By number of steps, then by rate."""


@dataclass(frozen=True, slots=True)
class ValidationBaseline:
    """The validation conversations, and the model that all probes start from."""

    tokens: NDArray[np.int64]
    """Supervised ones of each conversation."""
    nats: NDArray[np.float64]
    """Its summed losses before training."""

    def loss(self, probe: Probe) -> float:
        """Per token. A rate that diverged, or ends worse than it began, counts as having learned nothing."""
        return self.before if probe.nats is None else min(self.before, float(probe.nats.sum() / self.tokens.sum()))

    @property
    def before(self) -> float:
        return float(self.nats.sum() / self.tokens.sum())

    def has_effect(self, probe: Probe) -> bool:
        """Whether training with this rate changed the model noticeably."""
        if probe.nats is None:
            return True
        return abs(float(probe.nats.sum() - self.nats.sum())) > _UNTOUCHED * float(self.nats.sum())

    @property
    def material(self) -> float:
        """A difference between losses that matters."""
        return max(_MATERIAL * self.before, _MATERIAL_NATS)

    def is_worse(self, one: Probe | None, other: Probe, by: float = 0.0) -> bool:
        """Whether the loss of `one` (None: of the untrained model) is significantly higher than that of `other`, and
        higher by so much."""
        if other.nats is None:
            return False
        if one is not None and one.nats is None:
            return True
        nats = self.nats if one is None else one.nats
        assert nats is not None
        found = paired_loss_difference(nats, other.nats, self.tokens)
        return found.p < _SIGNIFICANCE and found.mean > by


def horizons(steps: int) -> tuple[int, int]:
    """The steps of the short and of the long probes for a run of `steps`."""
    return max(1, steps // _SHORT), max(2, steps // _LONG)


def find_learning_rate(
    measure: Callable[[float, int], Probe], validation: ValidationBaseline, steps: int, start: float,
    limits: tuple[float, float] = (1e-9, 10.0),
) -> LearningRateResult:  # fmt: skip
    """Choose rates for probes around `start`, measure them, and propose one for a run of `steps`, within `limits`."""
    short, long = horizons(steps)
    measure = functools.cache(measure)
    ladder = _climb(measure, validation, short, start, limits)
    if _is_flat(ladder, validation):  # perhaps nothing was learned yet
        ladder, short = _climb(measure, validation, long, start, limits), long
        if _is_flat(ladder, validation):
            return LearningRateResult(None, _why_flat(ladder, validation), _compare(ladder, validation))
    first, near = _best_rate(ladder, validation), ladder
    if short < long:
        near = _descend(measure, validation, long, 6 * first * _half_in_short_runs(long), limits)
    best, half = _best_rate(near, validation), _half_learning_rate(near, validation)
    lr = _clip(float(f"{best:.2g}"), limits)
    learns = f"even {near[0].lr:.2g} learns more than half as much" if half is None else f"{half:.2g} half as much"
    reason = (
        f"{_describe_probes(near, validation)}, and {learns}. The best rate of {steps} steps is then about {best:.2g}"
    )
    if short < long:
        reason += f"; the shorter probes say {first:.2g}"
    if lr in limits:
        reason += f". {lr:.2g} is an end of the range {limits[0]:.2g} to {limits[1]:.2g}: better rates may be outside"
    every = {(probe.lr, probe.steps): probe for probe in (*ladder, *near)}
    return LearningRateResult(lr, reason, _compare(list(every.values()), validation))


def _best_rate(probes: list[Probe], validation: ValidationBaseline) -> float:
    """The best rate of the whole run, from probes of one length. Where even the lowest allowed rate learns more than
    half as much as the best probe, the rate of that probe is all that is known."""
    half = _half_learning_rate(probes, validation)
    return min(probes, key=validation.loss).lr if half is None else half / _half_in_short_runs(probes[0].steps)


def _half_in_short_runs(steps: int) -> float:
    """The half-learning rate of so many steps ÷ the best rate of a long run.

    The fewer the steps, the higher the rate that moves the weights far enough. The best rate hardly depends on them:
    for 100, 320 and 1,000 steps of the tiny model it is the same within a factor 2. Measured, in the settings above:
    0.30 to 0.76 after 6 steps, 0.11 to 0.26 after 22. The constants minimise the largest excess loss among them."""
    return (1 + 42 / steps) / 20


def _climb(
    measure: Callable[[float, int], Probe], validation: ValidationBaseline, steps: int, start: float,
    limits: tuple[float, float],
) -> list[Probe]:  # fmt: skip
    """Five probes at half-decade steps around `start`, and further ones until the best is not at an end and the lowest
    learns less than half as much."""
    probes = _measure_around(measure, steps, start, limits, 2)

    def add(index: int) -> bool:
        lr = _clip(start * _LADDER_STEP**index, limits)
        if len(probes) >= _MAX_RATES or any(math.isclose(lr, probe.lr) for probe in probes):
            return False
        probes.append(measure(lr, steps))
        probes.sort(key=lambda probe: probe.lr)
        return True

    low = high = 2
    while True:
        losses = [validation.loss(probe) for probe in probes]
        best = losses.index(min(losses))
        rises = best == len(probes) - 1 > 0 and validation.is_worse(probes[-2], probes[-1])
        is_low_enough = _half_learning_rate(probes, validation) is not None or not validation.has_effect(probes[0])
        if not is_low_enough and add(-low - 1):
            low += 1
        elif (rises or not validation.has_effect(probes[-1])) and add(high + 1):
            high += 1
        else:
            return probes


def _measure_around(
    measure: Callable[[float, int], Probe], steps: int, middle: float, limits: tuple[float, float], reach: int
) -> list[Probe]:
    """Probes up to `reach` half-decade steps below and above a rate."""
    lrs = {_clip(middle * _LADDER_STEP**index, limits) for index in range(-reach, reach + 1)}
    return [measure(lr, steps) for lr in sorted(lrs)]


def _is_flat(probes: list[Probe], validation: ValidationBaseline) -> bool:
    """Whether the best rate is hardly better than the untrained model, or than every rate that did not diverge."""
    best = min(probes, key=validation.loss)
    others = [probe for probe in probes if probe.nats is not None and probe is not best]
    learns = validation.is_worse(None, best, validation.material)
    return not (learns and any(validation.is_worse(probe, best, validation.material) for probe in others))


def _descend(
    measure: Callable[[float, int], Probe], validation: ValidationBaseline, steps: int, start: float,
    limits: tuple[float, float],
) -> list[Probe]:  # fmt: skip
    """Probes at `start`, its half, its quarter and so on, until one learns less than half as much as the best."""
    probes: list[Probe] = []
    for count in range(_MAX_LONG):
        lr = _clip(start / 2**count, limits)
        if probes and (lr == probes[0].lr or _half_learning_rate(probes, validation) is not None):
            break
        probes.insert(0, measure(lr, steps))
    return probes


def _half_learning_rate(probes: list[Probe], validation: ValidationBaseline) -> float | None:
    """The rate with which a probe learns half as much as the best one; None if the lowest learns more. Between probes,
    the loss lies on a line over the logarithm of the rate."""
    heights = [validation.loss(probe) for probe in probes]
    best = min(heights)
    half = (best + validation.before) / 2
    index = heights.index(best)
    while index > 0 and heights[index - 1] <= half:
        index -= 1
    if index == 0:
        return None
    low, high = probes[index - 1].lr, probes[index].lr
    share = (heights[index - 1] - half) / (heights[index - 1] - heights[index])
    return float(low * (high / low) ** share)


def _clip(lr: float, limits: tuple[float, float]) -> float:
    return min(limits[1], max(limits[0], lr))


def _compare(probes: list[Probe], validation: ValidationBaseline) -> tuple[Comparison, ...]:
    compared = []
    for steps in sorted({probe.steps for probe in probes}):
        alike = sorted((probe for probe in probes if probe.steps == steps), key=lambda probe: probe.lr)
        best = min(alike, key=validation.loss)
        for probe in alike:
            difference = None
            if probe.nats is not None and best.nats is not None and probe is not best:
                difference = paired_loss_difference(probe.nats, best.nats, validation.tokens)
            loss = None if probe.nats is None else float(probe.nats.sum() / validation.tokens.sum())
            compared.append(Comparison(probe, loss, difference))
    return tuple(compared)


# The reason, in words.


def _describe_probes(near: list[Probe], validation: ValidationBaseline) -> str:
    best = min(near, key=validation.loss)
    others = []
    for probe in near:
        if probe is best:
            continue
        if probe.nats is None:
            others.append(f"{probe.lr:.2g} diverges")
        else:
            worse = validation.is_worse(probe, best)
            share = validation.loss(probe) / validation.loss(best) - 1
            others.append(f"{probe.lr:.2g} is {share:.1%} worse" + ("" if worse else ", which may be chance"))
    return f"after {best.steps} steps, {best.lr:.2g} is the best probe" + (f" ({'; '.join(others)})" if others else "")


def _why_flat(probes: list[Probe], validation: ValidationBaseline) -> str:
    lrs = f"{probes[0].lr:.2g} to {probes[-1].lr:.2g}"
    best = min(probes, key=validation.loss)
    gain = validation.before - validation.loss(best)
    if not validation.is_worse(None, best, validation.material):
        found = f"in {best.steps} steps no rate from {lrs} lowers the validation loss ({validation.before:.4g}) "
        found += (
            f"by more than {validation.material:.2g}" if gain < validation.material else "by more than chance would"
        )
    else:
        found = f"after {best.steps} steps the rates from {lrs} that do not diverge are equally good"
    count = len(validation.tokens)
    return f"{found}, measured on {count} conversations" + ("; give more of them" if count < 50 else "")
