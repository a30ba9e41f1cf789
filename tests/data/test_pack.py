"""Packing: every document once, no row too full, few rows."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from whet.data.pack import best_fit

CASES = st.integers(1, 40).flatmap(
    lambda capacity: st.tuples(st.lists(st.integers(1, capacity), max_size=40), st.just(capacity))
)


def rows_at_best(lengths: list[int], capacity: int) -> int:
    """The least number of rows, by trying everything."""
    best = len(lengths)

    def place(number: int, rooms: tuple[int, ...]) -> None:
        nonlocal best
        if len(rooms) >= best:
            return
        if number == len(lengths):
            best = len(rooms)
            return
        for i, room in enumerate(rooms):
            if room >= lengths[number]:
                place(number + 1, (*rooms[:i], room - lengths[number], *rooms[i + 1 :]))
        place(number + 1, (*rooms, capacity - lengths[number]))

    place(0, ())
    return best


@settings(deadline=None)
@given(CASES)
def test_every_document_is_in_exactly_one_row_and_no_row_is_too_full(case: tuple[list[int], int]) -> None:
    lengths, capacity = case
    rows = best_fit(np.array(lengths, dtype=np.int32), capacity)
    assert sorted(number for row in rows for number in row) == list(range(len(lengths)))
    assert all(0 < sum(lengths[number] for number in row) <= capacity for row in rows)


@settings(deadline=None)
@given(CASES)
def test_no_document_of_a_later_row_would_have_fitted_an_earlier_one(case: tuple[list[int], int]) -> None:
    lengths, capacity = case
    rows = best_fit(np.array(lengths, dtype=np.int32), capacity)
    for i, row in enumerate(rows):
        room = capacity - sum(lengths[number] for number in row)
        assert all(lengths[number] > room for later in rows[i + 1 :] for number in later)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(1, 12), min_size=1, max_size=8))
def test_rows_are_near_the_fewest_possible(lengths: list[int]) -> None:
    best = rows_at_best(lengths, 12)
    assert math.ceil(sum(lengths) / 12) <= best <= len(best_fit(np.array(lengths), 12)) <= 11 / 9 * best + 2 / 3


def test_realistic_lengths_fill_rows_almost_completely() -> None:
    lengths = np.random.default_rng(0).lognormal(5, 0.8, 5000).astype(int).clip(8, 2048)
    rows = best_fit(lengths, 2048)
    assert lengths.sum() / (len(rows) * 2048) > 0.99


def test_the_longest_that_fits_is_taken_first_and_equals_keep_their_order() -> None:
    assert best_fit(np.array([3, 5, 2, 5, 3]), 8) == [[1, 0], [3, 4], [2]]


def test_exact_fits_are_allowed() -> None:
    assert best_fit(np.array([8, 8, 4, 4]), 8) == [[0], [1], [2, 3]]


def test_a_document_that_fits_no_row_is_an_error() -> None:
    with pytest.raises(ValueError, match="a document of 9 tokens does not fit a row of 8"):
        best_fit(np.array([3, 9]), 8)


def test_nothing_packs_to_nothing() -> None:
    assert best_fit(np.array([], dtype=np.int32), 8) == []


def test_the_same_lengths_give_the_same_rows() -> None:
    lengths = np.random.default_rng(1).integers(1, 100, 300)
    assert best_fit(lengths, 100) == best_fit(lengths.copy(), 100)
