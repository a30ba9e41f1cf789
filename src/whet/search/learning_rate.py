"""Which learning rate a run should have, from short probes that all start at one checkpoint.

A probe is the run in miniature: the whole schedule, warm-up and decay included, in a fraction of the steps. Cutting the
full schedule short would compare rates in their warm-up, and before the decay that high rates need. Rates are compared
pairwise on the same validation conversations, because conversations differ from each other more than rates do.

First a ladder of rates at half-decade steps, each for 1/50 of the run, extended until its best is not at an end. It
says where to look: the whole run wants about a third of the ladder's best rate, or less if these were very few steps.

Then three rates for 1/14 of the run, where they are about to become too low. Which rate is the best, chance would
decide: near and above it, losses differ by 10 % between seeds. Where rates are too low, losses rise smoothly and hardly
differ. So the proposal is a multiple of the edge, the rate below which a probe loses more than a tenth of what the best
one has learned. The edge falls with the number of steps. The best rate hardly does: for 100, 320 and 1,000 steps of the
tiny model it was the same within a factor 2.

The constants were chosen on the four built-in tasks with three seeds, 320 steps: with them, proposals from five
starting points had a loss of 1.4 % above the best of a grid on average; 2 of 60 were above 5 %. A single run is no more
certain: rates that differ by 5 % give losses that differ by up to 10 % (2026-11-17).
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
_MAX_RATES, _MAX_LONG = 16, 4
_LOST = 0.1
"""Of what the best probe has learned: a probe at the edge loses so much."""
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
class Finding:
    """What the probes say."""

    lr: float | None
    """The proposal; None: cannot tell."""
    reason: str
    comparisons: tuple[Comparison, ...]
    """By number of steps, then by rate."""


@dataclass(frozen=True, slots=True)
class Validation:
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
    measure: Callable[[float, int], Probe], validation: Validation, steps: int, start: float,
    limits: tuple[float, float] = (1e-9, 10.0),
) -> Finding:  # fmt: skip
    """Choose rates for probes around `start`, measure them, and propose one for a run of `steps`, within `limits`."""
    short, long = horizons(steps)
    measure = functools.cache(measure)
    ladder = _climb(measure, validation, short, start, limits)
    if _is_flat(ladder, validation):  # perhaps nothing was learned yet
        ladder, short = _climb(measure, validation, long, start, limits), long
        if _is_flat(ladder, validation):
            return Finding(None, _why_flat(ladder, validation), _compare(ladder, validation))
    lowest, near = _lowest_point(ladder, validation, limits), ladder
    from_lowest = lowest / _lowest_in_short_runs(short)
    if short < long:
        near = _descend(measure, validation, long, 2 * from_lowest * _edge_in_short_runs(long), limits)
    edge = _find_edge(near, validation)
    if edge is None:
        best, loses = from_lowest, f"even {near[0].lr:.2g} loses less"
    else:
        best, loses = edge / _edge_in_short_runs(long), f"rates below {edge:.2g} lose more"
    lr = _clip(_round(best), limits)
    reason = (
        f"{_describe_probes(near, validation)}, and {loses} than a tenth of what it has learned. The best rate of "
        f"{steps} steps is then about {best:.2g}; the shorter probes, of which {lowest:.2g} is the best, say "
        f"{from_lowest:.2g}"
    )
    if lr in limits:
        reason += f". {lr:.2g} is an end of the range {limits[0]:.2g} to {limits[1]:.2g}: better rates may be outside"
    every = {(probe.lr, probe.steps): probe for probe in (*ladder, *near)}
    return Finding(lr, reason, _compare(list(every.values()), validation))


def _lowest_in_short_runs(steps: int) -> float:
    """The best rate of probes of so many steps ÷ that of a long run. Measured: 7 after 2 steps, 3 after 6 to 20."""
    return max(3.0, 14 / steps)


def _edge_in_short_runs(steps: int) -> float:
    """The edge of probes of so many steps ÷ the best rate of a long run. Measured: 3.4 to 4.3 after 2 steps, 1.1 to 1.3
    after 7, 0.43 to 0.56 after 24, 0.23 to 0.31 after 90."""
    return max(0.3, 0.16 * (1 + 40 / steps))


def _climb(
    measure: Callable[[float, int], Probe], validation: Validation, steps: int, start: float,
    limits: tuple[float, float],
) -> list[Probe]:  # fmt: skip
    """Five probes at half-decade steps around `start`, and further ones until the best is not at an end."""
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
        if best == 0 and validation.has_effect(probes[0]) and add(-low - 1):
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


def _is_flat(probes: list[Probe], validation: Validation) -> bool:
    """Whether the best rate is hardly better than the untrained model, or than every rate that did not diverge."""
    best = min(probes, key=validation.loss)
    others = [probe for probe in probes if probe.nats is not None and probe is not best]
    learns = validation.is_worse(None, best, validation.material)
    return not (learns and any(validation.is_worse(probe, best, validation.material) for probe in others))


def _lowest_point(probes: list[Probe], validation: Validation, limits: tuple[float, float]) -> float:
    """The rate at the lowest point of the parabola through the best probe and its neighbours, over logarithms. Where
    the best probe is at a limit, that point is outside, at most a decade away."""
    rates = [math.log10(probe.lr) for probe in probes]
    heights = [math.log(max(validation.loss(probe), 1e-12)) for probe in probes]
    best = heights.index(min(heights))
    is_at_limit = probes[best].lr in limits
    if len(probes) < 3 or not (0 < best < len(probes) - 1 or is_at_limit):
        return probes[best].lr
    first = min(max(best - 1, 0), len(probes) - 3)
    bend, slope, _ = np.polyfit(rates[first : first + 3], heights[first : first + 3], 2)
    outwards = 1.0 if best else -1.0
    lowest = -slope / (2 * bend) if bend > 0 else rates[best] + is_at_limit * outwards
    return float(10 ** min(rates[best] + 1, max(rates[best] - 1, lowest)))


def _descend(
    measure: Callable[[float, int], Probe], validation: Validation, steps: int, start: float,
    limits: tuple[float, float],
) -> list[Probe]:  # fmt: skip
    """Probes at `start`, its half and its quarter, and further down until the lowest one is below the edge."""
    probes: list[Probe] = []
    for count in range(_MAX_LONG):
        lr = _clip(start / 2**count, limits)
        if (count >= 3 and _find_edge(probes, validation) is not None) or (probes and lr == probes[0].lr):
            break
        probes.insert(0, measure(lr, steps))
    return probes


def _find_edge(probes: list[Probe], validation: Validation) -> float | None:
    """The rate below which probes lose more than a tenth of what the best one has learned; None if the lowest does not.
    Between probes, the logarithms of rate and loss lie on a line."""
    heights = [validation.loss(probe) for probe in probes]
    best = min(heights)
    limit = best + _LOST * (validation.before - best)
    index = heights.index(best)
    while index > 0 and heights[index - 1] <= limit:
        index -= 1
    if index == 0:
        return None
    low, high = probes[index - 1].lr, probes[index].lr
    share = math.log(heights[index - 1] / limit) / math.log(heights[index - 1] / max(heights[index], 1e-12))
    return float(low * (high / low) ** share)


def _round(lr: float) -> float:
    """To 1, 2, 3, 5 or 7 times a power of ten: it is not known better than that."""
    power = math.floor(math.log10(lr))
    rounded = [float(f"{digit}e{power}") for digit in (1, 2, 3, 5, 7, 10)]
    return min(rounded, key=lambda each: abs(math.log(each / lr)))


def _clip(lr: float, limits: tuple[float, float]) -> float:
    return min(limits[1], max(limits[0], lr))


def _compare(probes: list[Probe], validation: Validation) -> tuple[Comparison, ...]:
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


def _describe_probes(near: list[Probe], validation: Validation) -> str:
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


def _why_flat(probes: list[Probe], validation: Validation) -> str:
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
