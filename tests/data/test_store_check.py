"""Damage in a store or a plan is found, wherever it is."""

from __future__ import annotations

import contextlib
import json
import random
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from whet.core import checksums
from whet.core.checksums import find_damage, hash_files, read_hashed_json, write_hashed_json
from whet.core.errors import WhetError
from whet.data.conversation import Origin
from whet.data.plan.planner import Plan, PlanStats
from whet.data.prepare import store as stores
from whet.data.prepare.chunks import Chunk, SavedChunk
from whet.data.prepare.store import Store, StoreCheck, StoreWriter
from whet.data.render.renderer import Rendered
from whet.training.checkpoints import save_checkpoint


def write_store(folder: Path) -> None:
    folder.mkdir()
    (folder / "tokenizer.json").write_text("{}")
    writer = StoreWriter(folder, 512)
    sizes = np.array([3, 4, 5], np.int32)
    origins = np.array([[0, 1], [0, 2], [0, 3]])
    hashes = np.array([7, 8, 9], np.uint64)
    writer.add(np.arange(12, dtype=np.uint16), np.ones(12, np.uint8), sizes, sizes - 1, origins, hashes)
    writer.finish({"key": "k", "files": {"name": ["a.jsonl"], "source": [0]}, "accounts": []})


def flip(file: Path, dice: random.Random) -> None:
    content = bytearray(file.read_bytes())
    content[dice.randrange(len(content))] ^= 1 << dice.randrange(8)
    file.write_bytes(content)


def check(folder: Path) -> None:
    with StoreCheck([Store(folder)]) as running:
        running.require_intact()


def test_any_flipped_bit_of_a_store_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stores, "_CHECKSUM_BLOCK", 7)  # several blocks in each file
    folder, dice = tmp_path / "store", random.Random(0)
    write_store(folder)
    check(folder)
    files = sorted(folder.iterdir())
    assert len(files) == 9
    for file in files:
        whole = file.read_bytes()
        for _ in range(20):
            flip(file, dice)
            with pytest.raises(WhetError) as raised:
                check(folder)
            assert str(folder) in str(raised.value)
            assert "prepare" in str(raised.value)
            file.write_bytes(whole)
        file.write_bytes(whole[: len(whole) // 2])
        with pytest.raises(WhetError):
            check(folder)
        file.unlink()
        with pytest.raises(WhetError):
            check(folder)
        file.write_bytes(whole)
    check(folder)


def test_a_store_without_checksums_passes(tmp_path: Path) -> None:
    write_store(tmp_path / "store")
    manifest = json.loads((tmp_path / "store" / "manifest.json").read_text())
    del manifest["checksums"], manifest["hash"]
    (tmp_path / "store" / "manifest.json").write_text(json.dumps(manifest))
    check(tmp_path / "store")


def test_an_error_is_explained_by_the_damage(tmp_path: Path) -> None:
    write_store(tmp_path / "store")
    store = Store(tmp_path / "store")
    with pytest.raises(IndexError), StoreCheck([store]):
        raise IndexError("of another cause")
    flip(tmp_path / "store" / "tokens.bin", random.Random(1))
    with pytest.raises(WhetError, match=r"tokens\.bin: altered") as raised, StoreCheck([store]):
        raise IndexError("index out of range in self")
    assert isinstance(raised.value.__cause__, IndexError)


def test_damage_on_one_machine_ends_the_run_on_all(tmp_path: Path) -> None:
    """This rank's store is intact; another one's is not."""
    write_store(tmp_path / "store")
    gathered: list[list[str]] = []
    ranks = SimpleNamespace(all_gather=lambda mine: gathered.append(mine) or ["x/tokens.bin: altered"])
    with StoreCheck([Store(tmp_path / "store")]) as running:
        run: Any = SimpleNamespace(store_check=running, ranks=ranks, saver=object())
        with pytest.raises(WhetError, match=r"x/tokens\.bin: altered"):
            save_checkpoint(run)
    assert gathered == [[]]


def test_ctrl_c_does_not_wait_for_the_check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_store(tmp_path / "store")
    seen = threading.Event()

    def slow(path: Path, start: int, end: int, stop: threading.Event | None = None) -> str:
        seen.set()
        assert stop is not None
        stop.wait(30)
        return ""

    monkeypatch.setattr(checksums, "hash_block", slow)
    running = StoreCheck([Store(tmp_path / "store")]).__enter__()
    assert seen.wait(5)
    running.__exit__(KeyboardInterrupt, KeyboardInterrupt(), None)


def test_any_flipped_bit_of_a_plan_is_found(tmp_path: Path) -> None:
    arrays = [np.arange(9, dtype=np.int32), np.array([0, 4, 9]), np.array([0, 1, 2])]
    Plan(*arrays, PlanStats(9, 3, 5, 27)).save(tmp_path)
    assert list(Plan.load(tmp_path).documents) == list(range(9))
    dice = random.Random(2)
    for file in sorted(tmp_path.iterdir()):
        whole = file.read_bytes()
        for _ in range(20):
            flip(file, dice)
            with pytest.raises(WhetError, match="delete the folder"):
                Plan.load(tmp_path)
            file.write_bytes(whole)


def test_any_flipped_bit_of_a_chunk_is_found_or_harmless(tmp_path: Path) -> None:
    chunk = Chunk(0, 512)
    document = Rendered(np.arange(5, dtype=np.int32), np.ones(5, np.uint8), True)
    chunk.add([(document, 4)], Origin("a.jsonl", 1))
    file, dice = tmp_path / "chunk.npz", random.Random(4)
    chunk.save(file)
    names = ("tokens", "loss", "sizes", "targets", "files", "lines", "hashes")

    def content() -> dict[str, list[int]]:
        with contextlib.closing(SavedChunk(file)) as saved:
            return {name: saved[name].tolist() for name in names}

    whole, expected = file.read_bytes(), content()
    for _ in range(150):
        flip(file, dice)
        with contextlib.suppress(WhetError):
            assert content() == expected
        file.write_bytes(whole)


def test_blocks_and_whole_files_have_the_hash_of_their_bytes(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"12345")
    (tmp_path / "b").write_bytes(b"")
    files = [tmp_path / "a", tmp_path / "b"]
    whole, parts = hash_files(tmp_path, files), hash_files(tmp_path, files, block=2)
    assert [len(parts[name]["hash"].split("-")) for name in ("a", "b")] == [3, 1]
    assert whole["b"]["hash"] == parts["b"]["hash"]
    assert find_damage(tmp_path, whole) == find_damage(tmp_path, parts) == []
    (tmp_path / "a").write_bytes(b"12346")
    assert (
        find_damage(tmp_path, whole)
        == find_damage(tmp_path, parts)
        == [f"{tmp_path / 'a'}: altered after it was written (hash mismatch)"]
    )


def test_hashed_json_is_read_back_and_damage_is_named(tmp_path: Path) -> None:
    file, value = tmp_path / "a.json", {"b": [1, 2.5, None, "ü"], "a": {"10": 1, "9": 2}}
    write_hashed_json(file, {**value, "a": {10: 1, 9: 2}})
    assert read_hashed_json(file, "") == value
    dice, whole = random.Random(3), file.read_bytes()
    for _ in range(60):
        flip(file, dice)
        with contextlib.suppress(WhetError):
            assert read_hashed_json(file, "Do this") == value or b'"hash"' not in file.read_bytes()
        file.write_bytes(whole)
