"""--json: exactly one object on stdout, whatever happens; all else on stderr."""

from __future__ import annotations

import json
import math
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(scope="module")
def run(tiny_run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the finished run that commands may write into."""
    return Path(shutil.copytree(tiny_run, tmp_path_factory.mktemp("copy") / "run"))


def only_object(out: str) -> dict[str, Any]:
    assert out.endswith("\n")
    assert out.count("\n") == 1
    value = json.loads(out)
    assert isinstance(value, dict)
    return value


def test_a_rank_that_no_launcher_sets_is_an_error(whet: Any, run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The command ended with exit code 0, without its result."""
    monkeypatch.setenv("RANK", "1")
    ended = whet("eval", run, "--json")
    assert ended.code == 1
    assert "RANK is 1, and WORLD_SIZE 1" in only_object(ended.out)["error"]


def test_train(whet: Any, recipe: str, tmp_path: Path) -> None:
    ended = whet("train", recipe, f"run.dir={tmp_path / 'run'}", "train.steps=2", "export.at_end=merged", "--json")
    assert ended.code == 0, ended.err
    result = only_object(ended.out)
    assert result["run"] == str(tmp_path / "run")
    assert result["steps"] == 2
    assert result["export"] == str(tmp_path / "run/exports/merged")
    assert 0 < result["supervised_tokens"] < result["tokens"]
    assert 5 < result["loss"] < 7
    assert 5 < result["val_loss"] < 7
    assert result["train_s"] > 0


def test_prepare(whet: Any, recipe: str) -> None:
    whet("prepare", recipe)
    result = only_object(whet("prepare", recipe, "--json").out)
    assert result["conversations"] == {"in": 204, "kept": 204, "dropped": 0, "truncated": 0, "split": 0}
    assert result["reused"] is True
    assert (Path(result["store"]) / "manifest.json").exists()


def test_eval_measures_what_training_measured(whet: Any, run: Path) -> None:
    last = json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])
    result = only_object(whet("eval", run, "--json").out)
    measured = {key: last[key] for key in ("val_loss", "val_accuracy", "val_bpb")}
    perplexity = result.pop("val_perplexity")
    assert result == {"run": str(run), "step": 12, **measured}
    assert perplexity == pytest.approx(math.exp(last["val_loss"]))


def test_eval_of_an_earlier_checkpoint_with_a_task(whet: Any, run: Path) -> None:
    ended = whet("eval", f"{run}@8", "eval.tasks=[orders]", "eval.examples=2", "--json")
    result = only_object(ended.out)
    assert result["step"] == 8
    assert result["task/orders"] == 0
    assert result["val_loss"] > only_object(whet("eval", run, "--json").out)["val_loss"]


def test_export(whet: Any, run: Path) -> None:
    result = only_object(whet("export", run, "--json").out)
    assert result["export"] == str(run / "exports/merged")
    assert result["certificate"]["verified"] is True


def test_report(whet: Any, run: Path) -> None:
    result = only_object(whet("report", run, "--json").out)
    assert result == {"report": str(run / "report.html")}


def test_chat(whet: Any, run: Path) -> None:
    result = only_object(whet("chat", run, "--prompt", "Hello", "--max-new-tokens", "5", "--json").out)
    assert result["prompt"] == "Hello"
    assert isinstance(result["answer"], str)


def test_config_lists_every_setting_with_a_description(whet: Any, recipe: str) -> None:
    import yaml

    settings = only_object(whet("config", "--json").out)["settings"]
    keys = [setting["key"] for setting in settings]
    assert len(keys) == len(set(keys)) > 30
    assert all(setting["meaning"].strip() for setting in settings)
    assert all(setting["type"].strip() for setting in settings)
    tree = yaml.safe_load(Path(recipe).read_text())
    for section, names in tree.items():
        for name in names:
            assert any(key.startswith(f"{section}.{name}") for key in keys), f"{section}.{name}"


def test_config_filters_by_prefix(whet: Any) -> None:
    ended = whet("config", "train.optimizer")
    assert "train.optimizer.lr" in ended.out
    assert "model.path" not in ended.out


@pytest.mark.parametrize(
    "arguments",
    [
        ["train", "RECIPE", "train.stepz=3"],
        ["prepare", "RECIPE", "data.max_length=none"],
        ["eval", "/no/such/run"],
        ["export", "/no/such/run"],
        ["report", "/no/such/run"],
        ["chat", "/no/such/model", "--prompt", "Hi"],
        ["chat", "builtin:tiny"],
        ["config", "nonsense"],
    ],
    ids=" ".join,
)
def test_an_error_is_one_object_too(whet: Any, recipe: str, arguments: list[str]) -> None:
    ended = whet(*(recipe if argument == "RECIPE" else argument for argument in arguments), "--json")
    assert ended.code == 1
    result = only_object(ended.out)
    assert sorted(result) == ["error", "exit_code"]
    assert result["exit_code"] == 1
    assert result["error"] in " ".join(ended.err.split("\n"))


def test_without_json_stdout_is_empty_or_holds_the_answer_only(whet: Any, recipe: str, run: Path) -> None:
    assert whet("prepare", recipe).out == ""
    assert whet("eval", run).out.startswith(f"run: {run}\nstep: 12\n")
    as_json = only_object(whet("chat", run, "--prompt", "Hello", "--max-new-tokens", "5", "--json").out)
    assert whet("chat", run, "--prompt", "Hello", "--max-new-tokens", "5").out == as_json["answer"] + "\n"


def test_the_real_command_keeps_its_streams_apart(run: Path) -> None:
    command = [sys.executable, "-m", "whet", "eval", str(run), "--quiet", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert only_object(done.stdout)["step"] == 12
    assert done.stderr == ""


@pytest.mark.parametrize("arguments", [["train", "--bogus"], ["eval"], ["train", "x.yaml", "--until", "0"], ["trian"]])
def test_a_usage_error_is_one_object(arguments: list[str]) -> None:
    command = [sys.executable, "-m", "whet", *arguments, "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert only_object(done.stdout)["exit_code"] == 2
    assert only_object(done.stdout)["error"] in done.stderr


def test_a_usage_error_exits_with_2(whet: Any) -> None:
    assert whet("train").code == 2
    assert whet("trian").code == 2
    assert whet("export", "run", "--to", "gif").code == 2
    assert whet("--version").out.startswith("whet ")
