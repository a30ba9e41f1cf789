"""A packed batch: documents side by side, each blind to the others."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from examples import examples
from whet.data import batch as batches
from whet.data.batch import IGNORE_INDEX, SIZE_MULTIPLE, BatchShape, PackedBatch, choose_shapes
from whet.data.prepare.store import Store

from .conftest import MakeStore, write_store

H, I, BANG, Y, E, S = 72, 105, 33, 89, 101, 115  # noqa: E741
EXAMPLE = [([H, I, BANG], [0, 1, 1]), ([Y, E, S], [1, 1, 1])]
DOCUMENTS = st.lists(
    st.lists(st.tuples(st.integers(1, 900), st.integers(0, 1)), min_size=1, max_size=7), min_size=1, max_size=6
)


def pack_batch(store: Store, documents: list[int], longest: int, shape: BatchShape | None) -> PackedBatch:
    return batches.pack_batch(store, np.array(documents, dtype=np.int32), longest, shape)


def of(documents: list[list[tuple[int, int]]], factory: pytest.TempPathFactory) -> Store:
    return write_store(
        factory.mktemp("batch") / "store",
        [([token for token, _ in document], [flag for _, flag in document]) for document in documents],
    )


def test_the_example_in_the_docstring(make_store: MakeStore) -> None:
    batch = pack_batch(make_store(EXAMPLE), [0, 1], longest=3, shape=BatchShape(tokens=8, documents=2))
    assert batch.tokens.tolist() == [H, I, BANG, Y, E, S, 0, 0]
    assert batch.labels.tolist() == [I, BANG, IGNORE_INDEX, E, S, IGNORE_INDEX, IGNORE_INDEX, IGNORE_INDEX]
    assert batch.positions.tolist() == [0, 1, 2, 0, 1, 2, 0, 1]
    assert batch.cu_seqlens.tolist() == [0, 3, 6, 8, 8, 8]  # the last two are empty: padding alone would need them
    assert batch.cu_seqlens_host == (0, 3, 6, 8, 8, 8)
    assert batch.supervised_at.tolist() == [0, 1, 3, 4]
    assert batch.max_seqlen == 3


def test_without_a_shape_there_is_no_padding(make_store: MakeStore) -> None:
    batch = pack_batch(make_store(EXAMPLE), [1, 0], longest=3, shape=None)
    assert batch.tokens.tolist() == [Y, E, S, H, I, BANG]
    assert batch.labels.tolist() == [E, S, IGNORE_INDEX, I, BANG, IGNORE_INDEX]
    assert batch.cu_seqlens.tolist() == [0, 3, 6]
    assert batch.max_seqlen == 3


def test_dtypes_are_those_that_attention_and_loss_need(make_store: MakeStore) -> None:
    batch = pack_batch(make_store(EXAMPLE), [0], 3, BatchShape(8, 2))
    assert {batch.tokens.dtype, batch.labels.dtype, batch.positions.dtype, batch.supervised_at.dtype} == {torch.int64}
    assert batch.cu_seqlens.dtype == torch.int32


def test_a_full_batch_has_no_padding_document_but_the_same_cu_seqlens_length(make_store: MakeStore) -> None:
    store = make_store(EXAMPLE)
    full = pack_batch(store, [0, 1], 3, BatchShape(6, 2))
    assert full.cu_seqlens.tolist() == [0, 3, 6, 6, 6]
    assert pack_batch(store, [1], 3, BatchShape(6, 2)).cu_seqlens.shape == full.cu_seqlens.shape
    assert full.tokens.tolist() == [H, I, BANG, Y, E, S]


@pytest.mark.parametrize(("shape", "tokens", "edges"), [(None, 1, (0, 1)), (BatchShape(5, 2), 5, (0, 3, 5, 5, 5))])
def test_no_documents_are_padding_alone(
    make_store: MakeStore, shape: BatchShape | None, tokens: int, edges: tuple[int, ...]
) -> None:
    batch = pack_batch(make_store(EXAMPLE), [], 3, shape)
    assert batch.tokens.tolist() == [0] * tokens
    assert batch.labels.tolist() == [IGNORE_INDEX] * tokens
    assert batch.positions.tolist() == [i % 3 for i in range(tokens)]  # no padding is longer than a document
    assert batch.cu_seqlens_host == edges
    assert len(batch.supervised_at) == 0


@settings(max_examples=examples(40), deadline=None)
@given(DOCUMENTS, st.booleans(), st.integers(0, 5))
def test_a_label_is_the_next_token_of_the_same_document_if_it_is_a_target(
    tmp_path_factory: pytest.TempPathFactory, documents: list[list[tuple[int, int]]], padded: bool, room: int
) -> None:
    store = of(documents, tmp_path_factory)
    chosen = list(range(len(documents)))[::-1]
    total = sum(map(len, documents))
    batch = pack_batch(store, chosen, 7, BatchShape(total + room, len(documents) + 1) if padded else None)
    tokens, labels, positions = batch.tokens.tolist(), batch.labels.tolist(), batch.positions.tolist()
    at = 0
    for number in chosen:
        document = documents[number]
        for i, (token, _) in enumerate(document):
            is_target = i + 1 < len(document) and document[i + 1][1]
            assert tokens[at + i] == token
            assert positions[at + i] == i
            assert labels[at + i] == (document[i + 1][0] if is_target else IGNORE_INDEX)
        assert labels[at + len(document) - 1] == IGNORE_INDEX, "a label across documents"
        at += len(document)
    assert all(label == IGNORE_INDEX for label in labels[at:])
    assert len(tokens) == (total + room if padded else total)
    assert len(batch.supervised_at) == store.targets[chosen].sum()
    assert batch.supervised_at.tolist() == [i for i, label in enumerate(labels) if label != IGNORE_INDEX]


@settings(max_examples=examples(40), deadline=None)
@given(DOCUMENTS, st.data())
def test_padded_batches_all_have_the_same_shape(
    tmp_path_factory: pytest.TempPathFactory, documents: list[list[tuple[int, int]]], data: st.DataObject
) -> None:
    store = of(documents, tmp_path_factory)
    shape = BatchShape(sum(map(len, documents)), len(documents))
    chosen = data.draw(st.lists(st.sampled_from(range(len(documents))), unique=True))
    longest = max(map(len, documents))
    batch = pack_batch(store, chosen, longest, shape)
    assert batch.tokens.shape == batch.labels.shape == batch.positions.shape == (shape.tokens,)
    assert batch.cu_seqlens.shape == (shape.documents + math.ceil(shape.tokens / longest) + 1,)
    assert batch.max_seqlen == longest
    edges = np.array(batch.cu_seqlens_host)
    assert batch.cu_seqlens.tolist() == edges.tolist()
    assert (np.diff(edges) >= 0).all()
    assert (edges[0], edges[-1]) == (0, shape.tokens)
    assert np.diff(edges).max() <= batch.max_seqlen
    starts = [0, *np.cumsum([len(documents[number]) for number in chosen]).tolist()]
    padding = range(starts[-1], shape.tokens, longest)
    assert sorted(set(edges.tolist())) == sorted({*starts, *padding, shape.tokens})


@pytest.mark.parametrize(
    ("tokens", "count", "sizes"),
    [
        ([4096] * 9, 4, [4096]),
        ([4000, 4090, 3969], 4, [4096]),
        ([100, 100, 4096], 1, [4096]),
        ([100, 100, 4096], 4, [128, 4096]),
        ([3000] * 80 + [3400] * 15 + [4000], 4, [3072, 4096]),  # 3456 would save 3 %
        ([1, 200, 300, 500, 1000], 3, [256, 512, 1024]),
        ([16_001, 16_383], 4, [16_384]),
        ([40_000], 4, [40_960]),
        ([0, 0], 4, [128]),
        ([], 4, []),
    ],
)
def test_the_sizes_that_batches_are_padded_to(tokens: list[int], count: int, sizes: list[int]) -> None:
    assert choose_shapes(np.array(tokens, dtype=np.int32), 9, count) == [BatchShape(size, 9) for size in sizes]


def test_a_further_size_saves_more_than_its_compilation_takes() -> None:
    tokens = np.array([1000] * 99 + [4096])
    saved = 99 * (4096 - 1024)
    assert [shape.tokens for shape in choose_shapes(tokens, 9, 4, saved)] == [1024, 4096]
    assert [shape.tokens for shape in choose_shapes(tokens, 9, 4, saved + 1)] == [4096]


@settings(max_examples=examples(60), deadline=None)
@given(st.lists(st.integers(1, 2000), min_size=1, max_size=12), st.integers(1, 4))
def test_no_other_sizes_pad_less(tokens: list[int], count: int) -> None:
    """Against all sets of sizes: at most 5 % for each size that was not worth compiling for."""

    def padded(sizes: Sequence[int]) -> float:
        return sum(min((size for size in sizes if size >= each), default=math.inf) for each in tokens)

    candidates = sorted({math.ceil(each / SIZE_MULTIPLE) * SIZE_MULTIPLE for each in tokens})
    chosen = [shape.tokens for shape in choose_shapes(np.array(tokens), 1, count)]
    assert sorted(set(chosen)) == chosen
    assert len(chosen) <= count
    least = [min(map(padded, itertools.combinations(candidates, number))) for number in range(1, len(candidates) + 1)]
    assert padded(chosen) == least[len(chosen) - 1]
    if len(chosen) < min(count, len(candidates)):
        assert least[len(chosen)] > 0.95 * padded(chosen)


def test_a_batch_moves_to_a_device_whole(make_store: MakeStore) -> None:
    batch = pack_batch(make_store(EXAMPLE), [0, 1], 3, None)
    moved = batch.to(torch.device("meta"))
    assert {
        getattr(moved, name).device.type for name in ("tokens", "labels", "positions", "cu_seqlens", "supervised_at")
    } == {"meta"}
    assert (moved.max_seqlen, moved.cu_seqlens_host) == (batch.max_seqlen, batch.cu_seqlens_host)
