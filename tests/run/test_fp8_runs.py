"""Whole runs in 8 bits, their roundings emulated; and that such a run's model can be used anywhere."""

from __future__ import annotations

import functools
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from whet.model.fp8.conversion import convert_to_fp8_
from whet.run.models import model_builder
from whet.training import precision

Steps = Callable[[Path], list[dict[str, Any]]]
STEPS, LEARNED = (40, 0.5) if os.environ.get("WHET_TEST_ALL") == "1" else (16, 0.8)
"""How many steps the longer runs take, and the share of the first loss that is left at most after them."""
LONG = (f"train.steps={STEPS}", "data.packing=best-fit", f"eval.every={max(16, STEPS // 2)}")


@pytest.fixture
def emulated(monkeypatch: pytest.MonkeyPatch) -> None:
    """8 bits on this CPU, for the tiny model's matrices too."""
    monkeypatch.setattr(precision, "require_fp8", lambda device, precision: None)
    monkeypatch.setattr(precision, "fp8_unsupported_reason", lambda device: None)
    monkeypatch.setattr(
        model_builder,
        "convert_to_fp8_",
        functools.partial(convert_to_fp8_, convert_if=lambda *sizes: True, emulate=True),
    )


@pytest.fixture(scope="module")
def bf16(shared_run: Callable[..., Path]) -> Path:
    return shared_run("bf16", "train.precision=bf16", *LONG)


@pytest.mark.usefixtures("emulated")
@pytest.mark.parametrize(
    "options",
    [
        ["train.precision=fp8"],
        pytest.param(["train.precision=fp8", "model.dtype=bf16"], marks=pytest.mark.slow),
    ],
    ids=" ".join,
)
def test_it_learns_what_bf16_learns(
    whet: Callable[..., Any], recipe: str, tmp_path: Path, bf16: Path, steps_of: Steps, options: list[str]
) -> None:
    folder = tmp_path / "run"
    ended = whet("train", recipe, f"run.dir={folder}", *LONG, *options, "export.at_end=merged")
    assert ended.code == 0, ended.err  # the export was compared too
    assert "14 layers multiply in fp8" in ended.err
    assert "without compilation" in ended.err
    plan = json.loads((folder / "plan.json").read_text())
    assert (plan["precision"], plan["eight_bit_layers"]) == (options[0].partition("=")[2], 14)
    found, wanted = ([line["loss"] for line in steps_of(run)] for run in (folder, bf16))
    assert found == pytest.approx(wanted, rel=0.05)
    assert found != wanted
    assert found[-1] < found[0] * LEARNED
    flops = [[line["flops"] for line in steps_of(run)] for run in (folder, bf16)]
    assert flops[0] == flops[1]


@pytest.mark.usefixtures("emulated")
def test_a_killed_run_continues_bit_for_bit(
    whet: Callable[..., Any], recipe: str, tmp_path: Path, exact_of: Callable[[Path], list[Any]]
) -> None:
    arguments = ["train.steps=12", "checkpoint.every=4", "export.at_end=none", "train.precision=fp8"]
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    assert whet("train", recipe, f"run.dir={whole}", *arguments).code == 0
    shutil.copytree(whole, cut)
    shutil.rmtree(cut / "checkpoints" / "step-000012")
    (cut / "status.json").unlink()
    assert whet("train", recipe, f"run.dir={cut}", *arguments, "--resume").code == 0
    assert exact_of(cut) == exact_of(whole)


def test_its_model_is_evaluated_and_exported_without_fp8_hardware(
    whet: Callable[..., Any], tmp_path: Path, bf16: Path
) -> None:
    """Weights and checkpoints are bf16's: only the configuration differs."""
    run = tmp_path / "run"
    shutil.copytree(bf16, run)
    config = (run / "config.yaml").read_text()
    assert config.count("precision: bf16") == 1
    (run / "config.yaml").write_text(config.replace("precision: bf16", "precision: fp8"))
    results = []
    for folder in (run, bf16):
        ended = whet("eval", folder, "--json")
        assert ended.code == 0, ended.err
        results.append(json.loads(ended.out)["val_loss"])
    assert results[0] == results[1]
    assert whet("export", run, "--to", "merged").code == 0


@pytest.mark.usefixtures("emulated")
def test_a_faulty_step_is_run_again_in_8_bits(whet: Callable[..., Any], recipe: str, tmp_path: Path) -> None:
    folder, options = tmp_path / "run", ["train.precision=fp8", "train.optimizer.lr=1e30", "eval.at_start=false"]
    ended = whet("train", recipe, f"run.dir={folder}", *options, "train.schedule.warmup=0")
    assert ended.code == 3, ended.err
    (file,) = (folder / "faults").iterdir()
    assert json.loads(file.read_text())["precision"] == "fp8"
    again = whet("train", "--replay", file, "--json")
    assert again.code == 0, again.err
    assert json.loads(again.out)["reproduced"] is True
    assert "this device computes in" not in again.err


def test_an_installed_torchao_is_silent(start: Callable[..., Any], recipe: str, tmp_path: Path) -> None:
    """transformers imports it whether 8 bits are wanted or not, and it complains of extensions that do not fit."""
    pytest.importorskip("torchao")
    _, errors = start("train", recipe, f"run.dir={tmp_path / 'run'}", "--smoke").communicate()
    assert "steps on" in errors
    assert not [line for line in errors.splitlines() if "Failed to load" in line or "Enum" in line]


@pytest.mark.usefixtures("emulated")
def test_the_evaluated_weights_are_the_exported_ones(whet: Callable[..., Any], recipe: str, tmp_path: Path) -> None:
    folder, options = tmp_path / "run", ["train.precision=fp8", "train.steps=4", "eval.every=4", "export.at_end=merged"]
    assert whet("train", recipe, f"run.dir={folder}", *options).code == 0
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    measured = [line["val_loss"] for line in lines if "val_loss" in line]
    config = (folder / "config.yaml").read_text()
    (folder / "config.yaml").write_text(config.replace("precision: fp8", "precision: bf16"))
    assert json.loads(whet("eval", folder, "--json").out)["val_loss"] == measured[-1]


def test_a_device_without_it_is_refused(
    whet: Callable[..., Any], recipe: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.accelerator.current_accelerator", lambda check_available=True: None)
    folder = tmp_path / "run"
    ended = whet("train", recipe, f"run.dir={folder}", "train.precision=fp8", "--json")
    assert ended.code == 1
    error = json.loads(ended.out)["error"]
    assert "train.precision: fp8" in error
    assert "train.precision=bf16" in error
    checked = whet("check", recipe, "train.precision=fp8", "--json")
    assert checked.code == 1
    (fault,) = [each for each in json.loads(checked.out)["checks"] if each["level"] == "fault"]
    assert (fault["check"], "train.precision=bf16" in fault["text"]) == ("model", True)


def test_the_removed_row_wise_scaling_is_refused(whet: Callable[..., Any], recipe: str, tmp_path: Path) -> None:
    ended = whet("train", recipe, f"run.dir={tmp_path / 'run'}", "train.precision=fp8-rowwise", "--json")
    assert ended.code == 1
    assert json.loads(ended.out)["error"].endswith(
        "train.precision: fp8-rowwise was removed: it was never faster than fp8 and learned the same. "
        "Set train.precision=fp8"
    )
    assert not (tmp_path / "run").exists()
