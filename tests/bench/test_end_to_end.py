"""`whet bench --end-to-end`: a recipe translated for TRL's script, stages that add up, both tools beside each other."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from whet.bench import end_to_end
from whet.bench.contenders import Contender
from whet.bench.end_to_end import require_translatable, stage_seconds, stages_markdown, trl_config, whet_stage_ends
from whet.bench.runner import ContenderError
from whet.config import Config, read_config
from whet.core.errors import WhetError

RECIPE: dict[str, Any] = {
    "model": {"path": "builtin:tiny"},
    "data": {
        "sources": [{"path": "builtin:orders", "max_samples": 32}],
        "validation": {"sources": [{"path": "builtin:orders", "split": "held-out", "max_samples": 8}]},
        "max_length": 256,
    },
    "train": {"epochs": 1, "batch": {"conversations": 8}, "schedule": {"warmup": 0.5}},
}


def config_of(folder: Path, *overrides: str) -> Config:
    (folder / "recipe.yaml").write_text(yaml.safe_dump(RECIPE))
    return read_config(folder / "recipe.yaml", overrides)


def test_trl_gets_the_settings_of_the_recipe(tmp_path: Path) -> None:
    overrides = ("adapter.rank=4", "train.optimizer.lr=3e-4", "checkpoint.every=3", "eval.at_start=false")
    config = config_of(tmp_path, *overrides)
    require_translatable(config)
    settings = trl_config(config, "/model", tmp_path, "cpu", Contender("trl"), steps=20, is_pair=True)
    expected = {
        "model_name_or_path": "/model", "dtype": "float32", "max_steps": 20, "per_device_train_batch_size": 8,
        "learning_rate": 3e-4, "warmup_steps": 10, "lr_scheduler_type": "linear", "adam_beta2": 0.95, "max_length": 256,
        "use_peft": True, "lora_r": 4, "lora_target_modules": ["all-linear"], "save_steps": 3, "eval_steps": 20,
        "eval_on_start": False, "bf16": False, "use_cpu": True, "assistant_only_loss": False,
    }  # fmt: skip
    assert {key: settings[key] for key in expected} == expected


@pytest.mark.parametrize(
    ("override", "reason"),
    [
        ("train.batch={rows: 2}", "train.batch.rows: 2: TRL's script has no such setting"),
        ("train.label_smoothing=0.1", "train.label_smoothing: 0.1"),
        ("eval.tasks=[orders]", "eval.tasks"),
        ("train.schedule.name=wsd", "train.schedule.name: wsd"),
        ("train.precision=fp8", "train.precision: fp8"),
        ("train.optimizer.name=muon", "the optimizer adamw"),
        ("data.sources=[{path: builtin:orders, epochs: 2}]", "builtin:orders: TRL cannot mix sources"),
    ],
)
def test_what_trl_cannot_do_is_refused(tmp_path: Path, override: str, reason: str) -> None:
    with pytest.raises(WhetError) as error:
        require_translatable(config_of(tmp_path, override))
    assert reason in str(error.value)


def test_stages_of_a_run_add_up_to_the_whole() -> None:
    startup = {"import_s": 4, "prepare_s": 3, "load_s": 2, "fit_s": 0, "measure_s": 5, "step_s": 1}
    lines = [
        {"step": 0, "time": 114.0, "val_loss": 2.0},
        {"step": 1, "time": 115.0, "step_s": 1.0},
        {"step": 2, "time": 117.0, "step_s": 2.0},
        {"step": 2, "time": 120.0, "val_loss": 1.0},
        {"step": 3, "time": 121.0, "step_s": 1.0},
        {"step": 3, "time": 122.0, "val_loss": 0.5},
    ]
    ends = [*whet_stage_ends(100.0, {"first_step": startup, "heartbeat": 125.0}, lines), ("exit", 126.0)]
    assert stage_seconds(100.0, ends) == {
        "start": 4, "data": 3, "model": 2, "worst batch": 0, "first validation": 5, "first step": 1, "training": 3,
        "validation": 4, "export": 3, "exit": 1,
    }  # fmt: skip


def test_trl_gets_one_of_several_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise its trainer would take all of them, by DataParallel."""
    given: list[str | None] = []

    def run_process(command: Any, log: Path, environment: Mapping[str, str]) -> Any:
        given.append(environment.get("CUDA_VISIBLE_DEVICES"))
        raise ContenderError("enough")

    monkeypatch.setattr(end_to_end.runner, "run_process", run_process)
    for visible, device in (("3,5", "cuda"), (None, "cuda"), (None, "cpu")):
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        if visible is not None:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        with pytest.raises(ContenderError):
            end_to_end._run_trl(Contender("trl"), tmp_path, {}, device)
    assert given == ["3", "0", None]


def test_a_run_that_failed_is_named_below_the_table() -> None:
    stages = stage_seconds(0.0, [("start", 1.5), ("first step", 2.0)])
    whole = {"whole_s": 9.0, "first_step_s": 2.0, "stages": stages, "steps": 3, "step_ms": 5.0, "val_loss": [2.0, 1.0]}
    entries = [
        {"title": "whet", "version": "1", "state": "measured", "rounds": {"cold": whole}},
        {"title": "TRL", "version": "2", "state": "failed", "rounds": {}, "error": "no luck", "log": "trl.log"},
    ]
    text = stages_markdown({"recipe": "r.yaml", "device": "cpu", "contenders": entries, "notes": []})
    assert "| start | 1.5 |" in text
    assert "| **whole run** | **9.0** |" in text
    assert "2.000 → 1.000" in text
    assert "TRL failed: no luck (trl.log)." in text


def test_options_of_the_other_benchmark_are_refused(whet: Any, tmp_path: Path) -> None:
    config_of(tmp_path)
    ended = whet("bench", "--end-to-end", tmp_path / "recipe.yaml", "--steps", 4, "--out", tmp_path / "out")
    assert ended.code == 2
    assert "--end-to-end takes everything from its recipe" in ended.err
    ended = whet("bench", "--end-to-end", tmp_path / "recipe.yaml", "--peers", "unsloth", "--out", tmp_path / "out")
    assert (ended.code, "compared with trl only" in ended.err) == (1, True)


@pytest.mark.slow
@pytest.mark.parametrize("adapter", [(), ("adapter.rank=4", "export.at_end=adapter")])
def test_whet_and_trl_run_the_recipe_twice(whet: Any, tmp_path: Path, adapter: tuple[str, ...]) -> None:
    pytest.importorskip("trl")
    config_of(tmp_path)
    out = tmp_path / "out"
    ended = whet("bench", "--end-to-end", tmp_path / "recipe.yaml", "--peers", "trl", "--out", out, *adapter)
    assert ended.code == 0, ended.err
    assert ended.out == (out / "bench.md").read_text()
    result = json.loads((out / "bench.json").read_text())
    losses = []
    for entry in result["contenders"]:
        assert list(entry["rounds"]) == ["cold", "warm"], entry
        for found in entry["rounds"].values():
            assert found["steps"] == 4
            assert sum(found["stages"].values()) == pytest.approx(found["whole_s"], abs=0.05)
            assert all(seconds >= -0.02 for seconds in found["stages"].values()), found
            assert found["first_step_s"] < found["whole_s"]
            losses.append(found["val_loss"])
    assert all(loss == pytest.approx(losses[0], rel=0.02) for loss in losses)  # TRL's is a mean over batches
    assert all(before > after for before, after in losses)
    assert list((out / "trl").glob("*.safetensors"))
    assert list((out / "whet" / "exports").rglob("*.safetensors"))
