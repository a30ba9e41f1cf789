"""Whole runs on CUDA with and without CUDA graphs: the numbers are the same."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from whet.config import Config, read_config
from whet.execution import cuda_graphs
from whet.execution.cuda_graphs import GraphedHidden, StaticGradients
from whet.run.lifecycle import run_training

pytestmark = pytest.mark.gpu

TINY = Path(__file__).parents[2] / "recipes" / "tiny.yaml"
CASES = [
    (),
    ("train.micro_rows=4",),
    ("train.micro_rows=2", "data.packing=none"),
    ("quantize=nf4",),
    ("parallel.recompute=full",),
    ("model.attention=varlen",),
    ("eval.every=5", "checkpoint.every=7"),
]


def _run(folder: Path, *options: str, resume: bool = False) -> list[tuple[float, float]]:
    if "quantize=nf4" in options:
        pytest.importorskip("bitsandbytes")
    run_training(_config(folder, "adapter.rank=8", *options), resume=resume)
    return _steps(folder)


def _config(folder: Path, *options: str) -> Config:
    shared = (f"run.dir={folder}", "train.deterministic=true", "train.batch.conversations=32")
    return read_config(TINY, [*shared, *options])


def _steps(folder: Path) -> list[tuple[float, float]]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [(line["loss"], line["grad_norm"]) for line in lines if "loss" in line]


def _uses_graphs(folder: Path) -> bool:
    return bool(json.loads((folder / "plan.json").read_text())["recorded"])


@pytest.mark.parametrize("options", CASES, ids=" ".join)
def test_graphs_change_no_number(tmp_path: Path, options: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    replayed = []
    backward = GraphedHidden.backward
    monkeypatch.setattr(GraphedHidden, "backward", lambda *args: replayed.append(1) or backward(*args))
    graphed = _run(tmp_path / "with", *options)
    assert _uses_graphs(tmp_path / "with")
    assert len(replayed) >= 10
    replayed.clear()
    monkeypatch.setattr(cuda_graphs, "_LAUNCH_BOUND_S", 0.0)
    plain = _run(tmp_path / "without", *options)
    assert not _uses_graphs(tmp_path / "without")
    assert not replayed
    assert graphed == plain
    assert graphed[-1][0] < 0.95 * graphed[0][0]


def test_a_stopped_run_resumes(tmp_path: Path) -> None:
    whole = _run(tmp_path / "whole")
    run_training(_config(tmp_path / "two", "adapter.rank=8"), resume=False, until=11)
    assert _run(tmp_path / "two", resume=True) == whole


@pytest.mark.parametrize("options", [(), ("train.micro_rows=8",), ("model.dtype=bf16",)], ids=" ".join)
def test_every_weight_can_be_trained(tmp_path: Path, options: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """The head's part in tied embeddings is added in another order."""
    run_training(_config(tmp_path / "with", *options), resume=False)
    assert _uses_graphs(tmp_path / "with")
    monkeypatch.setattr(cuda_graphs, "_LAUNCH_BOUND_S", 0.0)
    run_training(_config(tmp_path / "without", *options), resume=False)
    graphed, plain = (_steps(tmp_path / name) for name in ("with", "without"))
    assert [loss for loss, _ in graphed] == pytest.approx([loss for loss, _ in plain], rel=0.01)


def test_layers_that_synchronize_with_the_host_are_not_captured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    wanted = _run(tmp_path / "wanted")
    aliased = StaticGradients.aliased

    def synchronizing(self: StaticGradients) -> Any:
        torch.ones(1, device="cuda").item()
        return aliased(self)

    monkeypatch.setattr(StaticGradients, "aliased", synchronizing)
    assert _run(tmp_path / "synchronizing") == wanted
    assert capsys.readouterr().err.count("CUDA graph capture failed") == 1
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    room = torch.empty(2**28, dtype=torch.uint8, device="cuda")
    assert torch.cuda.memory_reserved() > before
    del room
    torch.cuda.empty_cache()  # memory is found and given back as before
    assert torch.cuda.memory_reserved() == before
    torch.randn(1, device="cuda")  # the generator is usable too


def test_released_graphs_free_their_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    held = []
    release = GraphedHidden.release

    def measured(self: GraphedHidden) -> None:
        had_graphs = bool(getattr(self, "_graphs", None))
        torch.cuda.empty_cache()
        before = torch.cuda.memory_reserved()
        release(self)
        torch.cuda.empty_cache()
        if had_graphs:
            held.append(before - torch.cuda.memory_reserved())

    monkeypatch.setattr(GraphedHidden, "release", measured)
    _run(tmp_path / "run", "eval.every=10")
    assert len(held) == 4  # the worst batch's before step 1, and three evaluations
    assert min(held) > 0
