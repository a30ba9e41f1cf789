"""A disk that is full or read-only: said in a paragraph, and what is on it is whole."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from whet.checkpoint import directory
from whet.run import assemble

Disk = Callable[[str], Path]


def use_cache(disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Take `disk` for the cache, with the built-in models at hand."""
    (disk / "models").symlink_to(Path(os.environ["WHET_CACHE"], "models").resolve())
    monkeypatch.setenv("WHET_CACHE", str(disk))


def temporary(folder: Path) -> list[str]:
    """Files and folders that were on their way to becoming something else."""
    return [path.name for path in folder.rglob(".*") if path.name != ".metadata"]


def check(ended: Any, *said: str) -> None:
    assert ended.code == 1, ended.err
    assert "Traceback" not in ended.err
    assert ended.err.count("error: ") == 1
    for text in said:
        assert text in ended.err


def test_a_disk_without_room_for_the_run_folder_keeps_nothing(whet: Any, recipe: str, small_disk: Disk) -> None:
    disk = small_disk("size=12k")
    check(whet("train", recipe, f"run.dir={disk / 'run'}"), str(disk / "run"), "the disk is full", "run.dir for runs")
    assert list(disk.iterdir()) == []


def test_a_disk_without_room_for_the_checkpoints_is_refused_before_the_first_step(
    whet: Any, recipe: str, small_disk: Disk
) -> None:
    disk = small_disk("size=400k")
    check(whet("train", recipe, f"run.dir={disk / 'run'}"), str(disk / "run"), "full", "Free some space", "run.dir")
    assert list(disk.iterdir()) == []


def test_a_run_on_a_disk_that_became_too_small_can_be_resumed(
    whet: Any, recipe: str, small_disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = small_disk("size=400k")
    arguments = ["train", recipe, f"run.dir={disk / 'run'}", "train.steps=3"]
    with monkeypatch.context() as patch:
        patch.setattr(assemble, "require_checkpoint_space", lambda *args: None)  # there was room at the start
        check(whet(*arguments), str(disk / "run/checkpoints"), "full", "Free some space", "run.dir for runs")
    assert temporary(disk) == []
    assert directory.list_steps(disk / "run/checkpoints") == []
    assert json.loads((disk / "run/status.json").read_text())["state"] == "failed"
    subprocess.run(["mount", "-o", "remount,size=20m", str(disk)], check=True)
    assert whet(*arguments, "--resume").code == 0


def test_a_full_cache_keeps_no_store_and_no_run(
    whet: Any, recipe: str, small_disk: Disk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = small_disk("size=100k")
    use_cache(disk, monkeypatch)
    check(whet("train", recipe, f"run.dir={tmp_path / 'run'}"), str(disk / "stores"), "full", "WHET_CACHE")
    assert not (tmp_path / "run").exists()
    assert list((disk / "stores").iterdir()) == []


def test_a_cache_that_fills_up_while_writing_keeps_no_store(
    whet: Any, recipe: str, small_disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = small_disk("size=40k")
    use_cache(disk, monkeypatch)
    monkeypatch.setattr("whet.data.prepare.build.require_disk_space", lambda *args: None)
    check(whet("prepare", recipe), str(disk / "stores"), "the disk is full while preparing the data", "WHET_CACHE")
    assert {path.suffix for path in (disk / "stores").iterdir()} <= {".work"}  # whole chunks, to continue from
    assert [path.name for path in disk.glob("stores/*/.*")] == []


def test_a_cache_without_room_for_the_model_keeps_none(
    whet: Any, recipe: str, small_disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = small_disk("size=100k")
    monkeypatch.setenv("WHET_CACHE", str(disk))
    check(whet("prepare", recipe), str(disk / "models"), "the disk is full while building builtin:tiny")
    assert [path.name for path in (disk / "models").iterdir() if path.suffix != ".lock"] == []


@pytest.mark.parametrize("exists", [True, False], ids=["a folder that is there", "a new folder"])
def test_a_read_only_run_folder(whet: Any, recipe: str, small_disk: Disk, exists: bool) -> None:
    disk = small_disk("size=100k")
    if exists:
        (disk / "run").mkdir()
    subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
    check(whet("train", recipe, f"run.dir={disk / 'run'}"), str(disk / "run"), "read-only", "you may write to")
