"""The store: complete or absent, and what was put in comes out."""

from __future__ import annotations

import resource
from pathlib import Path

import numpy as np
import pytest

from whet.core.errors import WhetError
from whet.data.conversation import Origin
from whet.data.prepare.store import Store, StoreWriter, _load_array, count_targets
from whet.data.render.renderer import Rendered

from .conftest import MakeStore, write_store
from .test_indexed_dataset import read_by_hand

DOCUMENTS = [([5, 6, 7], [0, 1, 1]), ([8], [1]), ([9, 10], [1, 1])]


def test_documents_come_back_with_their_masks_and_origins(make_store: MakeStore) -> None:
    store = make_store(DOCUMENTS)
    assert len(store) == 3
    assert [store.ids(i).tolist() for i in range(3)] == [ids for ids, _ in DOCUMENTS]
    assert [store.loss(i).tolist() for i in range(3)] == [[bool(flag) for flag in loss] for _, loss in DOCUMENTS]
    assert [store.origin(i) for i in range(3)] == [Origin("a.jsonl", 10), Origin("b.jsonl", 11), Origin("a.jsonl", 12)]
    assert (store.ids(0).dtype, store.loss(0).dtype) == (np.int64, np.bool_)
    assert store.lengths.tolist() == [3, 1, 2]


def test_the_first_token_is_never_a_target(make_store: MakeStore) -> None:
    assert make_store(DOCUMENTS).targets.tolist() == [2, 0, 1]
    assert count_targets(Rendered(np.array([1, 2]), np.array([1, 0], np.uint8), True)) == 0


def test_the_files_are_megatrons(make_store: MakeStore) -> None:
    folder = make_store(DOCUMENTS).folder
    assert read_by_hand(folder / "tokens") == (8, [ids for ids, _ in DOCUMENTS])
    assert read_by_hand(folder / "loss") == (1, [loss for _, loss in DOCUMENTS])


@pytest.mark.parametrize(("vocabulary", "code"), [(65_499, 8), (65_500, 4)])
def test_a_large_vocabulary_takes_four_bytes_a_token(tmp_path: Path, vocabulary: int, code: int) -> None:
    store = write_store(tmp_path / "store", [([65_000, 3], [0, 1])], vocabulary)
    assert read_by_hand(store.folder / "tokens")[0] == code
    assert store.ids(0).tolist() == [65_000, 3]


def test_a_folder_without_manifest_is_no_store(tmp_path: Path) -> None:
    store = write_store(tmp_path / "store", DOCUMENTS)
    (store.folder / "manifest.json").unlink()
    with pytest.raises(WhetError, match=rf"{store.folder}: no complete store.*manifest\.json is missing.*whet prepare"):
        Store(store.folder)


def test_too_many_open_files_is_not_a_damaged_store(make_store: MakeStore) -> None:
    store, limits = make_store(DOCUMENTS), resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, limits[1]))
    try:
        with pytest.raises(WhetError, match=r"origin\.npy: this process has too many open files .*ulimit -n"):
            _load_array(store.folder / "origin.npy", np.int64, 2)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_the_manifest_is_written_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []

    def write_hashed_json(path: Path, value: object) -> None:
        seen.extend(sorted(file.name for file in tmp_path.iterdir()))

    monkeypatch.setattr("whet.data.prepare.store.write_hashed_json", write_hashed_json)
    StoreWriter(tmp_path, 10).finish({})
    assert seen == ["hashes.npy", "loss.bin", "loss.idx", "origin.npy", "targets.npy", "tokens.bin", "tokens.idx"]


def test_a_damaged_manifest_is_an_error_that_names_the_file(tmp_path: Path) -> None:
    store = write_store(tmp_path / "store", DOCUMENTS)
    (store.folder / "manifest.json").write_text("{")
    with pytest.raises(WhetError, match=r"manifest\.json:1: not valid JSON"):
        Store(store.folder)


@pytest.mark.parametrize("name", ["targets", "origin", "hashes"])
def test_files_that_disagree_are_an_error(tmp_path: Path, name: str) -> None:
    store = write_store(tmp_path / "store", DOCUMENTS)
    np.save(store.folder / f"{name}.npy", np.load(store.folder / f"{name}.npy")[:-1])
    with pytest.raises(WhetError, match="disagree on the number of documents; delete it and prepare again"):
        Store(store.folder)


@pytest.mark.parametrize("name", ["tokens", "loss"])
def test_truncated_data_is_an_error(tmp_path: Path, name: str) -> None:
    store = write_store(tmp_path / "store", DOCUMENTS)
    data = store.folder / f"{name}.bin"
    data.write_bytes(data.read_bytes()[:-1])
    with pytest.raises(WhetError, match=rf"{name}\.bin: "):
        Store(store.folder)


def test_an_empty_store_is_a_store(make_store: MakeStore) -> None:
    store = make_store([])
    assert (len(store), store.lengths.tolist(), store.targets.tolist()) == (0, [], [])
