"""Keeping conversations apart: disjoint by content."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from examples import examples
from whet.core.errors import WhetError
from whet.data.plan.mixture import single_source_mixture, train_validation_split

QUICK = settings(max_examples=examples(100), deadline=None)


def distinct(count: int) -> np.ndarray:
    """Hashes whose order is not that of the conversations."""
    return np.random.default_rng(count).permutation(count).astype(np.uint64) + np.uint64(2**63)


@QUICK
@given(st.integers(2, 300), st.floats(0.001, 0.999), st.integers(0, 5))
def test_a_split_is_disjoint_and_covers_everything(count: int, fraction: float, seed: int) -> None:
    train, held = train_validation_split(distinct(count), fraction, seed)
    assert sorted([*train.tolist(), *held.tolist()]) == list(range(count))
    assert len(train) >= 1
    assert len(held) >= 1
    assert abs(len(held) - count * fraction) <= 1
    assert train.tolist() == sorted(train.tolist())
    assert held.tolist() == sorted(held.tolist())


@QUICK
@given(st.lists(st.integers(0, 30), min_size=2, max_size=80), st.floats(0.01, 0.99), st.integers(0, 5))
def test_duplicates_are_on_the_same_side(contents: list[int], fraction: float, seed: int) -> None:
    hashes = np.array(contents, dtype=np.uint64)
    if len(set(contents)) < 2:
        with pytest.raises(WhetError, match=f"{len(contents)} conversations that are all the same cannot"):
            train_validation_split(hashes, fraction, seed)
        return
    train, held = train_validation_split(hashes, fraction, seed)
    assert sorted([*train.tolist(), *held.tolist()]) == list(range(len(contents)))
    assert len(train) >= 1
    assert len(held) >= 1
    assert not set(hashes[train].tolist()) & set(hashes[held].tolist())
    most = max(contents.count(content) for content in contents)
    assert abs(len(held) - len(contents) * fraction) <= most


def test_it_is_drawn_by_the_seed_and_not_in_the_order_of_an_epoch() -> None:
    held = [tuple(train_validation_split(distinct(100), 0.2, seed)[1].tolist()) for seed in (1, 1, 2)]
    assert held[0] == held[1] != held[2]
    assert held[0] != tuple(range(20))
    assert set(held[0]) != set(single_source_mixture(np.arange(100)).epoch(1, 0)[:20].tolist())


def test_the_split_is_pinned() -> None:
    assert [numbers.tolist() for numbers in train_validation_split(distinct(6), 0.34, 7)] == [[0, 1, 3, 4], [2, 5]]


@pytest.mark.parametrize("copies", [1, 5])
def test_one_conversation_cannot_be_split(copies: int) -> None:
    with pytest.raises(WhetError, match=r"data\.validation\.fraction.*add different conversations"):
        train_validation_split(np.full(copies, 7, dtype=np.uint64), 0.5, 0)
