"""Sources become a store once; every conversation is accounted for; nothing half-made is left."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

import whet.data.prepare.build as chunks_module
import whet.data.prepare.build as prepare_module
import whet.data.prepare.tokenize as settle_module
from examples import examples
from whet.core.errors import WhetError
from whet.data.config import DataConfig, Source
from whet.data.prepare.build import PreparedStore, prepare_store

from .conftest import in_memory_chat_tokenizer, line
from .template_families import CHATML, CHATML_TEMPLATE, PHI3, small_tokenizer, tokenizer_of

Jsonl = Callable[..., Path]
GOOD = line(("user", "Hi"), ("assistant", "Hello"))
LONG = line(("user", "Hi"), ("assistant", "x" * 100))
LONG_PROMPT = line(("user", "x" * 100), ("assistant", "Hello"))


def go(
    *paths: Path | str,
    use: str = "train",
    tokenizer: PreTrainedTokenizerFast | None = None,
    stops: tuple[int, ...] = (),
    max_samples: int | None = None,
    where: str | None = None,
    today: str | None = None,
    **options: Any,
) -> PreparedStore:
    sources = [Source(path=str(path), max_samples=max_samples, where=where) for path in paths]
    config = DataConfig(sources=sources, **{"max_length": 60, **options})
    conversation_tokenizer = in_memory_chat_tokenizer(tokenizer or tokenizer_of(CHATML), config.train_on, stops, today)
    return prepare_store(config, sources, use, conversation_tokenizer)


def account(prepared: PreparedStore, number: int = 0) -> dict[str, Any]:
    return dict(prepared.store.manifest["accounts"][number])


def left_behind(cache: Path) -> list[str]:
    """What is in the cache beside complete stores: folders of work, locks, temporary files."""
    stores = {file.parent for file in cache.glob("stores/*/manifest.json")}
    return sorted(str(path.relative_to(cache)) for path in cache.glob("stores/*") if path not in stores)


@pytest.mark.usefixtures("own_cache")
def test_conversations_become_documents_in_order_with_their_origins(
    jsonl: Jsonl, chatml: PreTrainedTokenizerFast
) -> None:
    one = jsonl(GOOD, "", line(("user", "a"), ("assistant", "b")), name="one.jsonl")
    two = jsonl(line(("user", "c"), ("assistant", "d")), name="two.jsonl")
    store = go(one, two).store
    texts = [chatml.decode(store.ids(i)) for i in range(len(store))]
    assert [text.split("assistant\n")[1] for text in texts] == ["Hello<|im_end|>\n", "b<|im_end|>\n", "d<|im_end|>\n"]
    assert [str(store.origin(i)) for i in range(3)] == [f"{one}:1", f"{one}:3", f"{two}:1"]
    assert chatml.decode(store.ids(0)[store.loss(0)]) == "Hello<|im_end|>"


@pytest.mark.usefixtures("own_cache")
def test_the_ledger_counts_the_tokens_of_the_store(jsonl: Jsonl) -> None:
    prepared = go(jsonl(GOOD, LONG, GOOD), too_long="truncate")
    entry = account(prepared)
    assert entry["tokens"] == int(prepared.store.lengths.sum())
    assert entry["supervised_tokens"] == int(prepared.store.targets.sum())
    assert entry["eos_supervised"] == 2 / 3


LINES = {
    "good": GOOD,
    "too long": LONG,
    "broken JSON": "{",
    "unknown role": line(("human", "Hi")),
    "no assistant turn": line(("user", "Hi")),
    "empty turn": line(("user", "Hi"), ("assistant", "")),
    "starts with the assistant": line(("assistant", "Hi")),
    "bad text": '{"messages": [{"role": "user", "content": "\\ud800"}]}',
}


KINDS = st.lists(st.sampled_from([*LINES, "filtered", "blank"]), max_size=12)
FILTERED = line(("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "d"))


@settings(max_examples=examples(40), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    files=st.lists(KINDS, min_size=1, max_size=3),
    too_long=st.sampled_from(["drop", "truncate", "split"]),
    deduplicate=st.booleans(),
)
def test_every_record_is_kept_or_dropped(
    own_cache: Path, tmp_path: Path, files: list[list[str]], too_long: str, deduplicate: bool
) -> None:
    paths, seen = [], set[str]()
    for number, kinds in enumerate(files):
        paths.append(tmp_path / f"{number}.jsonl")
        kinds[:0] = ["good"]
        paths[-1].write_text("".join({**LINES, "filtered": FILTERED, "blank": ""}[kind] + "\n" for kind in kinds))
    prepared = go(*paths, on_bad="skip", too_long=too_long, deduplicate=deduplicate, where="turns < 4")
    listed = [json.loads(text) for text in (prepared.store.folder / "ledger.jsonl").read_text().splitlines()]
    at = 0
    for number, (path, kinds) in enumerate(zip(paths, files, strict=True)):
        fates: dict[str, list[int]] = {}
        for place, kind in enumerate(kinds, 1):
            is_kept = kind == "good" or (kind == "too long" and too_long == "truncate")
            if is_kept and kind == "too long":
                fates.setdefault("truncated", []).append(place)
            if is_kept and kind in seen:
                fates.setdefault("duplicate", []).append(place)
            if not is_kept or (deduplicate and kind in seen):
                layout_or_reason = {"filtered": "filter"}.get(kind, "duplicate" if is_kept else kind)
                fates.setdefault(f"-{layout_or_reason}", []).append(place)
            else:
                fates.setdefault("kept", []).append(place)
            seen |= {kind} if is_kept else set()
        fates.pop("-blank", None)
        entry, copies = account(prepared, number), fates.get("duplicate", [])
        dropped = {
            layout_or_reason[1:]: places
            for layout_or_reason, places in fates.items()
            if layout_or_reason.startswith("-")
        }
        kept = fates.get("kept", [])
        assert entry["reasons"] == {reason: len(places) for reason, places in dropped.items()}
        assert entry["conversations"] == {
            "in": sum(kind != "blank" for kind in kinds),
            "kept": len(kept),
            "dropped": sum(map(len, dropped.values())),
            "truncated": len(fates.get("truncated", [])),
            "split": 0,
        }
        assert entry["duplicates"] == len(copies)
        mine = range(at, at + len(kept))
        at += len(kept)
        assert [str(prepared.store.origin(i)) for i in mine] == [f"{path}:{place}" for place in kept]
        assert entry["tokens"] == int(prepared.store.lengths[mine.start : mine.stop].sum())
        assert entry["supervised_tokens"] == int(prepared.store.targets[mine.start : mine.stop].sum())
        assert entry["supervised_tokens"] == sum(int(prepared.store.loss(i)[1:].sum()) for i in mine)
        for reason in ("duplicate", "truncated", *dropped):
            wanted = dropped.get(reason, fates.get(reason, []))
            assert entry["first"].get(reason, []) == [f"{path}:{place}" for place in wanted[:5]]
        every = [("dropped", reason, place) for reason, places in dropped.items() for place in places]
        every += [("truncated", "too long", place) for place in fates.get("truncated", [])]
        every += [("kept", "duplicate", place) for place in copies if not deduplicate]
        own = [each for each in listed if each["source"] == number]
        assert sorted((each["outcome"], each["reason"], each["line"]) for each in own) == sorted(every)
        assert [each["line"] for each in own] == sorted(each["line"] for each in own)
        assert {each["file"] for each in own} <= {str(path)}
    assert [each["source"] for each in listed] == sorted(each["source"] for each in listed)
    assert at == len(prepared.store)


@pytest.mark.usefixtures("own_cache")
def test_batches_do_not_mix_up_lines(
    jsonl: Jsonl, chatml: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(settle_module, "_BATCH_CONVERSATIONS", 4)
    lines = ["{" if i % 3 == 0 else line(("user", "?"), ("assistant", f"answer {i}")) for i in range(30)]
    store = go(jsonl(*lines), on_bad="skip").store
    assert len(store) == 20
    for document in range(20):
        number = store.origin(document).line - 1
        assert chatml.decode(store.ids(document)[store.loss(document)]) == f"answer {number}<|im_end|>"


# What happens to lines that cannot be used


@pytest.mark.parametrize("kind", [kind for kind in LINES if kind not in ("good", "too long")])
def test_a_bad_line_is_an_error_with_its_origin(own_cache: Path, jsonl: Jsonl, kind: str) -> None:
    path = jsonl(GOOD, GOOD, LINES[kind], GOOD)
    with pytest.raises(WhetError) as caught:
        go(path)
    assert str(caught.value).startswith(f"{path}:3: ")
    assert "data.on_bad=skip" in str(caught.value)
    assert left_behind(own_cache) == []


def test_a_too_long_conversation_can_be_an_error(own_cache: Path, jsonl: Jsonl) -> None:
    path = jsonl(GOOD, LONG)
    with pytest.raises(WhetError, match=rf"^{path}:2: \d+ tokens, over data\.max_length = 60.*data\.too_long=drop"):
        go(path, too_long="error")
    assert left_behind(own_cache) == []


@pytest.mark.usefixtures("own_cache")
def test_a_truncated_conversation_is_a_prefix_without_an_added_end(
    jsonl: Jsonl, chatml: PreTrainedTokenizerFast
) -> None:
    path = jsonl(GOOD, LONG)
    whole = go(path, max_length=1000).store
    cut = go(path, too_long="truncate")
    assert cut.store.lengths.tolist() == [int(whole.lengths[0]), 60]
    assert cut.store.ids(1).tolist() == whole.ids(1).tolist()[:60]
    assert cut.store.loss(1).tolist() == whole.loss(1).tolist()[:60]
    assert chatml.eos_token_id not in cut.store.ids(1)[cut.store.loss(1)]
    assert account(cut)["conversations"] == {"in": 2, "kept": 2, "dropped": 0, "truncated": 1, "split": 0}
    assert account(cut)["eos_supervised"] == 0.5


@pytest.mark.usefixtures("own_cache")
def test_a_conversation_truncated_before_its_answer_is_counted_as_both(jsonl: Jsonl) -> None:
    entry = account(go(jsonl(GOOD, LONG_PROMPT), too_long="truncate"))
    assert entry["conversations"] == {"in": 2, "kept": 1, "dropped": 1, "truncated": 1, "split": 0}
    assert entry["reasons"] == {"nothing to learn": 1}
    assert set(entry["first"]) == {"nothing to learn", "truncated"}


@pytest.mark.usefixtures("own_cache")
def test_a_conversation_of_exactly_the_longest_length_is_kept(jsonl: Jsonl) -> None:
    path = jsonl(GOOD, LONG)
    length = int(go(path, max_length=1000).store.lengths[1])
    assert len(go(path, max_length=length).store) == 2
    assert len(go(path, max_length=length - 1).store) == 1


@pytest.mark.parametrize("lines", [["{"], [LONG], ["", "  "]])
def test_nothing_left_to_train_on_is_an_error_with_the_reasons(own_cache: Path, jsonl: Jsonl, lines: list[str]) -> None:
    path = jsonl(*lines)
    with pytest.raises(
        WhetError, match=rf"no conversation is left to train on \({path}: (\d |no conversation in it)"
    ) as caught:
        go(path, on_bad="skip")
    assert ("data.max_length" in str(caught.value)) == (lines == [LONG])
    assert (f"The first: {path}:1: not valid JSON" in str(caught.value)) == (lines == ["{"])
    assert left_behind(own_cache) == []


@pytest.mark.usefixtures("own_cache")
def test_one_source_without_usable_records_is_not_an_error(jsonl: Jsonl) -> None:
    prepared = go(jsonl("{", name="bad"), jsonl(GOOD, name="good"), on_bad="skip")
    assert [account(prepared, i)["conversations"]["kept"] for i in (0, 1)] == [0, 1]
    assert [account(prepared, i)["use"] for i in (0, 1)] == ["train", "train"]


# Once


@pytest.mark.usefixtures("own_cache")
def test_the_second_call_reuses_the_store(jsonl: Jsonl, monkeypatch: pytest.MonkeyPatch) -> None:
    path = jsonl(GOOD)
    first = go(path)
    monkeypatch.setattr(prepare_module, "_build_store", None)
    second = go(path)
    assert (first.reused, second.reused) == (False, True)
    assert first.store.folder == second.store.folder
    assert second.store.ids(0).tolist() == first.store.ids(0).tolist()


OTHERS: dict[str, dict[str, Any]] = {
    "max_length": {"max_length": 61},
    "too_long": {"too_long": "truncate"},
    "on_bad": {"on_bad": "skip"},
    "train_on last": {"train_on": "last"},
    "train_on all": {"train_on": "all"},
    "max_samples": {"max_samples": 1},
    "where": {"where": "turns > 0"},
    "deduplicate": {"deduplicate": True},
    "language": {"tokenizer": small_tokenizer(" " + CHATML_TEMPLATE, CHATML.markers, eos="<|im_end|>")},
    "date": {"today": "2031-02-03"},
}


@pytest.mark.usefixtures("own_cache")
@pytest.mark.parametrize("changed", OTHERS.values(), ids=OTHERS)
def test_another_option_is_another_store(jsonl: Jsonl, changed: dict[str, Any]) -> None:
    path = jsonl(GOOD, GOOD)
    assert go(path).store.folder != go(path, **changed).store.folder


@pytest.mark.usefixtures("own_cache")
def test_other_content_stops_or_order_of_sources_is_another_store(jsonl: Jsonl) -> None:
    one, two = jsonl(GOOD, name="one"), jsonl(GOOD, "", GOOD, name="two")
    end = (tokenizer_of(PHI3).convert_tokens_to_ids("<|end|>"),)
    folders = [go(one, two).store.folder, go(two, one).store.folder, go(one).store.folder]
    folders += [go(one, tokenizer=tokenizer_of(PHI3), stops=stops).store.folder for stops in ((), end)]
    jsonl(GOOD, GOOD, name="one")
    folders.append(go(one, two).store.folder)
    assert len(set(folders)) == 6


@pytest.mark.usefixtures("own_cache")
def test_the_same_content_under_another_name_is_the_same_store_under_that_name(jsonl: Jsonl) -> None:
    made, found = go(jsonl("{", GOOD, name="a"), on_bad="skip"), go(jsonl("{", GOOD, name="b"), on_bad="skip")
    assert (made.reused, found.reused) == (False, True)
    assert account(found)["source"].endswith("/b")
    assert account(found)["first"] == {"broken JSON": [f"{account(found)['source']}:1"]}
    assert str(found.store.origin(0)) == f"{account(found)['source']}:2"


@pytest.mark.usefixtures("own_cache")
def test_packing_and_validation_change_no_store(jsonl: Jsonl) -> None:
    path = jsonl(GOOD, GOOD)
    assert go(path).store.folder == go(path, packing="none").store.folder
    assert go(path, validation={"fraction": 0.5}).reused


def test_a_store_without_manifest_is_made_again(own_cache: Path, jsonl: Jsonl) -> None:
    path = jsonl(GOOD)
    folder = go(path).store.folder
    (folder / "manifest.json").unlink()
    again = go(path)
    assert (again.reused, len(again.store)) == (False, 1)


@pytest.mark.usefixtures("own_cache")
def test_built_in_orders_can_be_prepared() -> None:
    prepared = go("builtin:orders", max_samples=5, max_length=1000)
    assert len(prepared.store) == 5
    assert account(prepared)["conversations"]["in"] == 5


# Nothing half-made


class _TestError(Exception):
    pass


@pytest.mark.parametrize("error", [_TestError, KeyboardInterrupt])
def test_an_interrupted_preparation_leaves_no_store_and_continues(
    own_cache: Path, jsonl: Jsonl, monkeypatch: pytest.MonkeyPatch, error: type[BaseException]
) -> None:
    path = jsonl(*[GOOD] * 20)
    monkeypatch.setattr(chunks_module, "_SMALL_CHUNK", 4)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0})
    save = chunks_module.Chunk.save
    saved: list[str] = []

    def break_in_the_middle(chunk: Any, file: Path) -> None:
        if len(saved) == 3:
            raise error
        saved.append(file.name)
        save(chunk, file)

    with monkeypatch.context() as patch:
        patch.setattr(chunks_module.Chunk, "save", break_in_the_middle)
        with pytest.raises(error):
            go(path)
    assert list(own_cache.glob("stores/*/manifest.json")) == []
    (work,) = left_behind(own_cache)
    assert sorted(file.name for file in (own_cache / work).iterdir()) == saved
    again: list[str] = []
    monkeypatch.setattr(chunks_module.Chunk, "save", lambda chunk, file: (again.append(file.name), save(chunk, file)))
    assert len(go(path).store) == 20
    assert len(again) == 2
    assert not set(again) & set(saved)
    assert left_behind(own_cache) == []


def test_a_merge_that_breaks_leaves_no_store(own_cache: Path, jsonl: Jsonl, monkeypatch: pytest.MonkeyPatch) -> None:
    path = jsonl(GOOD)

    def broken(*_: Any) -> None:
        raise _TestError

    with monkeypatch.context() as patch:
        patch.setattr("whet.data.prepare.chunks.StoreWriter.finish", broken)
        with pytest.raises(_TestError):
            go(path)
    assert [name for name in left_behind(own_cache) if not name.endswith(".work")] == []
    assert len(go(path).store) == 1
    assert left_behind(own_cache) == []


@pytest.fixture
def tiny_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 64 KiB."""
    if os.geteuid() != 0:
        pytest.skip("mounting a small disk needs root")
    folder = tmp_path / "disk"
    folder.mkdir()
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(folder)], capture_output=True, check=False
    )
    if done.returncode:
        pytest.skip(f"mounting is not permitted here: {done.stderr.decode().strip()}")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


def test_too_small_a_disk_is_refused_before_anything_is_written(
    tiny_disk: Path, jsonl: Jsonl, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WHET_CACHE", str(tiny_disk))
    with pytest.raises(WhetError, match=r"too full for the prepared data: 1 MiB needed, 0 MiB free.*WHET_CACHE"):
        go(jsonl(GOOD))
    assert left_behind(tiny_disk) == []


@pytest.mark.usefixtures("own_cache")
def test_the_required_disk_space_is_enough(jsonl: Jsonl, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    monkeypatch.setattr(prepare_module, "require_disk_space", lambda _, size, __: asked.append(size))
    different = [LONG.replace("x", f"{number:04}", 1) for number in range(6000)]
    one, two = jsonl(*different[::2], name="one"), jsonl(*different[1::2], name="two")
    store = go(one, two, max_length=1000).store
    assert sum(file.stat().st_size for file in store.folder.iterdir()) <= asked[0]
    assert asked[0] == 2 * (one.stat().st_size + two.stat().st_size) + 2**20


@pytest.mark.parametrize("workers", [1, 2])
def test_a_full_disk_is_an_error_with_a_remedy_and_can_be_continued(
    tiny_disk: Path, jsonl: Jsonl, monkeypatch: pytest.MonkeyPatch, workers: int
) -> None:
    monkeypatch.setenv("WHET_CACHE", str(tiny_disk))
    monkeypatch.setattr(prepare_module, "require_disk_space", lambda *_: None)  # someone else filled it meanwhile
    monkeypatch.setattr(chunks_module, "_SMALL_CHUNK", 10)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(workers)))
    path = jsonl(*[line(("user", "Hi"), ("assistant", "x" * 500))] * 200)
    with pytest.raises(WhetError, match=r"the disk is full while preparing the data\. Free some space.*WHET_CACHE"):
        go(path, max_length=1000)
    (work,) = left_behind(tiny_disk)
    finished = sorted((tiny_disk / work).iterdir())
    assert 0 < len(finished) < 20
    assert all(file.suffix == ".npz" and not file.name.startswith(".") for file in finished)  # whole ones
    subprocess.run(["mount", "-o", "remount,size=20m", str(tiny_disk)], check=True)
    times, seen = [file.stat().st_mtime_ns for file in finished], list[int]()
    merge = prepare_module.merge_chunks

    def look_and_merge(*arguments: Any) -> None:
        seen.extend(file.stat().st_mtime_ns for file in finished)
        merge(*arguments)

    monkeypatch.setattr(prepare_module, "merge_chunks", look_and_merge)
    assert len(go(path, max_length=1000).store) == 200
    assert seen == times  # nothing was made twice
    assert left_behind(tiny_disk) == []


def test_ids_beyond_two_bytes_are_stored_whole(own_cache: Path, jsonl: Jsonl, monkeypatch: pytest.MonkeyPatch) -> None:
    path = jsonl(GOOD)
    small = go(path).store
    monkeypatch.setattr(PreTrainedTokenizerFast, "__len__", lambda _: 70_000)
    wide = go(path, max_length=61).store
    assert (wide.folder / "tokens.bin").stat().st_size == 2 * (small.folder / "tokens.bin").stat().st_size
    assert np.array_equal(wide.ids(0), small.ids(0))


def test_the_manifest_is_json_with_the_sources(own_cache: Path, jsonl: Jsonl) -> None:
    path = jsonl(GOOD)
    manifest = json.loads((go(path).store.folder / "manifest.json").read_text())
    assert manifest["files"] == {"name": [str(path)], "source": [0]}
    assert manifest["accounts"][0]["source"] == str(path)
