"""The mixture: how often each source occurs in an epoch, and that nothing repeats before its time."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from examples import examples
from whet.core.errors import WhetError
from whet.data.config import Source
from whet.data.plan.mixture import Mixture, draws_by_epochs, draws_by_weight, make_mixture, single_source_mixture

QUICK = settings(max_examples=examples(100), deadline=None)
SOURCES = st.lists(st.tuples(st.integers(1, 12), st.integers(1, 30)), min_size=1, max_size=4)  # (documents, draws)


def mixture_of(sources: list[tuple[int, int]]) -> Mixture:
    """The documents of source s are 100 s, 100 s + 1, …"""
    numbers = tuple(np.arange(100 * s, 100 * s + count) for s, (count, _) in enumerate(sources))
    return Mixture(numbers, tuple(draws for _, draws in sources))


def of_source(drawn: np.ndarray, source: int) -> list[int]:
    return [int(number) for number in drawn if number // 100 == source]


@QUICK
@given(SOURCES, st.integers(0, 3), st.integers(1, 6))
def test_each_epoch_has_its_draws_and_passes_are_complete(
    sources: list[tuple[int, int]], seed: int, epochs: int
) -> None:
    mixture = mixture_of(sources)
    assert len(mixture) == sum(draws for _, draws in sources)
    seen: Counter[int] = Counter()
    for epoch in range(epochs):
        drawn = mixture.epoch(seed, epoch)
        assert len(drawn) == len(mixture)
        for source, (count, draws) in enumerate(sources):
            assert len(of_source(drawn, source)) == draws
            seen.update(of_source(drawn, source))
            walked = (epoch + 1) * draws
            often = [seen[100 * source + i] for i in range(count)]
            assert sum(often) == walked
            assert max(often) - min(often) <= (walked % count > 0), "one came again before all others were seen"


@QUICK
@given(st.integers(2, 20), st.integers(1, 20), st.integers(0, 3))
def test_epochs_continue_the_passes_of_a_source(count: int, draws: int, seed: int) -> None:
    """However an amount is cut into epochs, the same documents of each pass have been seen after it."""
    small = Mixture((np.arange(count),), (draws,))
    large = Mixture((np.arange(count),), (2 * draws,))
    for epoch in range(4):
        together = [*small.epoch(seed, 2 * epoch).tolist(), *small.epoch(seed, 2 * epoch + 1).tolist()]
        assert sorted(together) == sorted(large.epoch(seed, epoch).tolist())


def test_passes_have_different_orders() -> None:
    """By seed, source and pass: the first half of 40 documents is another one each time."""
    first_halves = {
        tuple(sorted(number % 100 for number in of_source(mixture_of([(40, 20)] * 2).epoch(seed, 2 * walk), source)))
        for seed in range(3)
        for walk in range(3)
        for source in range(2)
    }
    assert len(first_halves) == 18


def test_epochs_have_different_orders_that_mix_sources() -> None:
    mixture = mixture_of([(60, 60), (60, 60)])
    orders = {tuple(mixture.epoch(seed, epoch).tolist()) for seed in range(2) for epoch in range(3)}
    assert len(orders) == 6
    for order in orders:
        changes = sum(a // 100 != b // 100 for a, b in pairwise(order))
        assert 35 < changes < 85  # half of 119, give or take


def test_it_is_a_pure_function_and_leaves_its_documents_alone() -> None:
    mixture = mixture_of([(30, 30), (20, 7)])
    later = mixture.epoch(5, 3).tolist()
    for epoch in range(3):
        mixture.epoch(5, epoch)
    assert mixture.epoch(5, 3).tolist() == later
    assert mixture.documents[0].tolist() == list(range(30))


def test_the_order_of_one_source_is_pinned() -> None:
    """Another order for the same seed would make finished runs unrepeatable."""
    assert single_source_mixture(np.arange(6)).epoch(7, 0).tolist() == [3, 0, 2, 1, 4, 5]
    assert mixture_of([(5, 3), (2, 3)]).epoch(7, 1).tolist() == [4, 101, 0, 101, 2, 100]


@QUICK
@given(st.lists(st.tuples(st.integers(1, 1000), st.floats(0.001, 1000)), min_size=1, max_size=6))
def test_weights_divide_as_many_draws_as_there_are_documents(sources: list[tuple[int, float]]) -> None:
    counts, weights = [count for count, _ in sources], [weight for _, weight in sources]
    draws = draws_by_weight(counts, weights)
    assert sum(draws) == sum(counts)
    assert min(draws) >= 1
    quotas = [sum(counts) * weight / sum(weights) for weight in weights]
    if min(quotas) >= 1:
        assert all(abs(share - quota) < 1 for share, quota in zip(draws, quotas, strict=True))
    assert draws == draws_by_weight(counts, [weight * 4 for weight in weights])


def test_shares_by_hand() -> None:
    assert draws_by_weight([10, 10], [1, 3]) == (5, 15)
    assert draws_by_weight([5, 3, 2], [1, 1, 1]) == (4, 3, 3)  # equal remainders: the first
    assert draws_by_weight([3, 3, 4], [1.0, 1.0, 0.4]) == (4, 4, 2)  # 4.17, 4.17, 1.67
    assert draws_by_weight([2, 2, 2], [1000, 1, 1]) == (4, 1, 1)  # none is left out
    assert draws_by_epochs([10, 10, 10, 0], [1, 0.25, 0.001, 1]) == (10, 2, 1, 0)
    assert draws_by_epochs([7], [2.5]) == (18,)


def sources_of(**settings: list[float]) -> list[Source]:
    [(name, values)] = settings.items()
    return [Source(path=f"{i}.jsonl", **{name: value}) for i, value in enumerate(values)]


def test_the_configuration_decides_the_draws_among_the_documents_that_may_be_used() -> None:
    documents, owners = np.array([2, 3, 5, 8, 9]), np.array([0, 1, 0, 1, 1])
    plain = make_mixture(documents, owners, sources_of(epochs=[2, 1]))
    assert [numbers.tolist() for numbers in plain.documents] == [[2, 5], [3, 8, 9]]
    assert plain.draws == (4, 3)
    assert make_mixture(documents, owners, [Source(path="a"), Source(path="b")]).draws == (2, 3)
    assert make_mixture(documents, owners, sources_of(weight=[4, 1])).draws == (4, 1)
    assert sorted(plain.epoch(0, 0).tolist()) == [2, 2, 3, 5, 5, 8, 9]


def test_a_weight_needs_something_to_draw_from() -> None:
    documents, owners = np.array([0, 1]), np.array([0, 0])
    with pytest.raises(WhetError, match=r"data\.sources\.1\.weight: 1\.jsonl has no conversation"):
        make_mixture(documents, owners, sources_of(weight=[1, 1]))
    assert make_mixture(documents, owners, sources_of(epochs=[1, 1])).epoch(0, 0).tolist() in ([0, 1], [1, 0])
