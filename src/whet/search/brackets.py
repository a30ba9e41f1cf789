"""Adaptive ASHA: how many rungs and brackets a search has, and which trials continue at a rung. Pure functions.

A bracket is a search with successive halving of its own: its trials are compared at rungs, each `divisor` times as long
as the one before; of the trials at a rung, one in `divisor` continues. A bracket with more rungs begins with shorter
ones. Which rungs are best is unknown, so a search has several brackets and gives each about the same budget.
"""

from __future__ import annotations

import bisect
import random
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Bracket:
    """Trials that are compared with each other."""

    rungs: tuple[int, ...]
    """The length of a trial at each rung, in steps or tokens; the last is the whole trial."""
    trials: int


def make_brackets(length: int, max_trials: int, divisor: float, max_rungs: int, mode: str) -> list[Bracket]:
    """The brackets of a search, the one with most rungs first. `length`: of a whole trial, in steps or tokens."""
    rungs = min(max_rungs, _floor_log(length, divisor) + 1, _floor_log(max_trials, divisor) + 1)
    depths = {"aggressive": [rungs], "standard": range((rungs - 1) // 2 + 1, rungs + 1)}.get(mode, range(1, rungs + 1))
    depths = sorted(depths, reverse=True)
    weights = [divisor ** (depth - 1) / depth for depth in depths]
    trials = [max(1, int(weight / sum(weights) * max_trials)) for weight in weights]
    trials[0] += max(0, max_trials - sum(trials))
    return [Bracket(rung_lengths(length, divisor, depth), n) for depth, n in zip(depths, trials, strict=True)]


def rung_lengths(length: int, divisor: float, rungs: int) -> tuple[int, ...]:
    """The length of a trial at each of `rungs` rungs."""
    return tuple(max(1, int(length / divisor ** (rungs - 1 - index))) for index in range(rungs))


def continues(value: float, others: Sequence[float], divisor: float) -> bool:
    """Whether a trial continues beyond a rung that `others` have reached before. Lower values are better."""
    rank = sum(other < value for other in others)
    return rank < max(1, int((len(others) + 1) / divisor))


def expected_at_rungs(bracket: Bracket, divisor: float) -> list[float]:
    """How many trials reach each rung on average over simulated searches, one after another, whose order at all rungs
    is the same and random. There is no formula: a trial that gets far ranks above most, also at the next rung."""
    randomness, reached = random.Random(0), [0] * len(bracket.rungs)
    searches = max(4, 20_000 // bracket.trials)
    for _ in range(searches):
        at_rungs: list[list[float]] = [[] for _ in bracket.rungs]
        for _ in range(bracket.trials):
            value = randomness.random()
            for index, values in enumerate(at_rungs):
                reached[index] += 1
                rank = bisect.bisect_left(values, value)
                values.insert(rank, value)
                if rank >= max(1, int(len(values) / divisor)):
                    break
    return [count / searches for count in reached]


def choose_bracket(brackets: Sequence[Bracket], started: Sequence[int]) -> int | None:
    """The bracket of the next trial: the one that has started the smallest share of its trials, the deepest first; None
    if all have started theirs."""
    open_ = [index for index, bracket in enumerate(brackets) if started[index] < bracket.trials]
    return min(open_, key=lambda index: started[index] / brackets[index].trials, default=None)


def _floor_log(number: int, base: float) -> int:
    """⌊log(number)⌋ to a base, without rounding errors at its powers."""
    exponent = 0
    while base ** (exponent + 1) <= number:
        exponent += 1
    return exponent
