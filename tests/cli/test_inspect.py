"""`whet inspect` shows what is in the store and in the plan."""

from __future__ import annotations

import csv
import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from whet.data.prepare.store import Store
from whet.model.load.builtin_models import builtin_folder

STEPS = ("train.epochs=1.0", "train.steps=null")


@pytest.fixture(scope="module")
def prepared(whet: Any, recipe: str) -> dict[str, Any]:
    ended = whet("prepare", recipe, "--json")
    assert ended.code == 0, ended.err
    return dict(json.loads(ended.out))


@pytest.fixture(scope="module")
def store(prepared: dict[str, Any]) -> Store:
    return Store(Path(prepared["store"]))


def result_of(ended: Any) -> dict[str, Any]:
    assert ended.code == 0, ended.err
    return dict(json.loads(ended.out))


def error_of(ended: Any) -> str:
    assert (ended.code, ended.out) == (1, "")
    assert "Traceback" not in ended.err
    return " ".join(ended.err.split())


# Documents


def test_documents_of_a_store(whet: Any, store: Store) -> None:
    from transformers import AutoTokenizer

    shown = result_of(whet("inspect", store.folder, "--json", "--limit", 3))["documents"]
    tokenizer = AutoTokenizer.from_pretrained(builtin_folder("builtin:tiny"))
    assert [document["id"] for document in shown] == [0, 1, 2]
    for i, document in enumerate(shown):
        assert document["ids"] == store.ids(i).tolist()
        assert document["loss"] == store.loss(i).astype(int).tolist()
        assert document["text"] == tokenizer.decode(document["ids"])
        assert (document["source"], document["line"]) == ("builtin:orders/train", i + 1)
    later = result_of(whet("inspect", store.folder, "--json", "--start", 2, "--limit", 1))["documents"]
    assert later == shown[2:]
    rest = result_of(whet("inspect", store.folder, "--json", "--start", len(store) - 1, "--limit", 9))["documents"]
    assert [document["id"] for document in rest] == [len(store) - 1]


def test_a_configuration_and_a_run_show_their_data(whet: Any, recipe: str, store: Store, tiny_run: Path) -> None:
    wanted = result_of(whet("inspect", store.folder, "--json"))
    assert result_of(whet("inspect", recipe, "--json")) == wanted
    assert result_of(whet("inspect", tiny_run, "--json")) == wanted
    held = result_of(whet("inspect", recipe, "--validation", "--json"))
    assert held != wanted
    other = result_of(whet("inspect", recipe, "data.max_length=400", "--limit", 1, "--json"))
    assert other["documents"] == wanted["documents"][:1]


def test_supervised_text_is_in_brackets(whet: Any, store: Store) -> None:
    out = whet("inspect", store.folder, "--limit", 1).out
    document = result_of(whet("inspect", store.folder, "--limit", 1, "--json"))["documents"][0]
    title, _, text = out.partition("\n")
    assert f"document 0 of {len(store)} · builtin:orders/train:1 · {len(document['ids'])} tokens" in title
    assert re.sub("[⟦⟧]", "", text).rstrip("\n") == document["text"].rstrip("\n")
    (supervised,) = re.findall("⟦(.*?)⟧", text, re.DOTALL)
    assert supervised.endswith("<|im_end|>")
    assert document["text"].endswith(supervised + "\n")


def test_pieces_are_printed_one_per_line(whet: Any, store: Store) -> None:
    out = whet("inspect", store.folder, "--limit", 1, "--pieces").out
    rows = [line.split(maxsplit=3) for line in out.splitlines()[1:] if line.strip()]
    assert [int(row[0]) for row in rows] == list(range(len(rows)))
    assert [int(row[1]) for row in rows] == store.ids(0).tolist()
    assert [len(row) > 2 and row[2] == "supervised" for row in rows] == store.loss(0).tolist()
    assert rows[0][-1] == "<|im_start|>"


def test_a_bin_file_with_and_without_a_tokenizer(whet: Any, store: Store, tmp_path: Path) -> None:
    for suffix in (".bin", ".idx"):
        shutil.copy(store.folder / f"tokens{suffix}", tmp_path / f"mine{suffix}")
    tokenizer = builtin_folder("builtin:tiny")
    wanted = result_of(whet("inspect", store.folder, "--limit", 2, "--json"))["documents"]
    for name in ("mine.bin", "mine.idx", "mine"):
        shown = result_of(whet("inspect", tmp_path / name, "--tokenizer", tokenizer, "--limit", 2, "--json"))[
            "documents"
        ]
        assert [document["text"] for document in shown] == [document["text"] for document in wanted]
        assert [document["ids"] for document in shown] == [document["ids"] for document in wanted]
        assert [document["line"] for document in shown] == [1, 2]
    bare = result_of(whet("inspect", tmp_path / "mine.bin", "--json"))["documents"][0]
    assert (bare["text"], bare["ids"]) == (None, wanted[0]["ids"])
    counts = result_of(whet("inspect", tmp_path / "mine.bin", "--count", tmp_path / "counts.csv", "--json"))
    assert counts["tokens"] == int(store.lengths.sum())
    assert counts["supervised_tokens"] == counts["tokens"] - len(store)  # nothing predicts a document's first token
    assert str(wanted[0]["ids"][5]) in whet("inspect", tmp_path / "mine.bin", "--limit", 1).out


# Counts


@pytest.mark.parametrize("what", ["store", "config"])
def test_the_counts_add_up_to_the_ledger(
    whet: Any, recipe: str, prepared: dict[str, Any], store: Store, tmp_path: Path, what: str
) -> None:
    place = prepared["store"] if what == "store" else recipe
    counts = result_of(whet("inspect", place, "--count", tmp_path / "counts.csv", "--json"))
    rows = list(csv.DictReader((tmp_path / "counts.csv").open()))
    account = next(account for account in prepared["ledger"] if account["use"] == "train")
    assert sum(int(row["tokens"]) for row in rows) == account["tokens"] == counts["tokens"]
    assert sum(int(row["supervised"]) for row in rows) == account["supervised_tokens"] == counts["supervised_tokens"]
    assert [int(row["tokens"]) for row in rows] == store.lengths.tolist()
    assert [int(row["supervised"]) for row in rows] == store.targets.tolist()
    assert [(row["source"], int(row["line"])) for row in rows] == [
        ("builtin:orders/train", i + 1) for i in range(len(store))
    ]
    assert counts["documents"] == len(rows) == len(store)


# Steps


@pytest.mark.parametrize("packing", ["best-fit", "k-bin", "none"])
def test_the_batches_are_the_plan(whet: Any, recipe: str, store: Store, packing: str) -> None:
    first = result_of(whet("inspect", recipe, *STEPS, f"data.packing={packing}", "--batch", 1, "--json"))
    batches = [
        result_of(whet("inspect", recipe, *STEPS, f"data.packing={packing}", "--batch", step, "--json"))
        for step in range(1, first["steps"] + 1)
    ]
    assert batches[0] == first
    seen = []
    for step, batch in enumerate(batches, 1):
        assert (batch["step"], batch["row_length"]) == (step, 256)
        for row in batch["rows"]:
            at = 0
            for document in row["documents"]:
                assert document["start"] == at
                at = document["end"]
                assert at - document["start"] == store.lengths[document["id"]]
                assert document["supervised"] == store.targets[document["id"]]
                assert document["origin"] == str(store.origin(document["id"]))
                seen.append(document["id"])
            assert row["tokens"] == at <= 256
    assert sorted(seen) == list(range(len(store)))  # an epoch
    assert all(len(row["documents"]) == 1 for batch in batches for row in batch["rows"]) == (packing == "none")


def test_a_batch_of_a_run_is_what_it_trained_on(whet: Any, tiny_run: Path, recipe: str) -> None:
    shown = result_of(whet("inspect", tiny_run, "--batch", 12, "--json"))
    assert shown == result_of(whet("inspect", recipe, "--batch", 12, "--json"))
    metrics = [json.loads(line) for line in (tiny_run / "metrics.jsonl").read_text().splitlines()]
    by_step = {line["step"]: line["supervised_tokens"] for line in metrics if "loss" in line}
    supervised = sum(document["supervised"] for row in shown["rows"] for document in row["documents"])
    assert supervised == by_step[12] - by_step[11]


def test_a_drawn_batch_has_borders_and_padding(whet: Any, recipe: str) -> None:
    shown = result_of(whet("inspect", recipe, "--batch", 2, "--json"))
    out = whet("inspect", recipe, "--batch", 2).out
    title, *rows = out.splitlines()
    assert f"step 2 of 12 · {len(shown['rows'])} rows of 256 tokens" in title
    for line, row in zip(rows, shown["rows"], strict=False):
        assert line.count("│") == len(row["documents"]) + 1
        assert f"{row['tokens']}/256, {len(row['documents'])} documents" in line
        assert abs(line.count("·") - (256 - row["tokens"]) * 100 / 256) <= 1
        assert "█" in line


# Errors


def test_a_missing_target_is_an_error(whet: Any, recipe: str, store: Store, tmp_path: Path) -> None:
    assert f"{tmp_path}/no: no such file" in error_of(whet("inspect", tmp_path / "no"))
    assert f"{tmp_path}: neither a store" in error_of(whet("inspect", tmp_path))
    assert str(tmp_path / "no.bin") in error_of(whet("inspect", tmp_path / "no.bin")).replace("no.idx", "no.bin")
    assert "--batch 13: the run has the steps 1 to 12" in error_of(whet("inspect", recipe, "--batch", 13))
    assert "--batch needs a configuration or a run" in error_of(whet("inspect", store.folder, "--batch", 1))
    assert f"no document {len(store)}; there are {len(store)}, counted from 0" in error_of(
        whet("inspect", store.folder, "--start", len(store))
    )
    assert "no validation data (data.validation)" in error_of(
        whet("inspect", recipe, "data.validation=null", "--validation")
    )
    assert "no tokenizer here" in error_of(whet("inspect", store.folder, "--tokenizer", tmp_path))
    assert whet("inspect", recipe, "--batch", 0).code == 2


def test_a_damaged_store_is_an_error(whet: Any, store: Store, tmp_path: Path) -> None:
    copy = shutil.copytree(store.folder, tmp_path / "copy")
    (copy / "loss.bin").write_bytes(b"")
    assert "loss.bin" in error_of(whet("inspect", copy))
    (copy / "manifest.json").unlink()
    assert "neither a store (manifest.json) nor a run" in error_of(whet("inspect", copy))
