"""The loader: over all ranks and micro-batches, a step is exactly its documents, whatever the layout."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from whet.data.batch import IGNORED, PackedBatch
from whet.data.loader import Loader, StepTotals
from whet.data.plan import Length, plan_by_conversations, plan_by_rows, plan_whole
from whet.data.store import Store

from .conftest import MakeStore, write_store

ROW = 24


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    """Forty documents; every token of document d is d + 1, so that a batch tells what it holds."""
    draw = np.random.default_rng(0)
    documents = [
        ([number + 1] * length, draw.integers(0, 2, length).tolist())
        for number, length in enumerate(draw.integers(1, ROW + 1, 40).tolist())
    ]
    return write_store(tmp_path_factory.mktemp("loader") / "store", documents)


def documents_in(batch: PackedBatch) -> list[int]:
    """The documents of a batch, checked to be whole and padding to be padding."""
    tokens = batch.tokens.tolist()
    spans = [tokens[a:b] for a, b in zip(batch.edges[:-1], batch.edges[1:], strict=True) if b > a]
    assert all(len(set(span)) == 1 for span in spans)
    return [span[0] - 1 for span in spans if span[0] > 0]


@pytest.mark.parametrize("padded_to", [None, ROW])
@pytest.mark.parametrize("micro_rows", [1, 2, 5])
@pytest.mark.parametrize("world", [1, 2, 3, 4])
@pytest.mark.parametrize("packing", ["best-fit", "none"])
def test_the_ranks_together_cover_each_step_exactly(
    store: Store, packing: str, world: int, micro_rows: int, padded_to: int | None
) -> None:
    plan = plan_by_conversations(store.lengths, 7, Length(steps=8), ROW, packing, 0)
    loaders = [Loader(store, plan, micro_rows, rank, world, padded_to) for rank in range(world)]
    for step in range(len(plan)):
        shares = [list(loader.micro_batches(step)) for loader in loaders]
        assert len({len(share) for share in shares}) == 1, "ranks would wait for each other"
        batches = [batch for share in shares for _, batch in share]
        found = [document for batch in batches for document in documents_in(batch)]
        assert found == plan.documents_of(step).tolist()
        totals = loaders[-1].totals(step)
        assert totals.conversations == len(found) == 7
        assert totals.tokens == sum(int(store.lengths[document]) for document in found)
        assert totals.squares == sum(int(store.lengths[document]) ** 2 for document in found)
        assert totals.supervised == sum(len(batch.supervised_at) for batch in batches)
        assert totals.supervised == sum(int((batch.labels != IGNORED).sum()) for batch in batches)


@pytest.mark.parametrize("micro_rows", [1, 2, 5])
@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_micro_batches_hold_as_many_rows_as_were_asked_for(store: Store, world: int, micro_rows: int) -> None:
    plan = plan_by_rows(store.lengths, 6, Length(steps=3), ROW, "best-fit", 0)
    rows = [row.tolist() for row in plan.rows_of(1)]
    share = -(-6 // world)
    for rank in range(world):
        mine = rows[rank * share : (rank + 1) * share]
        batches = [documents_in(batch) for _, batch in Loader(store, plan, micro_rows, rank, world).micro_batches(1)]
        wanted = [sum(mine[i : i + micro_rows], []) for i in range(0, share, micro_rows)]  # noqa: RUF017
        assert batches == wanted


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_the_number_beside_a_micro_batch_is_its_first_row(store: Store, world: int) -> None:
    plan = plan_by_rows(store.lengths, 7, Length(steps=2), ROW, "best-fit", 0)
    rows = [row.tolist() for row in plan.rows_of(0)]
    seen: Counter[int] = Counter()
    for rank in range(world):
        for first, batch in Loader(store, plan, 2, rank, world).micro_batches(0):
            seen[first] += 1
            if documents := documents_in(batch):
                assert documents[: len(rows[first])] == rows[first]
    assert set(seen.values()) == {1}, "two micro-batches would draw the same random numbers"


@pytest.mark.parametrize("micro_rows", [1, 3])
@pytest.mark.parametrize("packing", ["best-fit", "none"])
def test_padded_micro_batches_have_one_shape_over_the_whole_run(store: Store, packing: str, micro_rows: int) -> None:
    plan = plan_by_conversations(store.lengths, 7, Length(epochs=2), ROW, packing, 0)
    shapes = {
        (batch.tokens.shape, batch.cu_seqlens.shape, batch.longest)
        for rank in range(3)
        for step in range(len(plan))
        for _, batch in Loader(store, plan, micro_rows, rank, 3, ROW).micro_batches(step)
    }
    assert len(shapes) == 1
    [(tokens, edges, longest)] = shapes
    fullest = max(len(row) for step in range(len(plan)) for row in plan.rows_of(step))
    assert tokens == (ROW * micro_rows,)
    assert edges == (fullest * micro_rows + 2,)
    assert longest == ROW * micro_rows


def test_unpadded_batches_share_one_bound_on_the_longest_document(store: Store) -> None:
    plan = plan_by_conversations(store.lengths, 7, Length(epochs=1), ROW, "best-fit", 0)
    loader = Loader(store, plan, 2, 0, 1)
    bounds = {batch.longest for step in range(len(plan)) for _, batch in loader.micro_batches(step)}
    assert bounds == {int(store.lengths.max())}


def test_a_rank_without_rows_runs_padding_that_teaches_nothing(store: Store) -> None:
    plan = plan_by_conversations(store.lengths, 1, Length(steps=1), ROW, "none", 0)
    for padded_to, size in ((None, 1), (ROW, ROW)):
        [(_, batch)] = Loader(store, plan, 1, 3, 4, padded_to).micro_batches(0)
        assert batch.tokens.tolist() == [0] * size
        assert len(batch.supervised_at) == 0


def test_any_step_can_be_asked_for_again(store: Store) -> None:
    plan = plan_by_rows(store.lengths, 3, Length(steps=5), ROW, "best-fit", 0)
    loader = Loader(store, plan, 1, 0, 1)
    forward = [[batch.tokens.tolist() for _, batch in loader.micro_batches(step)] for step in range(5)]
    backward = [[batch.tokens.tolist() for _, batch in loader.micro_batches(step)] for step in (4, 3, 2, 1, 0)]
    assert forward == backward[::-1]


def test_totals_of_an_example_counted_by_hand(make_store: MakeStore) -> None:
    store = make_store([([1, 1, 1], [0, 1, 1]), ([2, 2], [1, 0]), ([3], [1])])
    plan = plan_whole(store.lengths, 10, "best-fit")
    assert Loader(store, plan, 1, 0, 1).totals(0) == StepTotals(conversations=3, tokens=6, supervised=2, squares=14)


def test_squares_do_not_overflow_32_bits(make_store: MakeStore) -> None:
    store = make_store([([1] * 50_000, [1] * 50_000)])
    plan = plan_whole(store.lengths, 50_000, "none")
    assert Loader(store, plan, 1, 0, 1).totals(0).squares == 2_500_000_000


@settings(max_examples=40, deadline=None)
@given(
    world=st.integers(1, 6),
    micro_rows=st.integers(1, 6),
    batch_rows=st.integers(1, 12),
    seed=st.integers(0, 3),
    padded=st.booleans(),
)
def test_any_layout_of_any_batch_covers_each_step(
    store: Store, world: int, micro_rows: int, batch_rows: int, seed: int, padded: bool
) -> None:
    plan = plan_by_rows(store.lengths, batch_rows, Length(epochs=1), ROW, "best-fit", seed)
    for step in (0, len(plan) - 1):
        found = [
            document
            for rank in range(world)
            for _, batch in Loader(store, plan, micro_rows, rank, world, ROW if padded else None).micro_batches(step)
            for document in documents_in(batch)
        ]
        assert found == plan.documents_of(step).tolist()
