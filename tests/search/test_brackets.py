"""Rungs, brackets and promotions of adaptive ASHA, against numbers worked out by hand from its formulas."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from whet.search.brackets import Bracket, choose_bracket, continues, expected_at_rungs, make_brackets

# length, trials, divisor, max_rungs, mode → rungs and trials of each bracket.
# R = min(max_rungs, ⌊log_d length⌋ + 1, ⌊log_d trials⌋ + 1); a bracket of r rungs has trials ∝ d^(r−1)/r, the rest
# goes to the deepest; rung i of r needs max(1, length/d^(r−1−i)).
CASES = [
    ((6400, 128, 4, 3, "aggressive"), [((400, 1600, 6400), 128)]),
    ((6400, 128, 4, 3, "standard"), [((400, 1600, 6400), 94), ((1600, 6400), 34)]),
    ((6400, 128, 4, 3, "conservative"), [((400, 1600, 6400), 83), ((1600, 6400), 30), ((6400,), 15)]),
    ((900, 5, 3, 2, "standard"), [((300, 900), 3), ((900,), 2)]),
    ((100, 16, 4, 5, "standard"), [((6, 25, 100), 12), ((25, 100), 4)]),
    ((64, 64, 4, 5, "standard"), [((1, 4, 16, 64), 45), ((4, 16, 64), 14), ((16, 64), 5)]),
    ((50, 10, 2, 5, "conservative"), [((6, 12, 25, 50), 6), ((12, 25, 50), 2), ((25, 50), 1), ((50,), 1)]),
    ((100, 16, 2.5, 3, "conservative"), [((16, 40, 100), 9), ((40, 100), 4), ((100,), 3)]),
    ((10, 1000, 4, 5, "aggressive"), [((2, 10), 1000)]),
    ((10**6, 3, 4, 5, "conservative"), [((10**6,), 3)]),
    ((1, 100, 4, 5, "standard"), [((1,), 100)]),
    ((100, 1, 4, 5, "standard"), [((100,), 1)]),
]


@pytest.mark.parametrize(("given", "brackets"), CASES, ids=str)
def test_rungs_and_trials_are_those_of_the_formulas(given, brackets):
    assert [(bracket.rungs, bracket.trials) for bracket in make_brackets(*given)] == brackets


@given(
    st.integers(1, 10**7), st.integers(1, 3000), st.floats(2, 10), st.integers(1, 8),
    st.sampled_from(["aggressive", "standard", "conservative"]),
)  # fmt: skip
def test_every_trial_has_a_bracket_and_every_rung_is_longer_than_the_one_before(length, trials, divisor, rungs, mode):
    brackets = make_brackets(length, trials, divisor, rungs, mode)
    assert sum(bracket.trials for bracket in brackets) == trials
    for bracket in brackets:
        assert bracket.rungs[-1] == length
        assert list(bracket.rungs) == sorted(set(bracket.rungs))
        assert len(bracket.rungs) <= rungs
    started = [0] * len(brackets)
    while (index := choose_bracket(brackets, started)) is not None:
        started[index] += 1
    assert started == [bracket.trials for bracket in brackets]


@pytest.mark.parametrize(
    ("value", "others", "divisor", "goes_on"),
    [
        (5.0, [], 4, True),  # the first at a rung is the best so far
        (5.0, [4.0], 4, False),
        (3.0, [4.0], 4, True),
        (4.0, [4.0], 4, True),  # a tie ranks before what came earlier
        (4.5, [4.0, 5, 6, 7, 8, 9, 10], 4, True),  # the second of eight: ⌊8/4⌋ continue
        (5.5, [4.0, 5, 6, 7, 8, 9, 10], 4, False),
        (float("inf"), [4.0], 4, False),  # a crash
        (2.0, [1.0, float("inf"), float("inf")], 2, True),
    ],
)
def test_a_trial_continues_if_its_rank_is_below_the_share_of_the_rung(value, others, divisor, goes_on):
    assert continues(value, others, divisor) is goes_on


def test_the_preview_counts_what_random_orders_give_on_average():
    bracket, divisor, reached = Bracket((1, 4, 16), 24), 4, [0, 0, 0]
    for seed in range(1, 401):
        order = random.Random(seed)
        at_rungs: list[list[float]] = [[], [], []]
        for _ in range(bracket.trials):
            quality = order.random()
            for rung in at_rungs:
                goes_on = continues(quality, rung, divisor)
                rung.append(quality)
                if not goes_on:
                    break
        reached = [total + len(rung) for total, rung in zip(reached, at_rungs, strict=True)]
    expected = expected_at_rungs(bracket, divisor)
    assert expected[0] == bracket.trials == reached[0] / 400
    assert expected == pytest.approx([count / 400 for count in reached], rel=0.05)
