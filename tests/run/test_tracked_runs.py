"""A run that is tracked, profiled and measured by source, from the command line to the files."""

from __future__ import annotations

import gzip
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

SHORT = ("train.steps=4", "export.at_end=none", "eval.at_start=false", "checkpoint.every=2")


def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    events = accumulator.EventAccumulator(str(folder / "tensorboard"))
    events.Reload()
    return {name: [(e.step, e.value) for e in events.Scalars(name)] for name in events.Tags()["scalars"]}


@pytest.fixture(scope="module")
def watched(shared_run: Any) -> Path:
    profile = ("profile.steps=[2,3]", "profile.shapes=true", "profile.memory=true")
    return Path(shared_run("watched", *SHORT, *profile))


def test_the_profile_covers_the_configured_steps(watched: Path) -> None:
    found = {path.name for path in (watched / "profile").iterdir()}
    assert found == {"rank-0.trace.json.gz", "rank-0.table.txt", "flops.txt"}
    trace = json.loads(gzip.decompress((watched / "profile/rank-0.trace.json.gz").read_bytes()))
    names = [event.get("name", "") for event in trace["traceEvents"]]
    assert sum("Optimizer.step" in name for name in names) == 2
    table = (watched / "profile/rank-0.table.txt").read_text()
    assert "aten::mm" in table
    assert "Input Shapes" in table
    assert "CPU Mem" in table
    assert "model.layers.*.mlp.down_proj" in (watched / "profile/flops.txt").read_text()


def test_every_number_is_in_tensorboard(watched: Path) -> None:
    found, written = scalars(watched), lines(watched)
    for name, key in (("train/loss", "loss"), ("train/flops", "flops"), ("val/bpb", "val_bpb")):
        kept = [(line["step"], line[key]) for line in written if key in line]
        assert [step for step, _ in found[name]] == [step for step, _ in kept]
        assert [value for _, value in found[name]] == pytest.approx([value for _, value in kept], rel=1e-6)
    assert "train/mfu" not in found  # null on a CPU


def test_a_resumed_run_has_one_curve(whet: Any, watched: Path, recipe: str, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    shutil.copytree(watched, folder)
    shutil.rmtree(folder / "checkpoints" / "step-000004")
    (folder / "status.json").unlink()
    ended = whet("train", recipe, f"run.dir={folder}", *SHORT, "--resume")  # without the profile: that may change
    assert ended.code == 0, ended.err
    assert [step for step, _ in scalars(folder)["train/loss"]] == [1, 2, 3, 4]


def test_what_cannot_be_profiled_is_refused_before_the_first_step(whet: Any, recipe: str, tmp_path: Path) -> None:
    for setting, reason in (
        ("profile.steps=[3,5]", "profile.steps: [3, 5], but the run has 4 steps"),
        ("profile.steps=[3,2]", "ends before it begins"),
        ("profile={steps: [1, 2], ranks: [1]}", "profile.ranks: 1, but there are 1 processes"),
    ):
        ended = whet("train", recipe, f"run.dir={tmp_path / 'run'}", *SHORT, setting)
        assert ended.code == 1
        assert reason in " ".join(ended.err.split())
        assert not (tmp_path / "run").exists()


def test_validation_is_measured_by_source_and_in_part(whet: Any, watched: Path, tmp_path: Path) -> None:
    held = (
        "data.validation.sources=[{path: builtin:orders, split: held-out, max_samples: 3}, "
        "{path: builtin:orders, split: held-out, start: 3, max_samples: 1}]"
    )
    whole = json.loads(whet("eval", watched, "--json").out)
    parts = json.loads(whet("eval", watched, held, "--json").out)
    counts = parts["val_tokens/orders-1"], parts["val_tokens/orders-2"]
    weighed = [n * parts[f"val_loss/orders-{i}"] for i, n in enumerate(counts, 1)]
    assert sum(weighed) / sum(counts) == pytest.approx(parts["val_loss"], rel=1e-12)
    assert parts["val_loss"] == pytest.approx(whole["val_loss"], rel=1e-6)  # the same conversations, packed otherwise
    assert parts["val_bpb"] == pytest.approx(whole["val_bpb"], rel=1e-6)
    assert parts["val_loss/orders-1"] != parts["val_loss/orders-2"]
    assert not any("/" in key for key in whole if key.startswith("val_"))
    some = json.loads(whet("eval", watched, "eval.rows=1", "--json").out)
    assert 0 < some["val_part"] < 1
    assert "val_part" not in whole
    assert "val_part: 0." in whet("eval", watched, "eval.rows=1").out
