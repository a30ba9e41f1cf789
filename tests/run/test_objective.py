"""What is minimised and what is reported, from the configuration to the metrics."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from whet.model.load.builtin_models import builtin_folder

Steps = Callable[[Path], list[dict[str, Any]]]


@pytest.mark.parametrize("option", ["train.label_smoothing=0.2", "train.z_loss=0.01"])
def test_smoothing_and_z_loss_are_minimised_and_not_reported(
    option: str, tiny_run: Path, whet: Any, recipe: str, tmp_path: Path, steps_of: Steps
) -> None:
    options = [f"run.dir={tmp_path / 'run'}", "train.steps=1", "train.precision=fp64", "export.at_end=none"]
    assert whet("train", recipe, *options, option).code == 0
    plain, other = steps_of(tiny_run)[0], steps_of(tmp_path / "run")[0]
    assert other["loss"] == pytest.approx(plain["loss"], rel=1e-12)
    assert other["grad_norm"] != pytest.approx(plain["grad_norm"], rel=1e-5)


@pytest.fixture(scope="module")
def untied(tmp_path_factory: pytest.TempPathFactory) -> str:
    """builtin:tiny with a head of its own."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder, source = tmp_path_factory.mktemp("untied"), builtin_folder("builtin:tiny")
    model = AutoModelForCausalLM.from_pretrained(source)
    model.config.tie_word_embeddings = False
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().clone())
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(source).save_pretrained(folder)
    return f"model.path={folder}"


def test_an_adapter_of_the_head_alone_learns_and_is_merged(
    whet: Any, recipe: str, untied: str, tmp_path: Path, steps_of: Steps
) -> None:
    options = [untied, "train.steps=8", "adapter={rank: 4, targets: [lm_head]}", "train.optimizer.lr=0.02"]
    ended = whet("train", recipe, f"run.dir={tmp_path / 'run'}", *options, "export.at_end=merged")
    assert ended.code == 0, ended.err
    lines = steps_of(tmp_path / "run")
    assert lines[-1]["loss"] < lines[0]["loss"] - 0.1


def test_an_adapter_of_the_head_with_dropout_is_an_error_that_names_it(
    whet: Any, recipe: str, untied: str, tmp_path: Path
) -> None:
    ended = whet("train", recipe, f"run.dir={tmp_path / 'run'}", untied, "adapter={targets: [lm_head], dropout: 0.1}")
    assert ended.code == 1
    assert "adapter.dropout: 0.1" in ended.err


def test_an_adapter_of_a_head_that_is_the_embedding_is_refused(whet: Any, recipe: str, tmp_path: Path) -> None:
    ended = whet("train", recipe, f"run.dir={tmp_path / 'run'}", "adapter={rank: 4, targets: [lm_head]}")
    assert ended.code == 1
    assert "adapter.targets: this model's output head is tied to its embedding" in ended.err
