"""A run folder that is refused, or a run that could not begin, leaves what was there before."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from whet.checkpoint import directory, save

Refused = Callable[..., str]


@pytest.mark.parametrize("change", [[], ["--resume", "train.optimizer.lr=1"]], ids=["again", "resumed otherwise"])
def test_a_folder_that_holds_another_run_keeps_it_finished(
    refused: Refused, tiny_run: Path, tmp_path: Path, change: list[str]
) -> None:
    folder = shutil.copytree(tiny_run, tmp_path / "held")
    if change:  # a stopped run, which --resume looks at
        status = folder / "status.json"
        status.write_text(status.read_text().replace("finished", "stopped"))
    error = refused("train.precision=fp64", *change, folder=folder)  # compares every file before and after
    assert str(folder) in error
    assert "run.dir=FOLDER" in error


@pytest.mark.parametrize("theirs", ["checkpoints/mine/weights.pt", "plan/plan.md", "ledger.json", "samples.jsonl"])
def test_files_that_a_run_did_not_write_outlive_its_failure(refused: Refused, tmp_path: Path, theirs: str) -> None:
    folder = tmp_path / "project"
    (folder / theirs).parent.mkdir(parents=True)
    (folder / theirs).write_text("precious")
    refused("data.validation=null", "data.sources.0.path=/no/such.jsonl", folder=folder)  # compares all files, too
    assert (folder / theirs).read_text() == "precious"


def test_a_disk_that_fills_up_while_a_checkpoint_is_written(
    whet: Any, recipe: str, small_disk: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Checkpoints have a disk of their own: on one disk, the run's other files may be the first without room."""
    disk, folder = small_disk("size=250k"), tmp_path / "run"
    folder.mkdir()
    (folder / "checkpoints").symlink_to(disk)
    arguments = ["train", recipe, f"run.dir={folder}", "train.steps=3"]
    with monkeypatch.context() as patch:
        for module in (directory, save):
            patch.setattr(module, "require_disk_space", lambda *args: None)  # another process takes the room
        ended = whet(*arguments)
    assert ended.code == 1
    assert "the disk is full while saving a checkpoint" in ended.err
    assert list(disk.iterdir()) == []
    subprocess.run(["mount", "-o", "remount,size=20m", str(disk)], check=True)
    assert whet(*arguments, "--resume").code == 0
