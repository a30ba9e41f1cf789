"""What whet fit measures, picks, writes and proposes."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from whet.config import read_config
from whet.fit.best_settings import pick_best, propose
from whet.fit.estimate import GIB, MemoryParts
from whet.fit.measure import Measurement
from whet.run.memory_choice import MemoryChoice

sys.path.append(str(Path(__file__).parents[1] / "run"))
from simulated_card import AT_REST, PER_TOKEN, SimulatedCard

PARTS = MemoryParts(16 * GIB, 16 * GIB, 32 * GIB, 20 * GIB, GIB, GIB)


def measurement(rows: int, rate: float, gib: int, recompute: str = "none") -> Measurement:
    parts = MemoryParts(0, 0, 0, gib * GIB, 0, 0)
    return Measurement(MemoryChoice(rows, recompute, "none"), parts, 0, 1 / rate, rate)


@pytest.mark.parametrize(
    ("metric", "rows"),
    [("throughput", 4), ("memory", 1)],
)
def test_the_fastest_is_picked_and_of_equally_fast_ones_the_smallest(metric: Any, rows: int) -> None:
    measured = [measurement(8, 1000, 80), measurement(4, 995, 40), measurement(1, 800, 20, "full")]
    assert pick_best(measured, metric).choice.micro_rows == rows


def test_proposals_are_made_only_if_memory_limits_the_run(recipe: str) -> None:
    config = read_config(Path(recipe))
    assert propose(config, MemoryChoice(8, "none", "none"), PARTS, most_rows=8, world=1) == []
    limited = propose(config, MemoryChoice(2, "full", "none"), PARTS, most_rows=8, world=1)
    assert [sentence.split(":")[0] for sentence in limited] == [
        "train.optimizer.name=adamw16bit", "train.optimizer.name=adamw8bit", "parallel.shard=2"
    ]  # fmt: skip
    assert "16.0 GiB less" in limited[0]
    assert "24.0 GiB less" in limited[1]
    assert "32.0 GiB less" in limited[2]
    eight_bit = read_config(Path(recipe), ["train.optimizer.name=adamw8bit", "parallel.shard=4"])
    assert propose(eight_bit, MemoryChoice(2, "full", "none"), PARTS, most_rows=8, world=4) == []


def test_a_run_uses_what_fit_has_found(
    tmp_path: Path, recipe: str, whet: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("whet.run.memory_choice.cache_dir", lambda: tmp_path / "cache")
    SimulatedCard(AT_REST + 10 * 128 * PER_TOKEN).install(monkeypatch)
    options = (recipe, f"run.dir={tmp_path / 'run'}", "data.max_length=128", "train.steps=1", "train.micro_rows=auto")
    ended = whet("fit", *options, "--json")
    assert ended.code == 0, ended.err
    found = json.loads(ended.out)
    assert found["choice"]["micro_rows"] == max(each["micro_rows"] for each in found["measured"])
    assert set(found["memory_gib"]["measured"]) == {
        "weights", "gradients", "optimizer", "activations", "loss", "workspace", "total"
    }  # fmt: skip
    assert [file.name for file in tmp_path.iterdir()] == ["cache"]  # nothing is left of the trial
    assert whet("train", *options, "--dry-run").code == 0
    plan = json.loads((tmp_path / "run-dry" / "plan.json").read_text())
    assert plan["micro_rows"] == found["choice"]["micro_rows"]


def test_without_a_gpu_there_is_nothing_to_measure(recipe: str, whet: Callable[..., Any]) -> None:
    ended = whet("fit", recipe)
    assert ended.code == 1
    assert "--plan 1x1xH200" in ended.err
    assert whet("fit", recipe, "--metric", "speed").code == 2
