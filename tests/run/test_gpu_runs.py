"""Whole runs on CUDA."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from whet.config import read_config
from whet.run.lifecycle import run_training
from whet.training import overlap
from whet.training.output import FolderOutput
from whet.training.overlap import EarlyForwardPasses

pytestmark = pytest.mark.gpu

TINY = Path(__file__).parents[2] / "recipes" / "tiny.yaml"


def _losses(folder: Path) -> list[float]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line["loss"] for line in lines if "loss" in line]


def _run(folder: Path, *overrides: str) -> list[float]:
    run_training(read_config(TINY, [f"run.dir={folder}", *overrides]), resume=True)
    return _losses(folder)


def test_bf16_learns_what_fp32_with_the_reference_attention_learns(tmp_path):
    exact = _run(tmp_path / "exact", "train.precision=fp32", "model.attention=eager")
    fast = _run(tmp_path / "fast")
    assert json.loads((tmp_path / "fast" / "plan.json").read_text())["attention"] == "short"
    assert fast == pytest.approx(exact, rel=0.02)


def test_micro_batches_do_not_change_the_loss(tmp_path):
    options = ("train.precision=fp32", "data.packing=none")
    one = _run(tmp_path / "one", *options, "train.micro_rows=1")
    four = _run(tmp_path / "four", *options, "train.micro_rows=4")
    assert one[:5] == pytest.approx(four[:5], rel=1e-5)


def test_fp64_is_the_same_packed_or_not(tmp_path):
    packed = _run(tmp_path / "packed", "train.precision=fp64")
    alone = _run(tmp_path / "alone", "train.precision=fp64", "data.packing=none", "train.micro_rows=3")
    assert packed == pytest.approx(alone, rel=1e-9)


@pytest.mark.parametrize("options", [(), ("adapter.rank=8", "adapter.dropout=0.1"), ("parallel.recompute=full",)])
def test_steps_that_start_early_are_the_same_steps(tmp_path, options, monkeypatch):
    """Micro-batches of one row, an evaluation after ten steps and a checkpoint after five."""
    began = []
    launch_first = EarlyForwardPasses.launch_first
    monkeypatch.setattr(EarlyForwardPasses, "launch_first", lambda self: began.append(self.step) or launch_first(self))
    options = ("train.deterministic=true", "train.micro_rows=1", "eval.every=10", "checkpoint.every=5", *options)
    early = _run(tmp_path / "early", *options)
    assert began == [step for step in range(2, 30) if step % 5]
    monkeypatch.setattr(overlap, "_MAX_GRADIENT_BYTES", 0)
    in_turn = _run(tmp_path / "in turn", *options)
    assert len(began) == 23
    assert early == in_turn


@pytest.mark.parametrize("adapter", [(), ("adapter.rank=8", "adapter.dropout=0.1")])
def test_a_stopped_deterministic_run_continues_bit_for_bit(tmp_path, adapter, monkeypatch):
    options = ("train.deterministic=true", *adapter)
    whole = _run(tmp_path / "whole", *options)
    config = read_config(TINY, [f"run.dir={tmp_path / 'cut'}", *options])

    original = FolderOutput.write_step

    def log_then_die(self, line):
        original(self, line)
        if line["step"] == 12:
            raise ZeroDivisionError

    with monkeypatch.context() as patch:
        patch.setattr(FolderOutput, "write_step", log_then_die)
        with pytest.raises(ZeroDivisionError):
            run_training(config, resume=False)
    run_training(config, resume=True)
    assert _losses(tmp_path / "cut") == whole
