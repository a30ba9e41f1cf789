"""Speed from clock and counts, against numbers worked out by hand."""

from __future__ import annotations

import pytest

from whet.bench.speed import Load, Steps, attention_cost, speed, spread

STEPS = Steps(ended=[110.0, 114.0, 115.0, 117.0], tokens=[1, 100, 200, 400], supervised=[1, 10, 20, 40])


def test_only_steps_after_the_warm_up_count_and_by_the_clock_between_their_ends() -> None:
    found = speed(STEPS, warm=2, began=100.0, load=Load(weights=10**9, attention=0.0, is_adapter=False))
    assert found.tokens_per_s == 600 / 3
    assert found.supervised_per_s == 60 / 3
    assert found.step_ms == 1500
    assert found.first_step_s == 10
    assert found.tflops == pytest.approx(200 * 6e9 / 1e12)


def test_an_adapters_frozen_weights_cost_four_instead_of_six() -> None:
    assert Load(weights=10, attention=3.0, is_adapter=True).per_token == 43
    assert Load(weights=10, attention=3.0, is_adapter=False).per_token == 63


def test_attention_costs_what_the_published_formula_says() -> None:
    # Two conversations of 1 and 3 tokens: a token is in one of mean length (1 + 9) / 4.
    assert attention_cost(layers=2, heads=4, head_width=8, lengths=[1, 3]) == 6 * 2 * 4 * 8 * 2.5


def test_the_spread_is_of_time_for_a_token_and_not_for_a_step() -> None:
    even = Steps(ended=[0.0, 1.0, 3.0], tokens=[5, 100, 200], supervised=[1, 1, 1])
    assert spread(even, warm=1) == 1.0
    assert spread(STEPS, warm=1) == pytest.approx((4 / 100) / (1 / 200))
    assert spread(STEPS, warm=2) == 1.0
