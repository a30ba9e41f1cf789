"""The learning rate as a pure function of the step."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from whet.train.config import ScheduleConfig
from whet.train.schedule import rate_factor

FRACTIONS = st.floats(0, 1)
LENGTHS = st.integers(0, 50) | FRACTIONS
SCHEDULES = st.builds(
    ScheduleConfig, name=st.sampled_from(["constant", "linear", "cosine", "wsd"]), warmup=LENGTHS, decay=LENGTHS,
    init_frac=FRACTIONS, min_frac=FRACTIONS,
)  # fmt: skip


def factors(steps: int, **settings: Any) -> list[float]:
    return [rate_factor(step, steps, ScheduleConfig(**settings)) for step in range(steps)]


@given(schedule=SCHEDULES, steps=st.integers(1, 200))
def test_it_stays_between_where_it_starts_or_ends_and_one(schedule: ScheduleConfig, steps: int) -> None:
    lowest = min(schedule.init_frac, schedule.min_frac)
    for step in range(steps):
        assert lowest - 1e-12 <= rate_factor(step, steps, schedule) <= 1 + 1e-12


@given(schedule=SCHEDULES, steps=st.integers(1, 200))
def test_it_rises_to_one_and_never_rises_again(schedule: ScheduleConfig, steps: int) -> None:
    warmup = schedule.warmup if isinstance(schedule.warmup, int) else round(schedule.warmup * steps)
    found = [rate_factor(step, steps, schedule) for step in range(steps)]
    rise, fall = found[:warmup], found[warmup:]
    assert all(a <= b + 1e-12 for a, b in itertools.pairwise(rise))
    assert all(a >= b - 1e-12 for a, b in itertools.pairwise(fall))
    if warmup <= steps and rise:
        assert rise[-1] == pytest.approx(1)
    if fall:
        assert fall[0] == pytest.approx(1) or schedule.name == "wsd"


def test_the_warm_up_is_a_line() -> None:
    assert factors(8, name="constant", warmup=4, init_frac=0.2) == pytest.approx([0.4, 0.6, 0.8, 1, 1, 1, 1, 1])


def test_no_step_is_wasted_at_rate_zero() -> None:
    assert factors(4, name="linear", warmup=0) == pytest.approx([1, 0.75, 0.5, 0.25])
    assert factors(1, name="linear", warmup=0) == [1]


def test_cosine_is_half_way_down_in_the_middle() -> None:
    found = factors(10, name="cosine", warmup=0, min_frac=0.5)
    assert found[5] == pytest.approx(0.75)
    assert found[2] == pytest.approx(0.5 + 0.5 * (1 + math.cos(math.pi * 0.2)) / 2)


def test_wsd_is_flat_and_then_falls() -> None:
    assert factors(10, name="wsd", warmup=2, decay=4) == pytest.approx([0.5, 1, 1, 1, 1, 1, 1, 0.75, 0.5, 0.25])
    assert factors(10, name="wsd", warmup=0, decay=0.4) == factors(10, name="wsd", warmup=0, decay=4)


def test_a_fraction_is_a_part_of_the_run_and_a_whole_number_counts_steps() -> None:
    assert factors(10, name="constant", warmup=0.2)[:3] == pytest.approx([0.5, 1, 1])
    assert factors(10, name="constant", warmup=1)[:2] == [1, 1]
