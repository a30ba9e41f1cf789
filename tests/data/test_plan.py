"""The plan: which documents make which step, decided before the first one."""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from whet.core.errors import WhetError
from whet.data.plan import Length, Plan, efficiency, plan_by_conversations, plan_by_rows, plan_whole, split_off

ROW = 30
LENGTHS = st.lists(st.integers(1, ROW), min_size=1, max_size=25).map(lambda sizes: np.array(sizes, dtype=np.int32))
PACKINGS = st.sampled_from(["best-fit", "none"])
PLANNERS = [plan_by_conversations, plan_by_rows]
QUICK = settings(max_examples=60, deadline=None)


def check(plan: Plan, lengths: np.ndarray, row_length: int = ROW) -> None:
    """What holds for every plan: rows and steps cover the documents in order, and no row is too full or empty."""
    assert plan.steps[0] == 0
    assert plan.rows[0] == 0
    assert plan.steps[-1] == len(plan.rows) - 1
    assert plan.rows[-1] == len(plan.documents)
    assert (np.diff(plan.steps) > 0).all()
    assert (np.diff(plan.rows) > 0).all()
    assert all(lengths[row].sum() <= row_length for step in range(len(plan)) for row in plan.rows_of(step))
    together = [plan.documents_of(step) for step in range(len(plan))]
    assert np.concatenate(together).tolist() == plan.documents.tolist()
    for step in range(len(plan)):
        assert np.concatenate(plan.rows_of(step)).tolist() == plan.documents_of(step).tolist()


@pytest.mark.parametrize("planner", PLANNERS)
@QUICK
@given(LENGTHS, st.integers(1, 8), st.integers(1, 3), PACKINGS, st.integers(0, 5))
def test_an_epoch_has_each_conversation_exactly_once(planner, lengths, batch, epochs, packing, seed) -> None:  # type: ignore[no-untyped-def]
    plan = planner(lengths, batch, Length(epochs=epochs), ROW, packing, seed)
    check(plan, lengths)
    assert plan.per_epoch == len(lengths)
    assert set(Counter(plan.documents.tolist()).values()) == {epochs}
    assert set(plan.documents.tolist()) == set(range(len(lengths)))


@QUICK
@given(LENGTHS, st.integers(1, 8), st.integers(1, 12), PACKINGS, st.integers(0, 5))
def test_epochs_follow_each_other_whole_when_drawn_by_conversations(lengths, batch, steps, packing, seed) -> None:  # type: ignore[no-untyped-def]
    plan = plan_by_conversations(lengths, batch, Length(steps=steps), ROW, packing, seed)
    check(plan, lengths)
    assert len(plan) == steps
    assert [len(plan.documents_of(step)) for step in range(steps)] == [batch] * steps
    counts = Counter(plan.documents.tolist())
    whole, part = divmod(steps * batch, len(lengths))
    assert all(whole <= counts[i] <= whole + (part > 0) for i in range(len(lengths)))


@QUICK
@given(LENGTHS, st.integers(1, 8), st.integers(1, 12), PACKINGS, st.integers(0, 5))
def test_steps_by_rows_have_that_many_rows_each(lengths, batch, steps, packing, seed) -> None:  # type: ignore[no-untyped-def]
    plan = plan_by_rows(lengths, batch, Length(steps=steps), ROW, packing, seed)
    check(plan, lengths)
    assert np.diff(plan.steps).tolist() == [batch] * steps
    rows = plan_whole(lengths, ROW, packing)
    known = {tuple(row.tolist()) for row in rows.rows_of(0)}
    drawn = Counter(tuple(row.tolist()) for step in range(steps) for row in plan.rows_of(step))
    assert set(drawn) <= known
    whole, part = divmod(steps * batch, len(known))
    assert all(whole <= drawn[row] <= whole + (part > 0) for row in known)


@QUICK
@given(LENGTHS, st.integers(1, 8), st.floats(0.01, 3), PACKINGS)
def test_epochs_may_be_fractions(lengths, batch, epochs, packing) -> None:  # type: ignore[no-untyped-def]
    plan = plan_by_conversations(lengths, batch, Length(epochs=epochs), ROW, packing, 0)
    check(plan, lengths)
    assert len(plan.documents) == max(1, round(len(lengths) * epochs))
    assert len(plan) == math.ceil(len(plan.documents) / batch)


@QUICK
@given(LENGTHS, st.integers(1, 8), st.floats(0.01, 3), PACKINGS)
def test_epochs_by_rows_may_be_fractions(lengths, batch, epochs, packing) -> None:  # type: ignore[no-untyped-def]
    plan = plan_by_rows(lengths, batch, Length(epochs=epochs), ROW, packing, 0)
    check(plan, lengths)
    packed = len(plan_whole(lengths, ROW, packing).rows) - 1
    assert len(plan.rows) - 1 == max(1, round(packed * epochs))


@QUICK
@given(LENGTHS, st.integers(1, 8), st.integers(1, 1000), PACKINGS, st.integers(0, 5))
def test_a_length_in_tokens_is_reached_by_the_last_conversation(lengths, batch, tokens, packing, seed) -> None:  # type: ignore[no-untyped-def]
    plan = plan_by_conversations(lengths, batch, Length(tokens=tokens), ROW, packing, seed)
    check(plan, lengths)
    drawn = plan_by_conversations(lengths, 1, Length(tokens=tokens), ROW, "none", seed).documents
    assert sorted(drawn.tolist()) == sorted(plan.documents.tolist())
    assert lengths[drawn].sum() >= tokens > lengths[drawn[:-1]].sum()


@QUICK
@given(LENGTHS, st.integers(1, 8), st.integers(1, 1000), PACKINGS, st.integers(0, 5))
def test_a_length_in_tokens_is_reached_by_the_last_row(lengths, batch, tokens, packing, seed) -> None:  # type: ignore[no-untyped-def]
    plan = plan_by_rows(lengths, batch, Length(tokens=tokens), ROW, packing, seed)
    check(plan, lengths)
    last = plan.rows_of(len(plan) - 1)[-1]
    assert lengths[plan.documents].sum() >= tokens > lengths[plan.documents[: -len(last)]].sum()


@QUICK
@given(LENGTHS, st.integers(1, 8), st.integers(1, 6), st.integers(0, 5))
def test_packing_changes_no_step_when_a_batch_is_counted_in_conversations(lengths, batch, steps, seed) -> None:  # type: ignore[no-untyped-def]
    packed, plain = (
        plan_by_conversations(lengths, batch, Length(steps=steps), ROW, packing, seed)
        for packing in ("best-fit", "none")
    )
    for step in range(steps):
        assert sorted(packed.documents_of(step).tolist()) == sorted(plain.documents_of(step).tolist())
        assert len(packed.rows_of(step)) <= len(plain.rows_of(step)) == batch


@pytest.mark.parametrize("planner", PLANNERS)
def test_the_seed_alone_decides_the_order(planner) -> None:  # type: ignore[no-untyped-def]
    lengths = np.random.default_rng(0).integers(1, ROW, 200)
    make = lambda seed: planner(lengths, 4, Length(epochs=2), ROW, "best-fit", seed)  # noqa: E731
    assert make(3).documents.tolist() == make(3).documents.tolist()
    assert make(3).documents.tolist() != make(4).documents.tolist()


def test_the_order_is_pinned() -> None:
    """Another order for the same seed would make finished runs unrepeatable."""
    plan = plan_by_conversations(np.full(6, 5), 2, Length(epochs=2), ROW, "none", 7)
    assert plan.documents.tolist() == [3, 0, 2, 1, 4, 5, 2, 3, 0, 5, 1, 4]
    assert [numbers.tolist() for numbers in split_off(6, 0.34, 7)] == [[0, 1, 3, 4], [2, 5]]


@pytest.mark.parametrize("planner", PLANNERS)
def test_each_epoch_has_an_order_of_its_own(planner) -> None:  # type: ignore[no-untyped-def]
    plan = planner(np.full(100, ROW), 1, Length(epochs=2), ROW, "none", 0)
    first, second = plan.documents[:100].tolist(), plan.documents[100:].tolist()
    assert first != second
    assert sorted(first) == sorted(second) == list(range(100))
    assert first != list(range(100))


@pytest.mark.parametrize("planner", PLANNERS)
def test_a_longer_run_starts_with_the_steps_of_a_shorter_one(planner) -> None:  # type: ignore[no-untyped-def]
    lengths = np.random.default_rng(0).integers(1, ROW, 50)
    short, long = (planner(lengths, 4, Length(steps=steps), ROW, "best-fit", 1) for steps in (7, 40))
    for step in range(7):
        assert short.documents_of(step).tolist() == long.documents_of(step).tolist()


def test_the_last_step_of_an_epoch_takes_what_is_left() -> None:
    plan = plan_by_conversations(np.full(10, 5), 4, Length(epochs=1), ROW, "none", 0)
    assert [len(plan.documents_of(step)) for step in range(len(plan))] == [4, 4, 2]
    plan = plan_by_rows(np.full(10, ROW), 4, Length(epochs=1), ROW, "none", 0)
    assert [len(plan.rows_of(step)) for step in range(len(plan))] == [4, 4, 2]


@given(LENGTHS, PACKINGS)
@QUICK
def test_the_plan_for_measuring_is_everything_once_in_one_step(lengths, packing) -> None:  # type: ignore[no-untyped-def]
    plan = plan_whole(lengths, ROW, packing)
    check(plan, lengths)
    assert len(plan) == 1
    assert sorted(plan.documents.tolist()) == list(range(len(lengths)))
    assert packing == "best-fit" or len(plan.rows) - 1 == len(lengths)


def test_a_saved_plan_is_loaded_as_it_was(tmp_path: Path) -> None:
    plan = plan_by_rows(np.arange(1, 20), 2, Length(steps=9), ROW, "best-fit", 0)
    plan.save(tmp_path)
    loaded = Plan.load(tmp_path, plan.per_epoch)
    assert len(loaded) == 9
    assert loaded.per_epoch == 19
    for step in range(9):
        assert [row.tolist() for row in loaded.rows_of(step)] == [row.tolist() for row in plan.rows_of(step)]
    assert isinstance(loaded.documents, np.memmap)


def test_renumbering_changes_names_only() -> None:
    plan = plan_by_conversations(np.full(4, 5), 2, Length(epochs=1), ROW, "best-fit", 0)
    numbers = np.array([10, 11, 12, 13])
    other = plan.renumbered(numbers)
    assert other.documents.tolist() == [10 + document for document in plan.documents]
    assert (other.rows.tolist(), other.steps.tolist()) == (plan.rows.tolist(), plan.steps.tolist())
    assert other.per_epoch == plan.per_epoch == 4


def test_efficiency_is_the_part_of_the_rows_that_is_filled() -> None:
    lengths = np.array([6, 4, 5])
    assert efficiency(plan_whole(lengths, 10, "best-fit"), lengths, 10) == 0.75
    assert efficiency(plan_whole(lengths, 10, "none"), lengths, 10) == 0.5


@QUICK
@given(st.integers(2, 300), st.floats(0.001, 0.999), st.integers(0, 5))
def test_a_split_is_disjoint_and_covers_everything(count: int, fraction: float, seed: int) -> None:
    train, held = split_off(count, fraction, seed)
    assert sorted([*train.tolist(), *held.tolist()]) == list(range(count))
    assert len(train) >= 1
    assert len(held) >= 1
    assert abs(len(held) - count * fraction) <= 1
    assert train.tolist() == sorted(train.tolist())
    assert held.tolist() == sorted(held.tolist())


def test_a_split_is_drawn_by_the_seed_and_not_in_the_order_of_an_epoch() -> None:
    held = [tuple(split_off(100, 0.2, seed)[1].tolist()) for seed in (1, 1, 2)]
    assert held[0] == held[1] != held[2]
    assert held[0] != tuple(range(20))
    first_epoch = plan_by_conversations(np.full(100, 5), 1, Length(epochs=1), ROW, "none", 1).documents[:20]
    assert set(held[0]) != set(first_epoch.tolist())


def test_one_conversation_cannot_be_split() -> None:
    with pytest.raises(WhetError, match=r"data\.validation\.fraction.*add conversations"):
        split_off(1, 0.5, 0)
