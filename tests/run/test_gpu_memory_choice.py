"""Micro-batches on a GPU: the worst batch changes nothing, memory decides, and running out of it is survived."""

from __future__ import annotations

import gc
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from whet.config import Config, read_config
from whet.execution import device_memory
from whet.fit.best_settings import fit
from whet.fit.estimate import GIB
from whet.model.load.builtin_models import builtin_folder
from whet.run.lifecycle import run_training
from whet.training import trainer

pytestmark = pytest.mark.gpu

TINY = Path(__file__).parents[2] / "recipes" / "tiny.yaml"
LARGER = (
    "model.path=random:smollm-135m", "data.max_length=1024", "train.steps=4", "train.batch={conversations: 96}",
    "data.validation=null", "train.optimizer.lr=1e-4", "model.compile=false",
)  # fmt: skip


def larger_config(folder: Path, *options: str) -> Config:
    """135 M weights, with a tokenizer that needs no download."""
    tokenizer = f"model.tokenizer={builtin_folder('builtin:tiny')}"
    return read_config(TINY, [f"run.dir={folder}", "export.at_end=none", *LARGER, tokenizer, *options])


def train_larger(folder: Path, *options: str) -> dict[str, Any]:
    run_training(larger_config(folder, *options), resume=False, save=False)
    return dict(json.loads((folder / "plan.json").read_text()))


def train(folder: Path, *options: str) -> dict[str, Any]:
    run_training(read_config(TINY, [f"run.dir={folder}", "export.at_end=none", *options]), resume=False, save=False)
    return dict(json.loads((folder / "plan.json").read_text()))


def steps(folder: Path) -> list[tuple[float, float]]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [(line["loss"], line["grad_norm"]) for line in lines if "loss" in line]


@pytest.fixture(autouse=True)
def nothing_left_of_earlier_runs() -> None:
    """Peaks are those of this test."""
    gc.collect()
    torch.cuda.empty_cache()


@pytest.fixture
def limit() -> Iterator[Any]:
    """Lets this process use so many GiB of the card."""
    total = torch.cuda.get_device_properties(0).total_memory

    def set_limit(gib: float) -> None:
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.set_per_process_memory_fraction(gib * GIB / total)

    yield set_limit
    torch.cuda.set_per_process_memory_fraction(1.0)


@pytest.mark.parametrize("options", [("adapter.rank=8",), ("adapter.rank=8", "model.compile=false"), ()], ids=" ".join)
def test_the_worst_batch_changes_nothing(
    tmp_path: Path, options: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With CUDA graphs, without, and with every weight trained by torch's AdamW, whose state is allocated late."""
    shared = (*options, "train.micro_rows=2", "train.deterministic=true", "train.steps=6")
    measured = train(tmp_path / "measured", *shared)
    assert measured["recorded"] == (options == ("adapter.rank=8",) or not options)
    monkeypatch.setattr(device_memory, "has_own_memory", lambda device: False)
    train(tmp_path / "plain", *shared)
    assert steps(tmp_path / "measured") == steps(tmp_path / "plain")


def test_memory_decides_the_micro_batch(tmp_path: Path, limit: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("whet.run.memory_choice.cache_dir", lambda: tmp_path / "cache")
    roomy = train_larger(tmp_path / "roomy")
    limit(5.0)
    tight = train_larger(tmp_path / "tight")
    assert 1 <= tight["micro_rows"] < roomy["micro_rows"]
    np.testing.assert_allclose(steps(tmp_path / "tight"), steps(tmp_path / "roomy"), rtol=2e-2)
    assert not (tmp_path / "tight" / "events.jsonl").read_text()
    assert torch.cuda.max_memory_allocated() < 5.0 * GIB


def test_another_program_on_the_card_is_survived(tmp_path: Path, limit: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.cuda.reset_peak_memory_stats()
    whole = train_larger(tmp_path / "whole", "train.micro_rows=8")
    limit(torch.cuda.max_memory_allocated() / GIB + 1.0)
    train_step, held = trainer.train_step, []

    def crowded(forward: Any, *rest: Any, **given: Any) -> Any:
        if forward.step == 0 and not held:  # later ones have started early
            held.append(torch.empty(2 * GIB, dtype=torch.uint8, device="cuda"))
        return train_step(forward, *rest, **given)

    monkeypatch.setattr(trainer, "train_step", crowded)
    plan = train_larger(tmp_path / "crowded", "train.micro_rows=8")
    assert plan["micro_rows"] < whole["micro_rows"]
    [event] = [json.loads(line) for line in (tmp_path / "crowded" / "events.jsonl").read_text().splitlines()]
    assert (event["kind"], event["step"]) == ("out-of-memory", 1)
    np.testing.assert_allclose(steps(tmp_path / "crowded"), steps(tmp_path / "whole"), rtol=2e-2)


def test_fit_measures_the_parts_of_the_peak(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("whet.run.memory_choice.cache_dir", lambda: tmp_path / "cache")
    result = fit(larger_config(tmp_path / "run"), "throughput")
    parts = result.best.memory
    weights = 135e6 * 4
    assert 0.9 < parts.weights / weights < 1.1
    assert 1.8 < parts.optimizer / parts.weights < 2.2
    assert min(parts.activations, parts.loss) > 0
    torch.cuda.reset_peak_memory_stats()
    train_larger(tmp_path / "run")
    assert 0.97 < parts.total / torch.cuda.max_memory_allocated() < 1.03
    assert result.predicted is not None
    assert 0.95 < result.predicted.total / parts.total < 1.05
    assert json.loads((tmp_path / "run" / "plan.json").read_text())["micro_rows"] == result.best.choice.micro_rows


def test_a_row_that_does_not_fit_is_recomputed(tmp_path: Path, limit: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("whet.run.memory_choice.cache_dir", lambda: tmp_path / "cache")
    train_larger(tmp_path / "roomy")
    limit(3.2)
    torch.cuda.reset_peak_memory_stats()
    plan = train_larger(tmp_path / "tight")
    assert plan["recompute"] == "full"
    assert not (tmp_path / "tight" / "events.jsonl").read_text()
    assert torch.cuda.max_memory_allocated() < 3.2 * GIB
    np.testing.assert_allclose(steps(tmp_path / "tight"), steps(tmp_path / "roomy"), rtol=2e-2)
