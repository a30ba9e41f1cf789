"""Runs, stores and exports that an earlier version of whet wrote still resume, evaluate, export and load.

`tests/fixtures/runs-ada285c.tar.xz` holds what commit ada285c wrote on 2026-11-17, with all paths relative to its root:

    runs/full       recipes/tiny.yaml in fp32, 8 steps, paused after step 4 (--until 4)
    runs/full-end   the metrics.jsonl of the same run, resumed to step 8 by that commit
    runs/lora       a finished LoRA run of 4 steps with its adapter export; without the optimizer state
    store           a data.store folder
    cache           the WHET_CACHE of these runs: their stores, and builtin:tiny
"""

from __future__ import annotations

import json
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from whet.data.prepare.store import Store

ARCHIVE = Path(__file__).parents[1] / "fixtures" / "runs-ada285c.tar.xz"
EXACT_KEYS = ("step", "epoch", "lr", "conversations", "tokens", "supervised_tokens", "flops")


@pytest.fixture
def earlier(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The unpacked archive, which is also the working directory."""
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(tmp_path, filter="data")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WHET_CACHE", str(tmp_path / "cache"))
    return tmp_path


def run_json(whet: Any, *arguments: Any) -> dict[str, Any]:
    ended = whet(*arguments, "--json")
    assert ended.code == 0, ended.err
    return dict(json.loads(ended.out))


def assert_same_metrics(found: list[dict[str, Any]], expected: list[dict[str, Any]]) -> None:
    """Losses and norms up to rounding: the order of fp32 sums depends on the CPU, and on where a version computes what.
    Seen on 2026-11-17: bit-identical until the last MLP was computed at all positions again, then 2e-10."""
    assert [line.keys() for line in found] == [line.keys() for line in expected]
    for line, wanted in zip(found, expected, strict=True):
        assert {key: line.get(key) for key in EXACT_KEYS} == {key: wanted.get(key) for key in EXACT_KEYS}
        assert line == pytest.approx(wanted, rel=1e-5)


def test_a_paused_run_resumes_to_the_same_end(
    whet: Any, shipped_recipe: str, earlier: Path, exact_of: Callable[[Path], list[dict[str, Any]]]
) -> None:
    options = ("train.precision=fp32", "train.steps=8", "checkpoint.every=4", "run.dir=runs/full")
    ended = whet("train", shipped_recipe, *options, "--resume")
    assert ended.code == 0, ended.err
    assert_same_metrics(exact_of(Path("runs/full")), exact_of(Path("runs/full-end")))
    assert json.loads(Path("runs/full/status.json").read_text())["state"] == "finished"
    assert json.loads(Path("runs/full/exports/merged/certificate.json").read_text())["verified"] is True
    assert sorted(path.name for path in Path("cache/stores").iterdir() if path.is_dir()) == [
        "2fa2e96aab53842946ac", "3a5e250e6b2a52e1b0e5",
    ]  # fmt: skip


def test_a_run_is_evaluated_to_what_it_logged(whet: Any, earlier: Path) -> None:
    for run in ("runs/full", "runs/lora"):
        logged = [json.loads(line) for line in Path(run, "metrics.jsonl").read_text().splitlines()]
        (last,) = (line for line in logged if line["step"] == 4 and "val_loss" in line)
        found = run_json(whet, "eval", run, "--no-base")
        for key in ("val_loss", "val_accuracy", "val_bpb"):
            assert found[key] == pytest.approx(last[key], rel=1e-5), (run, key)


def test_a_finished_run_is_exported_again(whet: Any, earlier: Path) -> None:
    """Its adapter is the one that was exported then, to the bit; merged, it predicts what the adapter does."""
    before = load_file("runs/lora/exports/adapter/adapter_model.safetensors")
    adapter = run_json(whet, "export", "runs/lora", "--to", "adapter", "--out", "adapter")
    assert adapter["certificate"]["verified"] is True
    torch.testing.assert_close(load_file("adapter/adapter_model.safetensors"), before, rtol=0, atol=0)
    merged = run_json(whet, "export", "runs/lora", "--to", "merged")
    assert (merged["export"], merged["certificate"]["verified"]) == ("runs/lora/exports/merged", True)
    from peft import AutoPeftModelForCausalLM
    from transformers import AutoModelForCausalLM

    ids = torch.arange(3, 40)[None]
    with torch.no_grad():
        wanted = AutoPeftModelForCausalLM.from_pretrained("runs/lora/exports/adapter")(input_ids=ids).logits
        found = AutoModelForCausalLM.from_pretrained("runs/lora/exports/merged")(input_ids=ids).logits
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)


def test_an_export_is_checked_and_answers(whet: Any, earlier: Path) -> None:
    certificate = json.loads(Path("runs/lora/exports/adapter/certificate.json").read_text())
    again = run_json(whet, "export", "runs/lora", "--check", "runs/lora/exports/adapter")["certificate"]
    again = {key: again[key] for key in certificate}  # later versions say more
    assert {**again, "max_logit_difference": 0, "kl": 0} == {**certificate, "max_logit_difference": 0, "kl": 0}
    options = ("--prompt", "Please send two red mugs to Anna.", "--max-new-tokens", 12)
    answers = [
        run_json(whet, "chat", model, *options)["answer"] for model in ("runs/lora", "runs/lora/exports/adapter")
    ]
    assert answers[0] == answers[1]


def test_a_store_is_read_and_used_as_it_is(whet: Any, shipped_recipe: str, earlier: Path) -> None:
    files = {path: path.read_bytes() for path in Path("store").rglob("*") if path.is_file()}
    options = ("train.precision=fp32", "train.steps=1", "eval.at_start=false", "export.at_end=none")
    assert whet("train", shipped_recipe, *options, "data.store=store", "run.dir=runs/stored").code == 0
    assert {path: path.read_bytes() for path in files} == files
    assert json.loads(Path("runs/stored/ledger.json").read_text())["stores"]["train"].endswith("store/train")
    assert whet("train", shipped_recipe, *options, "data.store=again", "run.dir=runs/again").code == 0
    for use, documents in (("train", 200), ("validation", 40)):
        before, now = Store(Path("store", use)), Store(Path("again", use))
        assert len(before) == len(now) == documents
        for document in range(documents):
            np.testing.assert_array_equal(before.ids(document), now.ids(document))
            np.testing.assert_array_equal(before.loss(document), now.loss(document))
        changed = {"checksums": now.checksums, "key": now.manifest["key"]}  # the key is that of the current format
        assert before.manifest | changed == now.manifest
