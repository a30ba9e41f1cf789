"""Sources become a store once; every conversation is accounted for; nothing half-made is left."""

from __future__ import annotations

import datetime
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

import whet.data.prepare as prepare_module
from whet.core.errors import WhetError
from whet.data.config import DataConfig, Source
from whet.data.prepare import Prepared, prepare

from .conftest import line
from .families import CHATML, CHATML_TEMPLATE, PHI3, small_tokenizer, tokenizer_of

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
    **options: Any,
) -> Prepared:
    sources = [Source(path=str(path), max_samples=max_samples) for path in paths]
    config = DataConfig(sources=sources, **{"max_length": 60, **options})
    return prepare(config, sources, use, tokenizer or tokenizer_of(CHATML), stops)


def account(prepared: Prepared, number: int = 0) -> dict[str, Any]:
    return dict(prepared.store.manifest["accounts"][number])


def left_behind(cache: Path) -> list[str]:
    """What is in the cache beside lock files."""
    return sorted(
        str(path.relative_to(cache)) for path in cache.rglob("*") if path.is_file() and path.suffix != ".lock"
    )


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
def test_the_ledger_counts_tokens_as_the_store_holds_them(jsonl: Jsonl) -> None:
    prepared = go(jsonl(GOOD, LONG, GOOD), too_long="truncate")
    told = account(prepared)
    assert told["tokens"] == int(prepared.store.lengths.sum())
    assert told["supervised_tokens"] == int(prepared.store.targets.sum())
    assert told["eos_supervised"] == 2 / 3


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


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(kinds=st.lists(st.sampled_from([*LINES, "blank"]), max_size=12), too_long=st.sampled_from(["drop", "truncate"]))
def test_what_goes_in_is_kept_or_dropped_whatever_the_mix(
    own_cache: Path, tmp_path: Path, kinds: list[str], too_long: str
) -> None:
    path = tmp_path / "mix.jsonl"
    path.write_text("".join(LINES.get(kind, "") + "\n" for kind in ["good", *kinds]))
    prepared = go(path, on_bad="skip", too_long=too_long)
    told = account(prepared)
    kept = [kind for kind in ["good", *kinds] if kind == "good" or (kind == "too long" and too_long == "truncate")]
    reasons = {kind: kinds.count(kind) for kind in kinds if kind not in ("good", "blank")}
    if too_long == "truncate":
        reasons.pop("too long", None)
    assert told["reasons"] == reasons
    assert told["conversations"] == {
        "in": 1 + sum(kind != "blank" for kind in kinds),
        "kept": len(kept),
        "dropped": sum(reasons.values()),
        "truncated": kept.count("too long"),
    }
    assert len(prepared.store) == len(kept)
    for reason, places in told["first"].items():
        wanted = [number for number, kind in enumerate(kinds, 2) if kind == reason] or [
            number for number, kind in enumerate(kinds, 2) if kind == "too long"
        ]
        assert places == [f"{path}:{number}" for number in wanted[:5]]


@pytest.mark.usefixtures("own_cache")
def test_batches_do_not_mix_up_lines(
    jsonl: Jsonl, chatml: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prepare_module, "_BATCH", 4)
    lines = ["{" if i % 3 == 0 else line(("user", "?"), ("assistant", f"answer {i}")) for i in range(30)]
    store = go(jsonl(*lines), on_bad="skip").store
    assert len(store) == 20
    for document in range(20):
        number = store.origin(document).line - 1
        assert chatml.decode(store.ids(document)[store.loss(document)]) == f"answer {number}<|im_end|>"


# What happens to lines that cannot be used


@pytest.mark.parametrize("kind", [kind for kind in LINES if kind not in ("good", "too long")])
def test_a_bad_line_stops_the_work_and_is_named(own_cache: Path, jsonl: Jsonl, kind: str) -> None:
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
def test_a_truncated_conversation_is_a_prefix_without_an_invented_end(
    jsonl: Jsonl, chatml: PreTrainedTokenizerFast
) -> None:
    path = jsonl(GOOD, LONG)
    whole = go(path, max_length=1000).store
    cut = go(path, too_long="truncate")
    assert cut.store.lengths.tolist() == [int(whole.lengths[0]), 60]
    assert cut.store.ids(1).tolist() == whole.ids(1).tolist()[:60]
    assert cut.store.loss(1).tolist() == whole.loss(1).tolist()[:60]
    assert chatml.eos_token_id not in cut.store.ids(1)[cut.store.loss(1)]
    assert account(cut)["conversations"] == {"in": 2, "kept": 2, "dropped": 0, "truncated": 1}
    assert account(cut)["eos_supervised"] == 0.5


@pytest.mark.usefixtures("own_cache")
def test_a_conversation_cut_before_its_answer_is_dropped_and_both_are_told(jsonl: Jsonl) -> None:
    told = account(go(jsonl(GOOD, LONG_PROMPT), too_long="truncate"))
    assert told["conversations"] == {"in": 2, "kept": 1, "dropped": 1, "truncated": 1}
    assert told["reasons"] == {"nothing to learn": 1}
    assert set(told["first"]) == {"nothing to learn", "truncated"}


@pytest.mark.usefixtures("own_cache")
def test_a_conversation_of_exactly_the_longest_length_is_kept(jsonl: Jsonl) -> None:
    path = jsonl(GOOD, LONG)
    length = int(go(path, max_length=1000).store.lengths[1])
    assert len(go(path, max_length=length).store) == 2
    assert len(go(path, max_length=length - 1).store) == 1


@pytest.mark.parametrize("lines", [["{"], [LONG], ["", "  "]])
def test_nothing_left_to_train_on_is_an_error_that_says_why(own_cache: Path, jsonl: Jsonl, lines: list[str]) -> None:
    path = jsonl(*lines)
    with pytest.raises(
        WhetError, match=rf"no conversation is left to train on \({path}: (\d |no conversation in it)"
    ) as caught:
        go(path, on_bad="skip")
    assert "data.max_length" in str(caught.value)
    assert left_behind(own_cache) == []


@pytest.mark.usefixtures("own_cache")
def test_one_source_without_anything_usable_is_told_but_no_error(jsonl: Jsonl) -> None:
    prepared = go(jsonl("{", name="bad"), jsonl(GOOD, name="good"), on_bad="skip")
    assert [account(prepared, i)["conversations"]["kept"] for i in (0, 1)] == [0, 1]
    assert [account(prepared, i)["use"] for i in (0, 1)] == ["train", "train"]


# Once


@pytest.mark.usefixtures("own_cache")
def test_the_second_call_reuses_the_store(jsonl: Jsonl, monkeypatch: pytest.MonkeyPatch) -> None:
    path = jsonl(GOOD)
    first = go(path)
    monkeypatch.setattr(prepare_module, "_make", None)
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
    "template": {"tokenizer": small_tokenizer(CHATML_TEMPLATE + " ", CHATML.markers, eos="<|im_end|>")},
    "eos": {"tokenizer": small_tokenizer(CHATML_TEMPLATE, CHATML.markers, eos="<|im_start|>")},
    "vocabulary": {"tokenizer": small_tokenizer(CHATML_TEMPLATE, (*CHATML.markers, "<x>"), eos="<|im_end|>")},
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
def test_an_interrupted_preparation_leaves_no_store_and_can_be_repeated(
    own_cache: Path, jsonl: Jsonl, monkeypatch: pytest.MonkeyPatch, error: type[BaseException]
) -> None:
    path = jsonl(*[GOOD] * 20)
    monkeypatch.setattr(prepare_module, "_BATCH", 4)
    add = prepare_module.StoreWriter.add
    added: list[int] = []

    def break_in_the_middle(*arguments: Any) -> None:
        added.append(1)
        if len(added) == 10:
            raise error
        add(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(prepare_module.StoreWriter, "add", break_in_the_middle)
        with pytest.raises(error):
            go(path)
    assert len(added) == 10
    assert left_behind(own_cache) == []
    assert len(go(path).store) == 20


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
def test_the_room_asked_for_is_enough(jsonl: Jsonl, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    monkeypatch.setattr(prepare_module, "need_space", lambda _, size, __: asked.append(size))
    one, two = (jsonl(*[LONG] * 3000, name=name) for name in ("one", "two"))
    store = go(one, two, max_length=1000).store
    assert sum(file.stat().st_size for file in store.folder.iterdir()) <= asked[0]
    assert asked[0] == 2 * (one.stat().st_size + two.stat().st_size) + 2**20


def test_a_disk_that_fills_up_is_an_error_with_a_remedy_and_leaves_nothing(
    tiny_disk: Path, jsonl: Jsonl, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WHET_CACHE", str(tiny_disk))
    monkeypatch.setattr(prepare_module, "need_space", lambda *_: None)  # someone else filled it meanwhile
    path = jsonl(*[line(("user", "Hi"), ("assistant", "x" * 500))] * 200)
    with pytest.raises(WhetError, match=r"the disk is full while preparing the data\. Free some space.*WHET_CACHE"):
        go(path, max_length=1000)
    assert left_behind(tiny_disk) == []
    assert [path for path in tiny_disk.rglob("*") if path.is_dir()] == [tiny_disk / "stores"]


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
    assert manifest["sources"] == [str(path)]
    assert manifest["accounts"][0]["source"] == str(path)


@pytest.mark.usefixtures("own_cache")
def test_a_date_in_the_template_is_part_of_the_stores_name(jsonl: Jsonl, monkeypatch: pytest.MonkeyPatch) -> None:
    never = "{% if false %}{{ strftime_now('%Y') }}{% endif %}"
    tokenizer = small_tokenizer(CHATML_TEMPLATE + never, CHATML.markers, eos="<|im_end|>")
    path = jsonl(GOOD)
    today = go(path, tokenizer=tokenizer)

    class Tomorrow(datetime.date):
        @classmethod
        def today(cls) -> Tomorrow:
            return cls(2031, 2, 3)

    monkeypatch.setattr("whet.data.render.datetime.date", Tomorrow)
    assert go(path, tokenizer=tokenizer).store.folder != today.store.folder
