"""Chunks made by many processes and machines, in any order, give the store that one process gives."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import whet.data.prepare.build as chunks_module
import whet.data.prepare.build as prepare_module
from whet.core.errors import ExitCode, RunFailedError, WhetError
from whet.data.config import DataConfig, Source
from whet.data.conversation import Conversation
from whet.data.prepare.build import choose_shard_count, prepare_shard, prepare_store, require_all_shards
from whet.data.prepare.store import Store
from whet.data.prepare.workers import WorkerPool, WorkQueue
from whet.data.render.chat_tokenizer import ChatTokenizer
from whet.data.render.renderer import LayoutMismatchError, Renderer

from .conftest import in_memory_chat_tokenizer, line
from .template_families import CHATML, tokenizer_of
from .test_prepare import GOOD, account, go, left_behind

Workers = Callable[[int], None]


@pytest.fixture
def workers(monkeypatch: pytest.MonkeyPatch) -> Workers:
    """Chunks of four records, and as many processes as a test says."""
    monkeypatch.setattr(chunks_module, "_SMALL_CHUNK", 4)

    def use(number: int) -> None:
        monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(number)))

    return use


@pytest.fixture
def mixed(tmp_path: Path) -> list[Source]:
    """Two files with all that can happen to a line: 64 records in 16 chunks."""
    for name, first in (("a", 0), ("b", 30)):
        lines = []
        for i in range(first, first + 32):
            turns = [
                (role, f"{role} {i % 13} " + "x" * (i % 7)) for _ in range(i % 3 + 1) for role in ("user", "assistant")
            ]
            lines.append("{" if i % 11 == 5 else line(("system", "Be brief."), *turns))
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines))
    return [Source(path=str(tmp_path / f"{name}.jsonl")) for name in "ab"]


OPTIONS = [
    {"too_long": "split", "deduplicate": False},
    {"too_long": "split", "deduplicate": True},
    {"too_long": "truncate", "train_on": "last"},
]


def config_of(sources: list[Source], **options: Any) -> DataConfig:
    return DataConfig(sources=sources, **{"max_length": 64, "on_bad": "skip", **options})


def tokenizer_for(config: DataConfig) -> ChatTokenizer:
    return in_memory_chat_tokenizer(tokenizer_of(CHATML), config.train_on)


def content(store: Store) -> dict[str, bytes]:
    """All files, the manifest with the accounts among them."""
    return {file.name: file.read_bytes() for file in store.folder.iterdir()}


def fresh(config: DataConfig, cache: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, bytes]:
    monkeypatch.setenv("WHET_CACHE", str(cache))
    made = prepare_store(config, config.sources, "train", tokenizer_for(config))
    assert not made.reused
    assert left_behind(cache) == []
    return content(made.store)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_the_number_of_processes_does_not_matter(
    mixed: list[Source], workers: Workers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    made = []
    for number in (1, 2, 3):
        workers(number)
        made.append(fresh(config_of(mixed, **options), tmp_path / f"cache-{number}", monkeypatch))
    assert set(made[0]) >= {"tokens.bin", "tokens.idx", "loss.bin", "loss.idx", "origin.npy", "targets.npy",
                            "hashes.npy", "manifest.json", "tokenizer.json"}  # fmt: skip
    assert made[1] == made[0]
    assert made[2] == made[0]


def test_a_store_of_many_chunks_is_that_of_one(
    mixed: list[Source], workers: Workers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    workers(2)
    many = fresh(config_of(mixed), tmp_path / "many", monkeypatch)
    monkeypatch.setattr(chunks_module, "_SMALL_CHUNK", 1000)
    one = fresh(config_of(mixed), tmp_path / "one", monkeypatch)
    assert json.loads(one.pop("manifest.json")) == json.loads(many.pop("manifest.json"))
    assert one == many


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))), ids=str)
def test_machines_may_make_their_shards_in_any_order(
    mixed: list[Source], workers: Workers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, order: tuple[int, ...]
) -> None:
    workers(2)
    config = config_of(mixed, **OPTIONS[1])
    alone = fresh(config, tmp_path / "alone", monkeypatch)
    monkeypatch.setenv("WHET_CACHE", str(tmp_path / "shared"))
    arguments = (config, config.sources, "train", tokenizer_for(config))
    with pytest.raises(WhetError, match=r"16 of 16 chunks of the train data are missing \(chunk 0, 1, 2, .* …\)"):
        require_all_shards(*arguments)
    assert left_behind(tmp_path / "shared") == []
    for number in order[:-1]:
        prepare_shard(*arguments, number, 3)
    with pytest.raises(WhetError, match=rf"[56] of 16 chunks .* missing \(chunk {order[-1]}, {order[-1] + 3}, "):
        require_all_shards(*arguments)
    folder = prepare_shard(*arguments, order[-1], 3)
    require_all_shards(*arguments)
    monkeypatch.setattr(chunks_module.Chunk, "save", None)  # nothing is left to be made
    made = prepare_store(*arguments)
    assert (made.reused, made.store.folder) == (False, folder)
    assert content(made.store) == alone
    assert left_behind(tmp_path / "shared") == []
    assert prepare_shard(*arguments, 0, 3) == folder  # nothing to do
    require_all_shards(*arguments)


def test_shards_killed_and_repeated_give_the_store_of_one_process(
    mixed: list[Source], workers: Workers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Any number of shards, in any order; each may be killed after some chunks, and is then made again."""
    workers(1)
    config = config_of(mixed, deduplicate=True)
    arguments = (config, config.sources, "train", tokenizer_for(config))
    alone, examples = fresh(config, tmp_path / "alone", monkeypatch), itertools.count()

    @settings(max_examples=3, deadline=None)
    @given(st.data())
    def check(data: st.DataObject) -> None:
        monkeypatch.setenv("WHET_CACHE", str(tmp_path / f"shared-{next(examples)}"))
        count = data.draw(st.sampled_from([1, 2, 5, 17]), "count")
        for number in data.draw(st.permutations(range(count)), "order"):
            chunks = data.draw(st.none() | st.integers(0, 2), "killed after")
            if chunks is not None:
                with monkeypatch.context() as fault, contextlib.suppress(KeyboardInterrupt):
                    fault.setattr(chunks_module.Chunk, "save", killed_after(chunks))
                    prepare_shard(*arguments, number, count)
            prepare_shard(*arguments, number, count)
        require_all_shards(*arguments)
        assert content(prepare_store(*arguments).store) == alone

    check()


def killed_after(chunks: int) -> Callable[..., None]:
    save, made = chunks_module.Chunk.save, itertools.count()

    def save_or_die(chunk: Any, path: Path) -> None:
        if next(made) >= chunks:
            raise KeyboardInterrupt
        save(chunk, path)

    return save_or_die


def test_a_shard_that_ends_after_the_merge_has_lost_nothing(
    mixed: list[Source], workers: Workers, own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    workers(1)
    config = config_of(mixed)
    arguments = (config, config.sources, "train", tokenizer_for(config))
    save = chunks_module.Chunk.save

    def save_after_the_merge(chunk: Any, path: Path) -> None:
        monkeypatch.setattr(chunks_module.Chunk, "save", save)
        prepare_store(*arguments)
        save(chunk, path)

    monkeypatch.setattr(chunks_module.Chunk, "save", save_after_the_merge)
    folder = prepare_shard(*arguments, 0, 2)
    assert (folder / "manifest.json").exists()
    assert left_behind(own_cache) == []


@pytest.mark.parametrize(
    ("size", "records", "cores", "shards"),
    [(100, 3, 1, 1), (2**30, 10**6, 1, 16), (2**30, 10**6, 8, 2), (2**40, 10**9, 1, 64), (2**30, 2000, 1, 2)],
)
def test_the_number_of_shards_comes_from_the_size_of_the_data(
    monkeypatch: pytest.MonkeyPatch, size: int, records: int, cores: int, shards: int
) -> None:
    monkeypatch.setattr(chunks_module, "source_bytes", lambda source: size)
    monkeypatch.setattr(chunks_module, "expected_records", lambda source: records)
    assert choose_shard_count([Source(path="a.jsonl")], cores) == shards


def test_shards_of_a_template_that_branches_on_content_are_merged(
    own_cache: Path, workers: Workers, jsonl: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first shard is made with the render cache, and the second finds that it may not be used."""
    path = jsonl(*(line(("user", "?"), ("assistant", "odd" if i == 39 else f"say {i}")) for i in range(40)))
    workers(1)
    config = config_of([Source(path=str(path))])
    arguments = (config, config.sources, "train", tokenizer_for(config))
    wanted = content(prepare_store(*arguments).store)
    shutil.rmtree(own_cache)
    layout = Renderer.layout

    def wrong_if_cached(renderer: Renderer, conversation: Conversation) -> Any:
        if renderer._layout_cache is not None and conversation.messages[1].content == "odd":
            raise LayoutMismatchError
        wrong = replace(conversation, messages=(*conversation.messages, *conversation.messages))
        return layout(renderer, conversation if renderer._layout_cache is None else wrong)

    monkeypatch.setattr(Renderer, "layout", wrong_if_cached)
    for number in range(2):
        prepare_shard(*arguments, number, 2)
    require_all_shards(*arguments)
    assert content(prepare_store(*arguments).store) == wanted


@pytest.mark.parametrize("number", [1, 3])
def test_a_template_that_branches_on_content_disables_the_render_cache(
    own_cache: Path, workers: Workers, jsonl: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    lines = [line(("user", "?"), ("assistant", "odd" if i == 39 else f"say {i}")) for i in range(40)]
    path, layout = jsonl(*lines), Renderer.layout
    workers(number)
    wanted = content(go(path).store)
    shutil.rmtree(own_cache)

    def wrong_if_filled_in(renderer: Renderer, conversation: Conversation) -> Any:
        if renderer._layout_cache is not None and conversation.messages[1].content == "odd":
            raise LayoutMismatchError
        wrong = replace(conversation, messages=(*conversation.messages, *conversation.messages))
        return layout(renderer, conversation if renderer._layout_cache is None else wrong)

    monkeypatch.setattr(Renderer, "layout", wrong_if_filled_in)
    assert content(go(path).store) == wanted
    assert left_behind(own_cache) == []


# What is wrong with the data


@pytest.mark.parametrize("number", [1, 2, 3])
def test_of_several_bad_lines_the_first_is_named(
    own_cache: Path, jsonl: Callable[..., Path], workers: Workers, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    workers(number)
    path = jsonl(*("{" if i in (6, 7, 13, 14, 30, 39) else GOOD for i in range(1, 41)))
    settle = chunks_module.tokenize_records

    def slow_at_first(items: Any, *rest: Any) -> None:
        items = list(items)
        if items[0].origin.line < 9:
            time.sleep(0.3)  # the others find theirs long before
        settle(items, *rest)

    monkeypatch.setattr(chunks_module, "tokenize_records", slow_at_first)
    with pytest.raises(WhetError, match=rf"^{path}:6: .*data\.on_bad=skip"):
        go(path)
    assert left_behind(own_cache) == []
    entry = account(go(path, on_bad="skip"))
    assert entry["reasons"] == {"broken JSON": 6}
    assert entry["first"]["broken JSON"] == [f"{path}:{i}" for i in (6, 7, 13, 14, 30)]
    assert entry["conversations"]["kept"] == 34


def test_data_that_cannot_be_read_leaves_nothing_either(own_cache: Path, jsonl: Callable[..., Path]) -> None:
    path = jsonl('{"colour": "red"}', '{"colour": "blue"}')
    with pytest.raises(WhetError, match=str(path)):
        go(path)
    assert left_behind(own_cache) == []


# What happens to processes


@contextmanager
def at_most(seconds: int) -> Iterator[None]:
    """An error instead of a test that hangs."""

    def late(*_: Any) -> None:
        raise TimeoutError

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def test_a_worker_that_is_killed_is_an_error_and_the_rest_is_kept(
    own_cache: Path, jsonl: Callable[..., Path], workers: Workers, monkeypatch: pytest.MonkeyPatch
) -> None:
    workers(2)
    path, save, parent = jsonl(*[GOOD] * 80), chunks_module.Chunk.save, os.getpid()

    def save_or_die(chunk: Any, file: Path) -> None:
        if file.name == "00000005.npz" and os.getpid() != parent:
            os.kill(os.getpid(), signal.SIGKILL)
        save(chunk, file)

    with monkeypatch.context() as patch, at_most(60):
        patch.setattr(chunks_module.Chunk, "save", save_or_die)
        with pytest.raises(
            RunFailedError, match=r"worker process died while preparing data \(exit code -9.*again to contin"
        ) as caught:
            go(path)
    assert caught.value.exit_code == ExitCode.FAILED
    (work,) = left_behind(own_cache)
    kept = {file.name for file in (own_cache / work).iterdir()} & {f"{i:08}.npz" for i in range(5)}
    assert len(kept) >= 4  # the other worker may have been in the middle of one
    assert len(go(path).store) == 80
    assert left_behind(own_cache) == []


def test_a_worker_that_dies_holding_a_lock_blocks_nobody() -> None:
    queue = WorkQueue(0, 1, 2)

    def work(worker: int, queue: WorkQueue) -> None:
        if worker == 0:
            queue._next.get_lock().acquire()
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(0.2)
        next(queue.claim())

    with at_most(30), pytest.raises(RunFailedError, match="-9"):
        WorkerPool(work, 2, queue).wait(lambda: None)


def test_an_exception_in_a_worker_has_its_traceback(
    own_cache: Path, jsonl: Callable[..., Path], workers: Workers, monkeypatch: pytest.MonkeyPatch
) -> None:
    workers(2)

    def broken(*_: Any) -> None:
        raise ZeroDivisionError("oops")

    monkeypatch.setattr(chunks_module.Chunk, "save", broken)
    with pytest.raises(RuntimeError, match=r"(?s)test_prepare_workers\.py.*ZeroDivisionError: oops"):
        go(jsonl(*[GOOD] * 20))
    assert list(own_cache.glob("stores/*/manifest.json")) == []


def test_no_more_than_a_chunk_is_in_memory(
    own_cache: Path, jsonl: Callable[..., Path], workers: Workers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reading, rendering and merging: each holds records or arrays of one chunk at a time."""
    workers(1)
    tokenized, merged = list[int](), list[int]()
    settle, add = chunks_module.tokenize_records, prepare_module.merge_chunks.__globals__["StoreWriter"].add

    def count(items: Any, *rest: Any) -> None:
        items = list(items)
        tokenized.append(len(items))
        settle(items, *rest)

    def measure(writer: Any, tokens: Any, loss: Any, sizes: Any, *rest: Any) -> None:
        merged.append(len(sizes))
        add(writer, tokens, loss, sizes, *rest)

    monkeypatch.setattr(chunks_module, "tokenize_records", count)
    monkeypatch.setattr("whet.data.prepare.chunks.StoreWriter.add", measure)
    assert len(go(jsonl(*[GOOD] * 41)).store) == 41
    assert tokenized == merged == [4] * 10 + [1]
