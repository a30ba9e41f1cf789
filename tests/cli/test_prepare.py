"""`whet prepare`: its result, its speed when there is nothing to do, and what being killed leaves."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import forkserver
import whet.data.prepare.build as chunks_module
from forkserver import children_of

SLOWLY = """
import os, sys, time
from whet.data.prepare import build
save = build.Chunk.save
def slowly(chunk, path):
    time.sleep(0.15)
    save(chunk, path)
build.Chunk.save, build._SMALL_CHUNK = slowly, 4
os.sched_getaffinity = lambda _: {0, 1, 2}
from whet.cli.app import app
app(["prepare", *sys.argv[1:]])
"""
TELL = (
    "import sys, json; from whet.cli.app import app\ntry: app()\nfinally: sys.stderr.write(json.dumps([*sys.modules]))"
)


def talk(number: int) -> str:
    turns = [
        {"role": "user", "content": f"{number}?"},
        {"role": "assistant", "content": f"{number}!" * (number % 5 + 1)},
    ]
    return json.dumps({"messages": turns}) + "\n"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An own cache, with the models of all tests in it."""
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / "models").symlink_to(Path(os.environ["WHET_CACHE"], "models").resolve())
    monkeypatch.setenv("WHET_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def arguments(cache: Path, recipe: str, tmp_path: Path) -> list[str]:
    """Of `whet prepare`: a hundred conversations, which are 25 chunks where a chunk has four."""
    (tmp_path / "data.jsonl").write_text("".join(map(talk, range(100))))
    return [recipe, "data.validation=null", f"data.sources=[{{path: {tmp_path / 'data.jsonl'}}}]"]


def result_of(ended: Any) -> dict[str, Any]:
    assert ended.code == 0, ended.err
    return dict(json.loads(ended.out))


def content(folder: str | Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in Path(folder).iterdir()}


def left_behind(cache: Path) -> list[str]:
    return [path.name for path in (cache / "stores").glob("*") if not (path / "manifest.json").exists()]


def test_the_result(whet: Any, recipe: str, cache: Path, write_data: Callable[..., Path]) -> None:
    long = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b" * 200}]}
    file = write_data(talk(1).strip(), "{", long, talk(1).strip(), talk(2).strip())
    options = [f"data.sources=[{{path: {file}}}]", "data.validation=null", "data.max_length=64", "data.on_bad=skip"]
    first = result_of(whet("prepare", recipe, *options, "--json"))
    assert set(first) >= {
        "store", "conversations", "reasons", "tokens", "supervised_tokens", "tokens_per_s", "reused",
    }  # fmt: skip
    assert first["conversations"] == {"in": 5, "kept": 3, "dropped": 2, "truncated": 0, "split": 0}
    assert first["reasons"] == {"broken JSON": 1, "too long": 1}
    assert first["first"] == {"broken JSON": [f"{file}:2"], "too long": [f"{file}:3"], "duplicate": [f"{file}:4"]}
    assert (first["duplicates"], first["reused"]) == (1, False)
    assert 0 < first["supervised_tokens"] < first["tokens"]
    assert first["tokens_per_s"] > 0
    assert (Path(first["store"]) / "manifest.json").exists()
    second = result_of(whet("prepare", recipe, *options, "--json"))
    assert second == {**first, "reused": True, "tokens_per_s": None}
    assert left_behind(cache) == []
    said = whet("prepare", recipe, *options).err
    for text in (
        "3 of 5 conversations kept, 2 dropped",
        f"broken JSON: 1, first {file}:2",
        f"duplicate: 1, first {file}:4",
        f"{first['store']}/ledger.jsonl names every line that was dropped or changed",
    ):
        assert text in said
    listed = [json.loads(line) for line in Path(first["lines"]["train"]).read_text().splitlines()]
    assert [(each["line"], each["outcome"], each["reason"]) for each in listed] == [
        (2, "dropped", "broken JSON"), (3, "dropped", "too long"), (4, "kept", "duplicate"),
    ]  # fmt: skip
    assert listed[1]["detail"] == "218 tokens, over data.max_length = 64"
    assert listed[2]["detail"] == f"the same tokens as {file}:1"
    (Path(first["store"]) / "ledger.jsonl").unlink()  # as in a store of an earlier version
    assert "prepared by an earlier version" in whet("prepare", recipe, *options).err
    cut = result_of(whet("prepare", recipe, *options, "data.too_long=truncate", "--json"))
    assert (cut["conversations"]["truncated"], cut["conversations"]["kept"]) == (1, 4)


def test_reusing_a_store_imports_neither_torch_nor_transformers(
    real_python: str, arguments: list[str], whet: Any
) -> None:
    first = result_of(whet("prepare", *arguments, "--json"))
    began = os.times()
    command = [sys.executable, "-c", TELL, "prepare", *arguments, "--quiet", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    ended = os.times()
    seconds = ended.children_user + ended.children_system - began.children_user - began.children_system
    assert json.loads(done.stdout) == {**first, "reused": True, "tokens_per_s": None}
    loaded = set(json.loads(done.stderr.splitlines()[-1]))
    assert "whet.data.prepare.build" in loaded
    assert not loaded & {"torch", "transformers", "tokenizers", "datasets", "pyarrow"}
    assert seconds < 2


def test_shards_and_merge(arguments: list[str], whet: Any, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunks_module, "_SMALL_CHUNK", 4)
    alone = result_of(whet("prepare", *arguments, "--json"))
    wanted = content(alone["store"])
    shutil.rmtree(alone["store"])
    assert result_of(whet("prepare", *arguments, "--shard", "2/3", "--json")) == {
        "shard": "2/3", "stores": {"train": alone["store"]},
    }  # fmt: skip
    assert whet("prepare", *arguments, "--shard", "0/3").code == 0
    early = whet("prepare", *arguments, "--merge")
    assert early.code == 1
    assert "8 of 25 chunks of the train data are missing (chunk 1, 4, 7, " in early.err
    assert whet("prepare", *arguments, "--shard", "1/3").code == 0
    merged = result_of(whet("prepare", *arguments, "--merge", "--json"))
    assert merged["store"] == alone["store"]
    assert content(merged["store"]) == wanted
    assert left_behind(cache) == []


@pytest.mark.parametrize("shard", ["3/3", "1", "a/b", "-1/3", "0/0"])
def test_an_invalid_shard_is_refused(arguments: list[str], whet: Any, cache: Path, shard: str) -> None:
    ended = whet("prepare", *arguments, "--shard", shard)
    assert ended.code == 1
    assert f"--shard {shard}: write I/N with I from 0 to N − 1" in ended.err
    assert not (cache / "stores").exists()


# Killed


@pytest.fixture
def started(arguments: list[str]) -> Iterator[subprocess.Popen[str]]:
    """A slow preparation with three processes, in a group of its own."""
    process = forkserver.Popen(
        [sys.executable, "-c", SLOWLY, *arguments],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    yield process
    if process.poll() is None:
        process.kill()
    process.communicate()


def chunks(cache: Path) -> dict[Path, int]:
    return {file: file.stat().st_mtime_ns for file in cache.glob("stores/.*.work/[0-9]*.npz")}


def wait_for(condition: Callable[[], Any], seconds: float = 60) -> None:
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until, "it did not come to pass"
        time.sleep(0.01)


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def finish_and_compare(
    whet: Any, arguments: list[str], cache: Path, done: dict[Path, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Continue: what was done is not done again, and the store is what it would have been."""
    assert 6 <= len(done) < 25
    saved: list[str] = []
    save = chunks_module.Chunk.save

    def note(chunk: Any, path: Path) -> None:
        saved.append(path.name)
        save(chunk, path)

    monkeypatch.setattr(chunks_module, "_SMALL_CHUNK", 4)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0})
    monkeypatch.setattr(chunks_module.Chunk, "save", note)
    first = result_of(whet("prepare", *arguments, "--json"))
    assert not first["reused"]
    assert sorted([*saved, *(file.name for file in done)]) == [f"{i:08}.npz" for i in range(25)]
    assert left_behind(cache) == []
    found = content(first["store"])
    shutil.rmtree(first["store"])
    assert content(result_of(whet("prepare", *arguments, "--json"))["store"]) == found


def test_a_killed_preparation_leaves_no_orphans_and_no_store_and_continues(
    started: subprocess.Popen[str], whet: Any, arguments: list[str], cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wait_for(lambda: len(chunks(cache)) >= 6)
    children = children_of(started.pid)
    assert len([child for child in children if is_running(child)]) == 3
    started.send_signal(signal.SIGKILL)
    started.wait()
    wait_for(lambda: not any(map(is_running, children)), seconds=10)
    done = chunks(cache)
    assert list(cache.glob("stores/*/manifest.json")) == []
    time.sleep(0.3)
    assert chunks(cache) == done
    finish_and_compare(whet, arguments, cache, done, monkeypatch)


def test_interrupted_from_the_keyboard_it_ends_at_once_and_continues(
    started: subprocess.Popen[str], whet: Any, arguments: list[str], cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wait_for(lambda: len(chunks(cache)) >= 6)
    children = children_of(started.pid)
    os.kill(children[0], signal.SIGINT)  # a worker leaves it to the one that started it
    time.sleep(0.3)
    assert all(map(is_running, children))
    began = time.monotonic()
    os.killpg(started.pid, signal.SIGINT)
    out, err = started.communicate(timeout=60)
    assert time.monotonic() - began < 30
    assert started.returncode == 130
    assert "Traceback" not in out + err
    assert "interrupted" in err
    assert not any(map(is_running, children))
    assert list(cache.glob("stores/*/manifest.json")) == []
    assert list(cache.glob("stores/*.lock")) == list(cache.glob("stores/.*.lock")) == []
    finish_and_compare(whet, arguments, cache, chunks(cache), monkeypatch)


def test_a_killed_worker_ends_with_3_and_the_next_start_continues(
    started: subprocess.Popen[str], whet: Any, arguments: list[str], cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wait_for(lambda: len(chunks(cache)) >= 6)
    victims = [child for child in children_of(started.pid) if is_running(child)]
    os.kill(victims[1], signal.SIGKILL)
    _, err = started.communicate(timeout=20)
    assert started.returncode == 3
    assert "a worker process died while preparing data (exit code -9" in " ".join(err.split())
    assert "Traceback" not in err
    assert not any(map(is_running, victims))
    finish_and_compare(whet, arguments, cache, chunks(cache), monkeypatch)
