"""The learning rate as a pure function of the way through the run."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from whet.training.config import ScheduleConfig
from whet.training.schedule import lr_factor, warmup_fills_run

FRACTIONS = st.floats(0, 1)
LENGTHS = st.integers(0, 50) | FRACTIONS
SCHEDULES = st.builds(
    ScheduleConfig, name=st.sampled_from(["constant", "linear", "cosine", "wsd"]), warmup=LENGTHS, decay=LENGTHS,
    init_frac=FRACTIONS, min_frac=FRACTIONS,
)  # fmt: skip


def factors(steps: int, **settings: Any) -> list[float]:
    return [lr_factor(step, step + 1, steps, ScheduleConfig(**settings)) for step in range(steps)]


def of_sizes(sizes: list[int], unit: float = 1, **settings: Any) -> list[float]:
    """The factors of steps that cover so many conversations, or tokens, each."""
    edges = [0, *itertools.accumulate(sizes)]
    schedule = ScheduleConfig(**settings)
    return [
        lr_factor(before / unit, after / unit, edges[-1] / unit, schedule)
        for before, after in itertools.pairwise(edges)
    ]


@given(schedule=SCHEDULES, steps=st.integers(1, 200))
def test_it_stays_between_where_it_starts_or_ends_and_one(schedule: ScheduleConfig, steps: int) -> None:
    lowest = min(schedule.init_frac, schedule.min_frac)
    for step in range(steps):
        assert lowest - 1e-12 <= lr_factor(step, step + 1, steps, schedule) <= 1 + 1e-12


@given(schedule=SCHEDULES, steps=st.integers(1, 200))
def test_it_rises_to_one_and_never_rises_again(schedule: ScheduleConfig, steps: int) -> None:
    warmup = schedule.warmup if isinstance(schedule.warmup, int) else round(schedule.warmup * steps)
    found = [lr_factor(step, step + 1, steps, schedule) for step in range(steps)]
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


def test_wsd_is_flat_and_then_falls_in_every_step() -> None:
    assert factors(10, name="wsd", warmup=2, decay=4) == pytest.approx([0.5, 1, 1, 1, 1, 1, 0.8, 0.6, 0.4, 0.2])
    assert factors(10, name="wsd", warmup=0, decay=0.4) == factors(10, name="wsd", warmup=0, decay=4)
    assert factors(3, name="wsd", warmup=0, decay=1, min_frac=0.5) == pytest.approx([1, 1, 0.75])


@given(
    name=st.sampled_from(["constant", "linear", "cosine", "wsd"]), steps=st.integers(1, 60), warmup=st.integers(0, 60),
    decay=st.integers(0, 60), start=FRACTIONS, end=FRACTIONS,
)  # fmt: skip
def test_each_schedule_has_the_formula_of_the_docs(
    name: Any, steps: int, warmup: int, decay: int, start: float, end: float
) -> None:
    """docs/training.md, with N and k counted in whole steps."""
    expected = []
    for step in range(steps):
        constant = warmup if name != "wsd" else max(warmup, steps - decay)
        k, n = step - constant + 1, steps - constant
        if step < warmup:
            factor = start + (1 - start) * (step + 1) / warmup
        elif name == "constant" or step < constant:
            factor = 1
        else:
            down = {
                "linear": 1 - (k - 1) / n,
                "cosine": (1 + math.cos(math.pi * (k - 1) / n)) / 2,
                "wsd": 1 - k / (n + 1),
            }[name]
            factor = end + (1 - end) * down
        expected.append(factor)
    settings = {"name": name, "warmup": warmup, "decay": decay, "init_frac": start, "min_frac": end}
    assert factors(steps, **settings) == pytest.approx(expected)


def test_a_fraction_is_a_part_of_the_run_and_a_whole_number_counts_steps() -> None:
    assert factors(10, name="constant", warmup=0.2)[:3] == pytest.approx([0.5, 1, 1])
    assert factors(10, name="constant", warmup=1)[:2] == [1, 1]


@given(schedule=SCHEDULES, steps=st.integers(1, 60), size=st.integers(1, 1000))
def test_steps_of_equal_size_have_the_rates_of_steps(schedule: ScheduleConfig, steps: int, size: int) -> None:
    """In any unit, when its whole numbers are multiplied by what a step covers."""
    in_steps = {
        key: given if isinstance(given, int) else round(given * steps)
        for key, given in (("warmup", schedule.warmup), ("decay", schedule.decay))
    }
    longer = {key: given * size for key, given in in_steps.items()}
    settings = schedule.model_dump()
    for by in ("conversation", "token"):
        found = of_sizes([size] * steps, **settings | longer | {"by": by})
        assert found == pytest.approx(factors(steps, **settings))
    assert of_sizes([size] * steps, size, **settings | in_steps | {"by": "epoch"}) == pytest.approx(
        factors(steps, **settings)
    )


@given(cuts=st.sets(st.integers(1, 99)), warmup=st.integers(0, 30), name=st.sampled_from(["linear", "cosine"]))
def test_the_same_place_has_the_same_rate_however_the_way_there_is_cut(cuts: set[int], warmup: int, name: Any) -> None:
    """After the warm-up the factor depends on where the step begins, and on nothing else."""
    edges = sorted({0, 100} | cuts)
    schedule = {"name": name, "warmup": warmup, "decay": 0.5, "by": "conversation"}
    fine = of_sizes([1] * 100, **schedule)
    for start, found in zip(edges, of_sizes([b - a for a, b in itertools.pairwise(edges)], **schedule), strict=False):
        if start >= warmup:
            assert found == pytest.approx(fine[start])


@given(sizes=st.lists(st.integers(1, 50), min_size=1, max_size=30), decay=st.integers(1, 1000), end=FRACTIONS)
def test_wsd_falls_in_every_step_of_any_size_and_never_to_the_end(sizes: list[int], decay: int, end: float) -> None:
    found = of_sizes(sizes, name="wsd", warmup=0, decay=decay, min_frac=end, by="token")
    constant = max(0, sum(sizes) - decay)
    last = 1.0
    for start, factor in zip(itertools.accumulate([0, *sizes]), found, strict=False):
        if start >= constant and end < 0.9:
            assert end < factor < last
        last = factor


def test_the_warm_up_counts_what_the_schedule_counts() -> None:
    assert of_sizes([10, 30, 60], name="constant", warmup=40, by="token") == pytest.approx([0.25, 1, 1])
    assert of_sizes([10, 30, 60], name="constant", warmup=0.4, by="token") == pytest.approx([0.25, 1, 1])
    assert of_sizes([30, 30, 40], name="constant", warmup=40, by="token") == pytest.approx([0.75, 1, 1]), "not above 1"


def test_by_epoch_fractions_are_epochs() -> None:
    """Steps of half an epoch in a run of three, then of a quarter in a run of one and a half."""
    schedule = {"name": "wsd", "warmup": 1.5, "decay": 0.5, "by": "epoch"}
    assert of_sizes([5] * 6, 10, **schedule) == pytest.approx([1 / 3, 2 / 3, 1, 1, 1, 0.5])
    assert of_sizes([5] * 6, 20, **schedule | {"warmup": 0.25}) == pytest.approx([1, 1, 1, 1, 2 / 3, 1 / 3])


def test_a_fraction_above_one_is_neither_units_nor_a_part() -> None:
    assert ScheduleConfig(by="epoch", warmup=1.5).warmup == 1.5
    with pytest.raises(
        ValidationError, match="neither an integer number of steps nor a fraction of the run, at most 1"
    ):
        ScheduleConfig(warmup=1.5)


def test_a_warm_up_as_long_as_the_run_is_noticed() -> None:
    assert warmup_fills_run(30, ScheduleConfig(name="cosine", warmup=100))
    assert warmup_fills_run(1.2, ScheduleConfig(name="cosine", warmup=3, by="epoch"))
    assert not warmup_fills_run(30, ScheduleConfig(name="cosine", warmup=29))
    assert not warmup_fills_run(30, ScheduleConfig(name="constant", warmup=100))
    assert not warmup_fills_run(1, ScheduleConfig(name="linear", warmup=1))
