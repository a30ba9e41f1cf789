"""A model that carries state from token to token is trained one conversation at a time, and only so."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from whet.model.load.builtin_models import builtin_folder

Steps = Callable[[Path], list[dict[str, Any]]]
STATEFUL: dict[str, dict[str, Any]] = {
    "Mamba": {"state_size": 4},
    "Lfm2": {"layer_types": ["conv", "full_attention"], "intermediate_size": 48, "num_attention_heads": 4,
             "num_key_value_heads": 2},
}  # fmt: skip


@pytest.fixture(params=STATEFUL)
def model(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    import transformers

    folder = tmp_path / "model"
    settings = {"vocab_size": 416, "hidden_size": 32, "num_hidden_layers": 2, **STATEFUL[request.param]}
    torch.manual_seed(0)
    config = getattr(transformers, f"{request.param}Config")(**settings)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    transformers.AutoTokenizer.from_pretrained(builtin_folder("builtin:tiny")).save_pretrained(folder)
    return f"model.path={folder}"


def test_packed_it_is_refused_and_unpacked_it_learns_and_exports(
    whet: Any, recipe: str, model: str, tmp_path: Path, steps_of: Steps
) -> None:
    run = tmp_path / "run"
    options = [model, f"run.dir={run}", "train.steps=6", "data.max_length=256"]
    packed = whet("train", recipe, *options)
    assert packed.code == 1
    assert "data.packing=none train.micro_rows=1" in packed.err
    ended = whet("train", recipe, *options, "data.packing=none", "train.micro_rows=1")
    assert ended.code == 0, ended.err
    assert "every batch has one conversation" in ended.err
    losses = [line["loss"] for line in steps_of(run)]
    assert losses[-1] < losses[0] - 0.1
    assert json.loads((run / "plan.json").read_text())["attention"].startswith("native")
    again = whet("eval", run, "--json")
    assert again.code == 0, again.err
    last = json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])
    assert json.loads(again.out)["val_loss"] == pytest.approx(last["val_loss"], rel=1e-6)
