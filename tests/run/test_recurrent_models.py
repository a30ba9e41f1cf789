"""A model with recurrent layers is packed, their state starting anew with each conversation. A model that cannot be
packed, as with ALiBi outside transformers' attention interface, is trained in padded batches."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tiny_architectures import save_tiny_model

Steps = Callable[[Path], list[dict[str, Any]]]


def test_recurrent_layers_are_packed_trained_and_exported(
    whet: Any, recipe: str, tmp_path: Path, steps_of: Steps
) -> None:
    run = tmp_path / "run"
    model = save_tiny_model("lfm2", tmp_path / "model")
    ended = whet("train", recipe, model, f"run.dir={run}", "train.steps=2", "export.at_end=merged")
    assert ended.code == 0, ended.err
    assert "unpacked" not in ended.err
    plan = json.loads((run / "plan.json").read_text())
    assert plan["packing"] == "best-fit"
    assert plan["rows"] < plan["conversations"]
    assert json.loads((run / "exports/merged/certificate.json").read_text())["verified"]
    again = whet("eval", run, "--json")
    assert again.code == 0, again.err
    last = json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])
    assert json.loads(again.out)["val_loss"] == pytest.approx(last["val_loss"], rel=1e-6)


def test_what_cannot_be_packed_is_padded_and_exported(whet: Any, recipe: str, tmp_path: Path, steps_of: Steps) -> None:
    model = save_tiny_model("bloom", tmp_path / "model")
    run = tmp_path / "run"
    options = [model, f"run.dir={run}", "train.steps=6", "data.max_length=256", "export.at_end=merged"]
    ended = whet("train", recipe, *options)
    assert ended.code == 0, ended.err
    assert "trained unpacked, in padded batches" in ended.err
    losses = [line["loss"] for line in steps_of(run)]
    assert losses[-1] < losses[0] - 0.1
    plan = json.loads((run / "plan.json").read_text())
    assert plan["attention"].startswith("native")
    assert (plan["packing"], plan["rows"]) == ("none", plan["conversations"])
    assert plan["micro_rows"] > 1
    alone = whet("train", recipe, *options, f"run.dir={tmp_path / 'alone'}", "train.micro_rows=1")
    assert alone.code == 0, alone.err
    assert [line["loss"] for line in steps_of(tmp_path / "alone")] == pytest.approx(losses, rel=1e-5)
    again = whet("eval", run, "--json")
    assert again.code == 0, again.err
    last = json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])
    assert json.loads(again.out)["val_loss"] == pytest.approx(last["val_loss"], rel=1e-6)
