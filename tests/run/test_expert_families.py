"""Mixtures of experts from check to export, family by family: `pytest tests/run/test_expert_families.py` runs them all.

Each is a tiny random model with several experts: checked, trained with adapters and whole, stopped and resumed, by one
process and by two, evaluated, exported as one model and as an adapter.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from several_processes import torchrun
from tiny_architectures import save_tiny_model

FAMILIES = (
    "qwen3_moe", "mixtral", "gpt_oss", "deepseek_v3", "glm4_moe", "olmoe", "granitemoe", "qwen3_5_moe_text",
)  # fmt: skip
FULL = ["train.optimizer.lr=3e-3"]
LORA = ["adapter={rank: 4}", "train.optimizer.lr=1e-2"]
SHORT = [
    "train.steps=4", "train.precision=fp64", "data.max_length=256", "checkpoint.every=2", "export.at_end=none",
    "data.validation=null",
]  # fmt: skip
Steps = Callable[[Path], list[dict[str, Any]]]


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    """`model.path=FOLDER`."""
    return save_tiny_model(request.param, tmp_path_factory.mktemp(request.param))


@pytest.mark.slow
@pytest.mark.parametrize("how", [FULL, LORA], ids=["full", "lora"])
def test_a_family_from_check_to_export(
    whet: Any, recipe: str, family: str, how: list[str], tmp_path: Path, steps_of: Steps
) -> None:
    settings = [family, *SHORT, *how]
    checked = whet("check", recipe, *settings, "--json")
    assert checked.code == 0, checked.out + checked.err

    whole, resumed, pair = tmp_path / "whole", tmp_path / "resumed", tmp_path / "pair"
    ended = whet("train", recipe, f"run.dir={whole}", *settings)
    assert ended.code == 0, ended.err
    losses = [line["loss"] for line in steps_of(whole)]
    assert min(losses) < losses[0]

    ended = whet("train", recipe, f"run.dir={resumed}", *settings, "--until", "2")
    assert ended.code == 0, ended.err
    ended = whet("train", recipe, f"run.dir={resumed}", *settings, "--resume")
    assert ended.code == 0, ended.err
    assert [line["loss"] for line in steps_of(resumed)] == losses

    done = torchrun(2, "-m", "whet", "train", recipe, f"run.dir={pair}", *settings)
    assert done.returncode == 0, done.stderr
    assert [line["loss"] for line in steps_of(pair)] == pytest.approx(losses, rel=1e-9)

    scored = whet("eval", whole, "--tasks", "orders", "eval.examples=2", "--json")
    assert scored.code == 0, scored.err
    for kind in ("merged", "adapter") if how is LORA else ("hf",):
        ended = whet("export", whole, "--to", kind, "--out", tmp_path / kind)
        assert ended.code == 0, ended.err
        certificate = json.loads((tmp_path / kind / "certificate.json").read_text())
        assert certificate


@pytest.mark.slow
@pytest.mark.parametrize(
    "option", ["parallel.recompute=full", "parallel.recompute=selective", "parallel.offload=activations",
               "train.precision=bf16", "train.optimizer.name=muon", "parallel.shard=1 parallel.offload=weights"],
)  # fmt: skip
@pytest.mark.parametrize("how", [FULL, LORA], ids=["full", "lora"])
def test_a_family_with_other_memory_and_precision(
    whet: Any, recipe: str, family: str, how: list[str], option: str, tmp_path: Path, steps_of: Steps
) -> None:
    settings = [family, *SHORT, *how, "train.steps=2", *option.split()]
    ended = whet("train", recipe, f"run.dir={tmp_path / 'run'}", *settings)
    assert ended.code == 0, ended.err
    assert all(torch.isfinite(torch.tensor(line["loss"])) for line in steps_of(tmp_path / "run"))
