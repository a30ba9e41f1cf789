"""The loader: over all ranks and micro-batches, a step is exactly its documents, whatever the layout."""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from examples import examples
from whet.data.batch import IGNORE_INDEX, SIZE_MULTIPLE, PackedBatch
from whet.data.loader import Loader
from whet.data.plan import planner
from whet.data.plan.mixture import single_source_mixture
from whet.data.plan.planner import Plan, RunLength, document_cost
from whet.data.prepare.store import Store

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


def plan_by_conversations(store: Store, batch: int, length: RunLength, packing: str, seed: int = 0) -> Plan:
    mixture = single_source_mixture(np.arange(len(store)))
    return planner.plan_by_conversations(store.lengths, mixture, batch, length, ROW, packing, 4, seed)


def plan_by_rows(store: Store, batch: int, length: RunLength, packing: str, seed: int = 0) -> Plan:
    mixture = single_source_mixture(np.arange(len(store)))
    return planner.plan_by_rows(store.lengths, mixture, batch, length, ROW, packing, 4, seed)


@pytest.mark.parametrize("pads", [False, True])
@pytest.mark.parametrize("micro_rows", [1, 3])
@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("packing", ["best-fit", "none"])
def test_single_document_batches_cover_a_step_with_the_same_number_on_every_rank(
    store: Store, packing: str, world: int, micro_rows: int, pads: bool
) -> None:
    plan = plan_by_conversations(store, 7, RunLength(steps=3), packing)
    for step in range(len(plan)):
        alone: list[list[tuple[int, PackedBatch]]] = []
        for rank in range(world):
            with contextlib.closing(Loader(store, plan, micro_rows, rank, world, pads)) as loader:
                alone.append(list(loader.single_document_batches(step, None)))
                batches = list(loader.micro_batches(step))
                assert loader.layout(step) == [(row, batch.documents.tolist()) for row, batch in batches]
                rows = {document: row for row, documents in loader.layout(step) for document in documents}
                assert all(rows[int(batch.documents[0])] == row for row, batch in alone[-1] if len(batch.documents))
                assert len(list(loader.single_document_batches(step, 2))) == min(2, len(alone[-1]))
        assert len({len(share) for share in alone}) == 1
        found = [documents_in(batch) for share in alone for _, batch in share]
        assert max(map(len, found)) == 1
        assert sorted(number for numbers in found for number in numbers) == sorted(plan.documents_of(step).tolist())


def plan_whole(store: Store, row_length: int, packing: str) -> Plan:
    return planner.plan_single_step(store.lengths, np.arange(len(store)), row_length, packing, 4)


def batches_of(
    store: Store, plan: Plan, step: int, micro_rows: int, rank: int, world: int, pads: bool = False
) -> list[tuple[int, PackedBatch]]:
    with contextlib.closing(Loader(store, plan, micro_rows, rank, world, pads)) as loader:
        return list(loader.micro_batches(step))


def documents_in(batch: PackedBatch) -> list[int]:
    """The documents of a batch, checked to be whole and padding to be padding."""
    tokens = batch.tokens.tolist()
    spans = [tokens[a:b] for a, b in zip(batch.cu_seqlens_host[:-1], batch.cu_seqlens_host[1:], strict=True) if b > a]
    assert all(len(set(span)) == 1 for span in spans)
    return [span[0] - 1 for span in spans if span[0] > 0]


@pytest.mark.parametrize("pads", [False, True])
@pytest.mark.parametrize("micro_rows", [1, 2, 5])
@pytest.mark.parametrize("world", [1, 2, 3, 4])
@pytest.mark.parametrize("packing", ["best-fit", "none"])
def test_the_ranks_together_cover_each_step_exactly(
    store: Store, packing: str, world: int, micro_rows: int, pads: bool
) -> None:
    plan = plan_by_conversations(store, 7, RunLength(steps=8), packing)
    loaders = [Loader(store, plan, micro_rows, rank, world, pads) for rank in range(world)]
    for step in range(len(plan)):
        shares = [list(loader.micro_batches(step)) for loader in loaders]
        assert len({len(share) for share in shares}) == 1, "ranks would wait for each other"
        batches = [batch for share in shares for _, batch in share]
        found = [document for batch in batches for document in documents_in(batch)]
        assert sorted(found) == sorted(plan.documents_of(step).tolist())
        totals = loaders[-1].totals(step)
        assert totals.conversations == len(found) == 7
        assert totals.tokens == sum(int(store.lengths[document]) for document in found)
        assert sorted(totals.lengths) == sorted(int(store.lengths[document]) for document in found)
        assert totals.supervised == sum(len(batch.supervised_at) for batch in batches)
        assert totals.supervised == sum(int((batch.labels != IGNORE_INDEX).sum()) for batch in batches)


def dealt(rows: int, rank: int, world: int) -> list[int]:
    """Cards in a circle, there and back again: what this rank holds."""
    ranks = [*range(world), *reversed(range(world))] * rows
    return [row for row in range(rows) if ranks[row] == rank]


@pytest.mark.parametrize("micro_rows", [1, 2, 5])
@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_rows_are_dealt_in_snake_order(store: Store, world: int, micro_rows: int) -> None:
    plan = plan_by_rows(store, 7, RunLength(steps=2), "best-fit")
    rows = [row.tolist() for row in plan.rows_of(1)]
    share = -(-7 // world)
    for rank in range(world):
        mine = [rows[row] for row in dealt(7, rank, world)]
        batches = [documents_in(batch) for _, batch in batches_of(store, plan, 1, micro_rows, rank, world)]
        wanted = [sum(mine[i : i + micro_rows], []) for i in range(0, share, micro_rows)]  # noqa: RUF017
        assert batches == wanted


def test_the_deal_by_hand() -> None:
    assert [dealt(8, rank, 3) for rank in range(3)] == [[0, 5, 6], [1, 4, 7], [2, 3]]


@pytest.mark.parametrize("world", [1, 2, 3, 4, 9])
def test_the_number_beside_a_micro_batch_is_its_first_row_in_the_step(store: Store, world: int) -> None:
    plan = plan_by_rows(store, 7, RunLength(steps=2), "best-fit")
    rows = [row.tolist() for row in plan.rows_of(1)]
    for micro_rows in (1, 2):
        seen: Counter[int] = Counter()
        for rank in range(world):
            for first, batch in batches_of(store, plan, 1, micro_rows, rank, world):
                seen[first] += 1
                if documents := documents_in(batch):
                    assert documents[: len(rows[first])] == rows[first]
                else:
                    assert first >= 7
        assert set(seen.values()) == {1}, "two micro-batches would draw the same random numbers"
        if micro_rows == 1:
            assert set(range(7)) <= set(seen), "the same rows have the same numbers in any world"


@settings(max_examples=examples(40), deadline=None)
@given(
    st.lists(st.integers(1, ROW), min_size=1, max_size=60),
    st.integers(1, 7),
    st.integers(1, 4),
    st.sampled_from(["none", "best-fit"]),
)
def test_ranks_differ_by_less_than_the_most_expensive_row(
    tmp_path_factory: pytest.TempPathFactory, lengths: list[int], world: int, micro_rows: int, packing: str
) -> None:
    store = write_store(
        tmp_path_factory.mktemp("balance") / "store", [([i + 1] * n, [1] * n) for i, n in enumerate(lengths)]
    )
    plan = plan_whole(store, ROW, packing)
    rows = [int(document_cost(store.lengths[row]).sum()) for row in plan.rows_of(0)]
    works = np.array(
        [
            [
                int(document_cost(store.lengths[documents_in(batch)]).sum()) if documents_in(batch) else 0
                for _, batch in share
            ]
            for share in (batches_of(store, plan, 0, micro_rows, rank, world) for rank in range(world))
        ]
    )  # [ranks, micro-batches]
    assert works.sum() == sum(rows)
    assert np.ptp(works.sum(axis=1)) <= max(rows)
    for number in range(works.shape[1] - 1):  # in the last one some ranks may have nothing to do
        mine = rows[number * micro_rows * world : (number + 1) * micro_rows * world]
        assert np.ptp(works[:, number]) <= max(mine) - min(mine)


@pytest.mark.parametrize("micro_rows", [1, 3])
@pytest.mark.parametrize("packing", ["best-fit", "none"])
def test_padded_micro_batches_have_one_shape_if_they_differ_little(store: Store, packing: str, micro_rows: int) -> None:
    plan = plan_by_conversations(store, 7, RunLength(epochs=2), packing)
    batches = [
        batch
        for rank in range(3)
        for step in range(len(plan))
        for _, batch in batches_of(store, plan, step, micro_rows, rank, 3, True)
    ]
    [(tokens, edges, longest)] = {(each.tokens.shape, each.cu_seqlens.shape, each.max_seqlen) for each in batches}
    assert tokens == (SIZE_MULTIPLE,)
    assert longest == max(store.lengths[plan.documents])
    assert edges == (max(len(each.documents) for each in batches) + -(-SIZE_MULTIPLE // longest) + 1,)


def test_single_conversations_are_padded_to_the_smallest_of_a_few_sizes(
    make_store: MakeStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    lengths = [1, 100, 128, 129, 200, 256, 300, 513, 1000, 1024]
    store = make_store([([1] * length, [1] * length) for length in lengths])
    plan = planner.plan_single_step(store.lengths, np.arange(len(store)), 1024, "none", 4)

    def sizes(micro_rows: int, rank: int = 0, world: int = 1) -> dict[tuple[int, ...], int]:
        with contextlib.closing(Loader(store, plan, micro_rows, rank, world, True)) as loader:
            batches = [batch for _, batch in loader.micro_batches(0)]
        return {tuple(store.lengths[batch.documents].tolist()): len(batch.tokens) for batch in batches}

    assert set(sizes(1).values()) == {1024}, "too few to compile for more sizes"
    monkeypatch.setattr("whet.data.loader._COMPILE_TOKENS", 0)
    expected = {1: 128, 100: 128, 128: 128, 129: 256, 200: 256, 256: 256, 300: 640, 513: 640, 1000: 1024, 1024: 1024}
    assert sizes(1) == {(length,): size for length, size in expected.items()}
    assert sizes(3) == {(1024, 1000, 513): 2560, (300, 256, 200): 768, (129, 128, 100): 384, (1,): 128}
    # ranks share their sizes
    assert sizes(3, 0, 2) == {(1024, 300, 256): 1792, (128, 100): 256}
    assert sizes(3, 1, 2) == {(1000, 513, 200): 1792, (129, 1): 256}


def test_unpadded_batches_share_one_bound_on_the_longest_document(store: Store) -> None:
    plan = plan_by_conversations(store, 7, RunLength(epochs=1), "best-fit")
    loader = Loader(store, plan, 2, 0, 1)
    bounds = {batch.max_seqlen for step in range(len(plan)) for _, batch in loader.micro_batches(step)}
    assert bounds == {int(store.lengths.max())}


def test_a_rank_without_rows_gets_padding_without_targets(store: Store) -> None:
    plan = plan_by_conversations(store, 1, RunLength(steps=1), "none")
    for pads, size in ((False, 1), (True, SIZE_MULTIPLE)):
        [(_, batch)] = batches_of(store, plan, 0, 1, 3, 4, pads)
        assert batch.tokens.tolist() == [0] * size
        assert len(batch.supervised_at) == 0


def test_any_step_can_be_loaded_again(store: Store) -> None:
    plan = plan_by_rows(store, 3, RunLength(steps=5), "best-fit")
    loader = Loader(store, plan, 1, 0, 1)
    forward = [[batch.tokens.tolist() for _, batch in loader.micro_batches(step)] for step in range(5)]
    backward = [[batch.tokens.tolist() for _, batch in loader.micro_batches(step)] for step in (4, 3, 2, 1, 0)]
    assert forward == backward[::-1]


def test_prefetched_batches_are_the_same(store: Store) -> None:
    """Each step asked of a loader of its own, and all of one, over the edges of steps."""
    plan = plan_by_conversations(store, 9, RunLength(epochs=1), "none")
    with contextlib.closing(Loader(store, plan, 2, 1, 2, ROW)) as loader:
        for step in [*range(len(plan)), 0, 3, 2]:
            ahead, direct = list(loader.micro_batches(step)), batches_of(store, plan, step, 2, 1, 2, ROW)
            assert [first for first, _ in ahead] == [first for first, _ in direct]
            for (_, one), (_, other) in zip(ahead, direct, strict=True):
                assert one.cu_seqlens_host == other.cu_seqlens_host
                for name in ("tokens", "labels", "positions", "cu_seqlens", "supervised_at"):
                    assert torch.equal(getattr(one, name), getattr(other, name))


def test_prefetching_crosses_steps_but_is_bounded(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []
    monkeypatch.setattr("whet.data.loader.pack_batch", lambda store, documents, *_: made.append(int(documents[0])))
    plan = plan_by_rows(store, 2, RunLength(epochs=2), "none")
    with contextlib.closing(Loader(store, plan, 1, 0, 1)) as loader:
        list(loader.micro_batches(0))
        deadline = time.monotonic() + 5
        while len(made) < 6 and time.monotonic() < deadline:
            time.sleep(0.005)
        time.sleep(0.05)
    assert made == plan.documents[:6].tolist()  # step 0, and four micro-batches ahead of it


def test_a_prefetch_error_is_raised_at_its_step(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = plan_by_rows(store, 1, RunLength(steps=4), "none")
    broken = int(plan.documents_of(2)[0])

    def fail(store: Store, documents: np.ndarray, *_: object) -> int:
        if broken in documents:
            raise OSError("the disk is gone")
        return 1

    monkeypatch.setattr("whet.data.loader.pack_batch", fail)
    with contextlib.closing(Loader(store, plan, 1, 0, 1)) as loader:
        assert len(list(loader.micro_batches(0))) == len(list(loader.micro_batches(1))) == 1
        with pytest.raises(OSError, match="the disk is gone"):
            list(loader.micro_batches(2))


def test_a_loader_starts_without_reading_all_documents(store: Store) -> None:
    """At 60 million documents looking takes a second and a gigabyte on every rank."""

    class Untouched:
        def __getitem__(self, key: object) -> None:
            raise AssertionError("looked")

    plan = plan_by_rows(store, 3, RunLength(steps=5), "best-fit")
    hidden = replace(plan, documents=Untouched(), rows=Untouched(), steps=Untouched())  # type: ignore[arg-type]
    Loader(store, hidden, 1, 0, 1, ROW).close()


def test_totals_of_an_example_counted_by_hand(make_store: MakeStore) -> None:
    store = make_store([([1, 1, 1], [0, 1, 1]), ([2, 2], [1, 0]), ([3], [1])])
    plan = plan_whole(store, 10, "best-fit")
    totals = Loader(store, plan, 1, 0, 1).totals(0)
    assert (totals.conversations, totals.tokens, totals.supervised) == (3, 6, 2)
    assert sorted(totals.lengths.tolist()) == [1, 2, 3]


@settings(max_examples=examples(40), deadline=None)
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
    plan = plan_by_rows(store, batch_rows, RunLength(epochs=1), "best-fit", seed)
    for step in (0, len(plan) - 1):
        found = [
            document
            for rank in range(world)
            for _, batch in batches_of(store, plan, step, micro_rows, rank, world, padded)
            for document in documents_in(batch)
        ]
        assert sorted(found) == sorted(plan.documents_of(step).tolist())


@settings(max_examples=examples(40), deadline=None)
@given(
    world=st.integers(1, 3), micro_rows=st.integers(1, 5), batch=st.integers(1, 12), seed=st.integers(0, 3),
    padded=st.booleans(), packing=st.sampled_from(["best-fit", "none"]),
)  # fmt: skip
def test_no_micro_batch_is_larger_than_the_worst(
    store: Store, world: int, micro_rows: int, batch: int, seed: int, padded: bool, packing: str
) -> None:
    plan = plan_by_conversations(store, batch, RunLength(epochs=1), packing, seed)
    for rank in range(world):
        with contextlib.closing(Loader(store, plan, micro_rows, rank, world, padded)) as loader:
            worst = loader.worst_batch()
            every = [one for step in range(len(plan)) for _, one in loader.micro_batches(step)]
            assert len(worst.tokens) >= max(len(one.tokens) for one in every)
            assert len(worst.supervised_at) >= max(len(one.supervised_at) for one in every)
            assert (worst.labels != -100).nonzero().flatten().tolist() == worst.supervised_at.tolist()
            assert loader.with_micro_rows(2).layout(0) == Loader(store, plan, 2, rank, world).layout(0)


@pytest.mark.parametrize("plan_rows", [plan_by_conversations, plan_by_rows])
@pytest.mark.parametrize("packing", ["best-fit", "none"])
def test_an_unpacked_plan_has_the_same_steps_with_one_document_a_row(
    store: Store, plan_rows: Callable[..., Plan], packing: str
) -> None:
    plan = plan_rows(store, 5, RunLength(epochs=2), packing)
    single = plan.unpacked(store.lengths)
    assert len(single) == len(plan)
    assert (single.stats.fullest, single.stats.tokens, single.stats.longest) == (
        1, plan.stats.tokens, plan.stats.longest,
    )  # fmt: skip
    for step in range(len(plan)):
        assert Counter(single.documents_of(step).tolist()) == Counter(plan.documents_of(step).tolist())
        assert {len(row) for row in single.rows_of(step)} == {1}
        costs = document_cost(store.lengths[single.documents_of(step)])
        assert (np.diff(costs) <= 0).all()
    if packing == "none":
        assert np.array_equal(single.documents, plan.documents)
