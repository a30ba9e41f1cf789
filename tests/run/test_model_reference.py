"""Weights of another run, a schedule of one's own; when checkpoints are written and which are kept."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

Steps = Callable[[Path], list[dict[str, Any]]]


def checkpoints(folder: Path) -> list[int]:
    return sorted(int(path.parent.name[5:]) for path in (folder / "checkpoints").glob("step-*/manifest.json"))


def val_losses(folder: Path) -> dict[int, float]:
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return {line["step"]: line["val_loss"] for line in lines if "val_loss" in line}


def test_a_run_begins_with_what_another_has_learned(
    whet: Any, recipe: str, tmp_path: Path, tiny_run: Path, lora_run: Path, steps_of: Steps
) -> None:
    for which, run in (("", tiny_run), ("@8", tiny_run), ("/checkpoints/step-000008", tiny_run), ("", lora_run)):
        folder = tmp_path / f"new-{run.name}-{len(which)}"
        ended = whet(
            "train", recipe, "train.precision=fp64", "train.steps=2", f"model.path={run}{which}", f"run.dir={folder}",
            "export.at_end=none",
        )  # fmt: skip
        assert ended.code == 0, ended.err
        assert steps_of(folder)[0]["step"] == 1
        if not which:  # it starts as good as the other ended
            assert val_losses(folder)[0] == pytest.approx(list(val_losses(run).values())[-1], rel=1e-5)
        assert val_losses(folder)[0] < val_losses(tiny_run)[0] - 0.2
        settled = (folder / "config.yaml").read_text()
        assert str(run / "exports" / ("merged-exact-step-000008" if which else "merged")) in settled
        again = whet("train", folder / "config.yaml", f"run.dir={folder}", "--resume")
        assert again.code == 0, again.err
    ours, theirs = (load_file(tiny_run / "exports" / name / "model.safetensors") for name in (
        "merged", "merged-exact-step-000008",
    ))  # fmt: skip
    assert any(not ours[name].equal(theirs[name]) for name in ours)


@pytest.mark.parametrize(("which", "said"), [("@7", "no such checkpoint. Use one of 8, 12"), ("@bets", "latest, best")])
def test_a_step_that_is_not_there_is_named(which: str, said: str, whet: Any, recipe: str, tiny_run: Path) -> None:
    for arguments in (
        ["train", recipe, f"model.path={tiny_run}{which}", "run.dir=unused"],
        ["export", f"{tiny_run}{which}"],
    ):
        ended = whet(*arguments)
        assert ended.code == 1
        assert said in ended.err


def test_start_step_takes_steps_for_done(
    whet: Any, recipe: str, tmp_path: Path, tiny_run: Path, steps_of: Steps
) -> None:
    """Data, counts and rates are those of the whole run from there on; interrupted, it goes on there."""
    arguments = [
        "train", recipe, "train.precision=fp64", "train.start_step=9", f"model.path={tiny_run}@8",
        f"run.dir={tmp_path / 'run'}", "export.at_end=none",
    ]  # fmt: skip
    assert whet(*arguments, "--until", "10").code == 0
    assert whet(*arguments, "--resume").code == 0
    ours, theirs = steps_of(tmp_path / "run"), steps_of(tiny_run)[9:]
    for key in ("step", "epoch", "lr", "conversations", "tokens", "supervised_tokens"):
        assert [line[key] for line in ours] == [line[key] for line in theirs], key
    assert list(val_losses(tmp_path / "run")) == [9, 12]
    ended = whet("train", recipe, "train.start_step=12", f"run.dir={tmp_path / 'other'}")
    assert ended.code == 1
    assert "train.start_step: 12, but this run has only 12 steps" in ended.err


def test_step_offset_counts_on_from_another_checkpoint_and_changes_nothing_else(
    whet: Any, recipe: str, tmp_path: Path, steps_of: Steps, state_of: Any
) -> None:
    """Numbers and names begin there; data, rates, intervals and weights are those without it, also when resumed."""
    settings = [
        "train.steps=6", "eval.every=3", "checkpoint.every=2", "checkpoint.keep_last=1", "checkpoint.keep_every=4",
        "train.schedule.warmup=2",
    ]  # fmt: skip
    plain, offset = tmp_path / "plain", tmp_path / "offset"
    assert whet("train", recipe, *settings, f"run.dir={plain}").code == 0
    arguments = ["train", recipe, *settings, "train.step_offset=423858", f"run.dir={offset}"]
    assert whet(*arguments, "--until", 423863).code == 0
    assert [*map(int, (json.loads((offset / "status.json").read_text())[key] for key in ("step", "steps")))] == [
        423863, 423864,
    ]  # fmt: skip
    assert "step 423,863 of 423,864 (83%)" in whet("runs", "show", offset).out
    ended = whet(*arguments, "--resume")
    assert ended.code == 0, ended.err
    assert " 6/6 " in ended.err, "the bar counts the steps of this run"
    ours, theirs = steps_of(offset), steps_of(plain)
    assert [line["step"] for line in ours] == [line["step"] + 423858 for line in theirs] == [*range(423859, 423865)]
    for key in ("loss", "grad_norm", "lr", "epoch", "conversations", "tokens", "supervised_tokens"):
        assert [line[key] for line in ours] == [line[key] for line in theirs], key
    assert {step - 423858: loss for step, loss in val_losses(offset).items()} == val_losses(plain)
    assert checkpoints(plain) == [4, 6]
    assert checkpoints(offset) == [423862, 423864]
    assert sorted(state_of(offset).values()) == sorted(state_of(plain).values())
    replayed = json.loads(whet("inspect", offset, "--step", 423863, "--json").out)
    assert (replayed["step"], replayed["exact"]) == (423863, True)


def test_epochs_and_measurements_have_checkpoints(whet: Any, recipe: str, tmp_path: Path, steps_of: Steps) -> None:
    folder = tmp_path / "run"
    ended = whet(
        "train", recipe, "train.steps=20", "checkpoint.epochs=0.1", "checkpoint.every=99",
            "checkpoint.keep_last=99", "eval.every=7",
        "checkpoint.keep_best=1", f"run.dir={folder}", "export.at_end=none",
    )  # fmt: skip
    assert ended.code == 0, ended.err
    parts = [0, *(int(line["epoch"] / 0.1) for line in steps_of(folder))]
    due = {step for step in range(1, 21) if parts[step] > parts[step - 1]}
    assert checkpoints(folder) == sorted(due | {7, 14, 20})
    assert due - {7, 14, 20}
    losses = val_losses(folder)
    best = min((step for step in losses if step), key=losses.__getitem__)
    assert (folder / "checkpoints/best").read_text().startswith(f"step-{best:06d}\n")
    assert whet("export", f"{folder}@best").code == 0


def test_minutes_have_checkpoints(whet: Any, recipe: str, tmp_path: Path) -> None:
    ended = whet(
        "train", recipe, "train.steps=6", "checkpoint.minutes=1e-9", "checkpoint.every=99", "checkpoint.keep_last=99",
        f"run.dir={tmp_path / 'run'}", "export.at_end=none",
    )  # fmt: skip
    assert ended.code == 0, ended.err
    assert checkpoints(tmp_path / "run") == [1, 2, 3, 4, 5, 6]


def test_a_smoke_test_keeps_no_best(whet: Any, recipe: str, tmp_path: Path) -> None:
    """It measures nothing between start and end, and its config.yaml must be readable all the same."""
    arguments = ["train", recipe, f"run.dir={tmp_path / 'run'}", "eval.every=2", "checkpoint.keep_best=1", "--smoke"]
    for _ in range(2):
        ended = whet(*arguments)
        assert ended.code == 0, ended.err


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["checkpoint.keep_best=1"], "checkpoint.keep_best: 1, but nothing is measured between start and end"),
        (["checkpoint.keep_best=1", "eval.every=2", "eval.best=task/orders"], "eval.tasks does not have orders"),
        (["checkpoint.keep_best=1", "eval.every=2", "eval.best=loss"], "loss is not measured"),
        (["eval.patience=2", "eval.every=2", "eval.best=val_los"], "val_los is not measured"),
        (["eval.patience=2", "eval.every=2", "eval.best=metric/f1"], "eval.metrics does not have f1"),
        (["eval.patience=2", "eval.every=2", "eval.best=val_loss/b"], "was not measured at step 0. Choose one of"),
    ],
)  # fmt: skip
def test_a_best_that_cannot_be_is_refused(
    options: list[str], said: str, whet: Any, recipe: str, tmp_path: Path
) -> None:
    ended = whet("train", recipe, *options, f"run.dir={tmp_path / 'run'}")
    assert ended.code == 1
    assert said in ended.err
