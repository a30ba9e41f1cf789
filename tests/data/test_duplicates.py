"""Exact duplicates: always counted, dropped with data.deduplicate, never on both sides of a split."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import whet.data.prepare.build as chunks_module
from examples import examples
from whet.data.plan.mixture import train_validation_split
from whet.data.prepare.store import find_overlap

from .conftest import line
from .test_prepare import account, go

# Number 7 is split where the maximum length is 40 tokens; 8 is too long in a single exchange.
TURNS = {7: [("user", "q"), ("assistant", "a" * 8)] * 4, 8: [("user", "q" * 90), ("assistant", "a")]}


def lines_of(numbers: list[int]) -> str:
    return "".join(line(*TURNS.get(n, [("user", "?"), ("assistant", f"answer {n}")])) + "\n" for n in numbers)


def write(folder: Path, files: list[list[int]]) -> list[Path]:
    paths = [folder / f"{i}.jsonl" for i in range(len(files))]
    for path, numbers in zip(paths, files, strict=True):
        path.write_text(lines_of(numbers))
    return paths


FILES = st.lists(st.lists(st.integers(0, 8), min_size=1, max_size=10), min_size=1, max_size=3)


@settings(max_examples=examples(30), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(files=FILES, size=st.integers(1, 4))
def test_duplicates_are_counted_and_dropped_and_nothing_else_is(
    own_cache: Path, tmp_path: Path, files: list[list[int]], size: int
) -> None:
    files[0].insert(0, 0)
    paths = write(tmp_path, files)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chunks_module, "_SMALL_CHUNK", size)
        patch.setattr("os.sched_getaffinity", lambda _: {0})
        counted = go(*paths, max_length=40, too_long="split")
        without = go(*paths, max_length=40, too_long="split", deduplicate=True)
    seen: set[int] = set()
    first: list[str] = []
    for source, (path, numbers) in enumerate(zip(paths, files, strict=True)):
        usable = [(f"{path}:{place}", n) for place, n in enumerate(numbers, 1) if n != 8]
        copies = []
        for place, n in usable:
            (copies if n in seen else first).append(place)
            seen.add(n)
        entry, left = account(counted, source), account(without, source)
        assert entry["duplicates"] == left["duplicates"] == len(copies)
        assert entry["first"].get("duplicate", []) == left["first"].get("duplicate", []) == copies[:5]
        assert "duplicate" not in entry["reasons"]
        assert left["reasons"].get("duplicate", 0) == len(copies)
        assert entry["conversations"]["kept"] == len(usable)
        assert left["conversations"]["kept"] == len(usable) - len(copies)
    one, other = counted.store, without.store
    assert list(dict.fromkeys(str(other.origin(i)) for i in range(len(other)))) == first
    kept = [i for i in range(len(one)) if str(one.origin(i)) in set(first)]
    assert [other.ids(i).tolist() for i in range(len(other))] == [one.ids(i).tolist() for i in kept]
    assert [other.loss(i).tolist() for i in range(len(other))] == [one.loss(i).tolist() for i in kept]
    assert sum(account(without, i)["tokens"] for i in range(len(paths))) == int(other.lengths.sum())
    assert sum(account(without, i)["documents"] for i in range(len(paths))) == len(other)


@settings(max_examples=examples(20), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(files=FILES, fraction=st.floats(0.05, 0.95), seed=st.integers(0, 5))
def test_duplicates_and_parts_of_a_conversation_are_on_one_side_of_the_split(
    own_cache: Path, tmp_path: Path, files: list[list[int]], fraction: float, seed: int
) -> None:
    files[0] += [0, 1, 7, 7]
    store = go(*write(tmp_path, files), max_length=40, too_long="split").store
    train, held = train_validation_split(store.hashes, fraction, seed)
    assert sorted([*train, *held]) == list(range(len(store)))
    assert len(train)
    assert len(held)
    texts = [tuple(store.ids(i).tolist()) for i in range(len(store))]
    places = [str(store.origin(i)) for i in range(len(store))]
    assert not {texts[i] for i in train} & {texts[i] for i in held}
    assert not {places[i] for i in train} & {places[i] for i in held}
    split = {i for i in range(len(store)) if places.count(places[i]) > 1}
    assert len(split) >= 4  # number 7 occurs twice, in at least two parts
    assert split <= set(train.tolist()) or split <= set(held.tolist())


def test_the_overlap_of_two_stores_is_found(own_cache: Path, tmp_path: Path) -> None:
    train, held = write(tmp_path, [[1, 2, 7, 3], [4, 7, 2, 5, 2]])
    one = go(train, max_length=40, too_long="split").store
    other = go(held, max_length=40, too_long="split", use="validation").store
    common = find_overlap(other, one)
    assert list(dict.fromkeys(other.origin(int(i)).line for i in common)) == [2, 3, 5]
    assert np.array_equal(find_overlap(one, one), np.arange(len(one)))


def test_documents_with_different_masks_are_not_duplicates(own_cache: Path, jsonl: Callable[..., Path]) -> None:
    once = {"role": "assistant", "content": "a"}
    records = [
        {"messages": [{"role": "user", "content": "q"}, {**once, **extra}, {"role": "user", "content": "r"}, once]}
        for extra in ({}, {"weight": 0}, {})
    ]
    prepared = go(jsonl(*map(json.dumps, records)), deduplicate=True)
    assert account(prepared)["duplicates"] == 1
    assert prepared.store.targets.tolist()[0] > prepared.store.targets.tolist()[1]


def test_the_same_line_of_two_files_is_two_conversations(own_cache: Path, tmp_path: Path) -> None:
    (tmp_path / "many").mkdir()
    write(tmp_path / "many", [[1], [2], [1], [7], [7], [3]])
    counted = go(tmp_path / "many", max_length=40, too_long="split")
    entry = account(counted)
    assert entry["duplicates"] == 2
    assert entry["first"]["duplicate"] == [f"{tmp_path}/many/{name}.jsonl:1" for name in (2, 4)]
    left = account(go(tmp_path / "many", max_length=40, too_long="split", deduplicate=True))
    assert (left["conversations"]["kept"], left["reasons"]) == (4, {"duplicate": 2})
