"""Runs in sixteen bits learn what fp32 learns, continue exactly, and say what overflowed."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from whet.core.resources import multiplies_bf16
from whet.training import precision

Steps = Callable[[Path], list[dict[str, Any]]]


@pytest.fixture(scope="module")
def exact(shared_run: Callable[..., Path]) -> Path:
    """fixtures/tiny.yaml in fp32."""
    return shared_run("fp32")


@pytest.mark.parametrize(
    "options",
    [
        ["train.precision=bf16"],
        ["train.precision=fp16"],
        ["train.precision=bf16", "model.dtype=fp32"],
        ["train.precision=bf16", "model.dtype=bf16"],
    ],
    ids=" ".join,
)
def test_sixteen_bits_learn_what_fp32_learns(
    whet: Callable[..., Any], recipe: str, tmp_path: Path, exact: Path, steps_of: Steps, options: list[str]
) -> None:
    """Weights in bf16 alone wander at random by half a step of bf16, 0.4 % of each weight."""
    folder = tmp_path / "run"
    ended = whet("train", recipe, f"run.dir={folder}", "export.at_end=none", *options)
    assert ended.code == 0, ended.err
    assert ("many times slower" in ended.err) == ("train.precision=fp16" in options or not multiplies_bf16())
    found, wanted = ([line["loss"] for line in steps_of(run)] for run in (folder, exact))
    assert found == pytest.approx(wanted, rel=0.02 if "model.dtype=bf16" in options else 1e-3)
    assert found != wanted  # it was another arithmetic


@pytest.mark.parametrize("options", [["train.precision=fp16"], ["train.precision=bf16", "model.dtype=bf16"]])
def test_they_continue_bit_for_bit(
    whet: Callable[..., Any], recipe: str, tmp_path: Path, exact_of: Callable[[Path], list[Any]], options: list[str]
) -> None:
    arguments = ["train.steps=12", "checkpoint.every=4", "export.at_end=none", *options]
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    assert whet("train", recipe, f"run.dir={whole}", *arguments).code == 0
    shutil.copytree(whole, cut)
    shutil.rmtree(cut / "checkpoints" / "step-000012")
    (cut / "status.json").unlink()
    assert whet("train", recipe, f"run.dir={cut}", *arguments, "--resume").code == 0
    assert exact_of(cut) == exact_of(whole)


def test_an_overflow_of_fp16_leaves_the_step_out_and_halves_the_scale(
    whet: Callable[..., Any], recipe: str, tmp_path: Path, steps_of: Steps, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(precision, "_INITIAL_SCALE", 2.0**24)
    folder = tmp_path / "run"
    ended = whet("train", recipe, f"run.dir={folder}", "train.precision=fp16", "data.validation=null", "train.steps=20")
    assert ended.code == 0, ended.err
    lines = steps_of(folder)
    left_out = [line for line in lines if line["grad_norm"] is None]
    assert [line["step"] for line in left_out] == list(range(1, len(left_out) + 1))
    assert 3 <= len(left_out) < 15
    assert [line["loss_scale"] for line in left_out] == [2.0 ** (24 - n) for n in range(len(left_out))]
    assert lines[-1]["loss_scale"] == 2.0 ** (24 - len(left_out))
    assert lines[-1]["loss"] < lines[0]["loss"] - 0.5
    assert "NaN" not in (folder / "metrics.jsonl").read_text()


def test_bf16_weights_in_another_arithmetic_are_refused(whet: Callable[..., Any], recipe: str, tmp_path: Path) -> None:
    ended = whet("train", recipe, f"run.dir={tmp_path / 'run'}", "model.dtype=bf16", "train.precision=fp16", "--json")
    assert ended.code == 1
    assert "model.dtype" in json.loads(ended.out)["error"]
