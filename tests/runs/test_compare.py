"""`whet runs compare`: settings, metrics, curves, and validation losses by conversation."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from made_runs import add_losses, make_run

from whet.evaluation.validation_losses import read_validation_losses
from whet.runs.compare import differing_settings

LOW = "train.optimizer.lr=1e-3"


def compared(whet: Any, *runs: Any) -> dict[str, Any]:
    ended = whet("runs", "compare", *runs, "--json")
    assert ended.code == 0, ended.err
    return dict(json.loads(ended.out))


TEN = ("train.precision=fp64", "data.validation.sources.0.max_samples=10")
"""Of the four conversations that other runs are validated on, no difference would be significant."""


@pytest.fixture(scope="module")
def run(shared_run: Callable[..., Path]) -> Path:
    return shared_run("ten-validated", *TEN)


def test_losses_by_conversation_make_the_validation_loss(whet: Any, run: Path) -> None:
    result = compared(whet, f"{run}@0", run)
    [paired] = result["paired"]
    before, after = result["metrics"]["val_loss"]
    assert paired["difference"] == pytest.approx(after - before, rel=1e-9)
    assert (paired["conversations"], paired["steps"]) == (10, [12, 0])
    assert paired["p"] < 0.01


@pytest.mark.slow
def test_two_learning_rates(whet: Any, shared_run: Callable[..., Path], run: Path) -> None:
    low = shared_run("compare-low", *TEN, LOW, "eval.every=6")
    result = compared(whet, low, run)
    assert result["settings"] == {"train.optimizer.lr": [0.001, 0.003], "eval.every": [6, None]}
    [paired] = result["paired"]
    a, b = (result["metrics"]["val_loss"][i] for i in (0, 1))
    assert paired["difference"] == pytest.approx(b - a, rel=1e-9)  # the losses of all conversations make val_loss
    assert paired["conversations"] == 10
    assert paired["p"] < 0.01
    text = whet("runs", "compare", low, run).out
    assert f"p = {paired['p']:.2g}: better, significant (10 conversations, step 12)" in text
    assert "loss of compare-low" in text
    early = compared(whet, f"{low}@6", f"{low}@best")
    assert early["paired"][0]["steps"] == [12, 6]
    assert early["paired"][0]["difference"] < 0
    refused = whet("runs", "compare", f"{low}@7", low).err
    assert "not evaluated at that step. Use one of 0, 6, 12, best, latest" in refused
    assert sorted(read_validation_losses(low)) == [0, 6, 12]


def test_conversations_are_paired_whatever_their_order(whet: Any, tmp_path: Path) -> None:
    draw = np.random.default_rng(1)
    base, noise = draw.normal(3, 1, 60), draw.normal(0, 0.02, 60)
    one, other = make_run(tmp_path / "one"), make_run(tmp_path / "other", lr=2.0)
    add_losses(one, 10, base)
    add_losses(other, 10, base + 0.01 + noise)
    [paired] = compared(whet, one, other)["paired"]
    assert paired["conversations"] == 60
    assert 0.005 < paired["difference"] < 0.02
    assert paired["interval"][0] < paired["difference"] < paired["interval"][1]
    assert (paired["p"] < 0.05) == paired["significant"] == (paired["interval"][0] > 0)
    [same] = compared(whet, one, one)["paired"]
    assert (same["difference"], same["p"], same["interval"]) == (0, 1, [0, 0])


def test_what_cannot_be_paired_is_named_and_the_rest_compared(whet: Any, tmp_path: Path) -> None:
    one, other, none = (make_run(tmp_path / name) for name in ("one", "other", "none"))
    add_losses(one, 10, np.ones(4), seed=1)
    add_losses(other, 10, np.ones(4), seed=2)
    result = compared(whet, one, other, none)
    assert "no validation conversation in common" in result["paired"][0]["problem"]
    assert "it has not been evaluated, or only by a version" in result["paired"][1]["problem"]
    assert result["metrics"]["val_loss"] == [4.1, 4.1, 4.1]
    (other / "validation.npy").write_bytes(b"\x93NUMPY damaged")
    assert "validation.npy: cannot be read" in compared(whet, one, other)["paired"][0]["problem"]
    assert whet("runs", "compare", one).code == 2
    assert whet("runs", "compare", one, tmp_path).code == 1
    shutil.rmtree(other)
    assert "no such run" in whet("runs", "compare", one, other).err


def test_settings_differ_by_key() -> None:
    a = {"run": {"name": "a"}, "data": {"sources": [{"path": "x"}, {"path": "y"}]}, "track": ["one"], "empty": {}}
    b = {"run": {"name": "b"}, "data": {"sources": [{"path": "x"}]}, "track": ["two"], "empty": {}}
    assert differing_settings([a, b]) == {"data.sources.1.path": ["y", None], "track": [["one"], ["two"]]}
