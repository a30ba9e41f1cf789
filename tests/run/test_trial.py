"""Runs that only try, and runs that pause: --smoke, --dry-run, --until."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from whet.core.yaml import read_yaml


def names(folder: Path) -> set[str]:
    return {entry.name for entry in folder.iterdir()}


def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_a_smoke_test_goes_the_whole_way_in_five_steps_and_leaves_the_run_alone(
    whet: Callable[..., Any], recipe: str, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    for _ in range(2):  # the second replaces the first
        ended = whet(
            "train",
            recipe,
            f"run.dir={folder}",
            "train.batch.conversations=500",
            "export.at_end=merged",
            "--smoke",
            "--json",
        )
        assert ended.code == 0, ended.err
    assert not folder.exists()
    tried = tmp_path / "run-smoke"
    assert [line["step"] for line in lines(tried)] == [0, 1, 2, 3, 4, 5, 5]
    assert read_yaml(tried / "config.yaml").plain()["train"]["batch"] == {"conversations": 4}
    assert "exported to" in ended.err
    assert not {"checkpoints", "exports"} & names(tried)
    assert json.loads(ended.out)["export"] is None
    assert json.loads(ended.out)["trial"] == "smoke"


@pytest.mark.parametrize("batch", ["rows=64", "tokens=100000"])
def test_a_smoke_test_keeps_the_unit_of_the_batch(
    whet: Callable[..., Any], recipe: str, tmp_path: Path, batch: str
) -> None:
    ended = whet("train", recipe, f"run.dir={tmp_path / 'run'}", f"train.batch.{batch}", "train.epochs=1", "--smoke")
    assert ended.code == 0, ended.err
    assert len(lines(tmp_path / "run-smoke")) == 7


def test_a_dry_run_trains_every_step_and_keeps_nothing_but_metrics(
    whet: Callable[..., Any], recipe: str, tmp_path: Path, tiny_run: Path
) -> None:
    ended = whet(
        "train", recipe, f"run.dir={tmp_path / 'run'}", "train.precision=fp64", "export.at_end=merged", "--dry-run"
    )
    assert ended.code == 0, ended.err
    tried = tmp_path / "run-dry"
    assert not {"exports", "report.html", "report.md"} & names(tried)
    assert list((tried / "checkpoints").iterdir()) == []
    assert [line.get("loss") for line in lines(tried)] == [line.get("loss") for line in lines(tiny_run)]


@pytest.mark.parametrize("kind", ["--smoke", "--dry-run"])
def test_a_real_run_of_the_same_name_is_not_deleted_by_a_trial(
    whet: Callable[..., Any], recipe: str, tmp_path: Path, kind: str
) -> None:
    real = tmp_path / f"run-{kind.removeprefix('--').removesuffix('-run')}"
    assert whet("train", recipe, f"run.dir={real}", "train.steps=2").code == 0
    before = names(real)
    ended = whet("train", recipe, f"run.dir={tmp_path / 'run'}", kind)
    assert ended.code == 1
    assert "holds a run already" in ended.err
    assert names(real) == before


def test_trials_are_not_resumed(whet: Callable[..., Any], recipe: str, tmp_path: Path) -> None:
    ended = whet("train", recipe, f"run.dir={tmp_path / 'run'}", "--smoke", "--resume")
    assert (ended.code, names(tmp_path)) == (2, set())
    assert "always run from start to end" in ended.err
    assert whet("train", recipe, f"run.dir={tmp_path / 'run'}", "--dry-run", "--until", "3").code == 2
    assert whet("train", recipe, f"run.dir={tmp_path / 'run'}", "--dry-run", "--smoke").code == 2


def test_a_paused_run_continues_as_if_uninterrupted(
    whet: Callable[..., Any],
    recipe: str,
    tmp_path: Path,
    tiny_run: Path,
    exact_of: Callable[[Path], list[Any]],
    state_of: Any,
) -> None:
    folder = tmp_path / "run"
    arguments = ["train", recipe, f"run.dir={folder}", "train.precision=fp64", "export.at_end=merged"]
    assert whet(*arguments, "--until", "7").code == 0
    assert json.loads((folder / "status.json").read_text())["state"] == "stopped"
    assert not (folder / "exports").exists()
    late = whet(*arguments, "--resume", "--until", "6")
    assert late.code == 1
    assert "has done 7 steps already" in late.err
    assert whet(*arguments, "--resume", "--until", "19").code == 0
    assert whet(*arguments, "--resume", "--until", "99").code == 0
    assert json.loads((folder / "status.json").read_text())["state"] == "finished"
    assert exact_of(folder) == exact_of(tiny_run)
    assert state_of(folder) == state_of(tiny_run)
