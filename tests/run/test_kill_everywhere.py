"""A kill before any file operation of a run: it is continued and ends as one that nobody touched, bit for bit."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import killed_at

OPTIONS = (
    "train.precision=fp64", "train.steps=2", "checkpoint.every=1", "checkpoint.keep_last=1", "eval.every=1",
    "adapter={rank: 2, targets: [q_proj]}", "data.sources=[{path: builtin:orders, max_samples: 20}]",
    "data.validation.sources=[{path: builtin:orders, split: held-out, max_samples: 2}]", "track=[]",
    "export.at_end=merged",
)  # fmt: skip
SHARES = 8
"""The kills are divided among so many tests, for several workers."""

pytestmark = pytest.mark.skipif(not killed_at.IS_SUPPORTED, reason="needs Linux on x86-64 or ARM64")


@dataclass
class Place:
    """A folder with a run, and with a cache of its own that shares the models."""

    folder: Path
    recipe: str

    @property
    def run(self) -> Path:
        return self.folder / "run"

    def make(self) -> Place:
        (self.folder / "cache").mkdir(parents=True)
        (self.folder / "cache" / "models").symlink_to((Path(os.environ["WHET_CACHE"]) / "models").resolve())
        return self

    def train(self, *options: str, killed_before: str | int | None = None) -> subprocess.CompletedProcess[str]:
        return self.whet("train", self.recipe, *OPTIONS, f"run.dir={self.run}", *options, killed_before=killed_before)

    def whet(self, *words: str, killed_before: str | int | None = None) -> subprocess.CompletedProcess[str]:
        python = ["-m", "whet"] if killed_before is None else [killed_at.__file__, str(killed_before), str(self.folder)]
        command = [sys.executable, *python, *words]
        environment = {**os.environ, "WHET_CACHE": str(self.folder / "cache")}
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=120)

    def operations(self) -> list[str]:
        return (self.folder / "operations.log").read_text().splitlines()

    def result(self, exact_of: Callable[[Path], list[Any]]) -> dict[str, Any]:
        """What a run leaves, without times: the same for every run."""
        status, ledger, manifest = (
            json.loads((self.run / name).read_text())
            for name in ("status.json", "ledger.json", "checkpoints/step-000002/manifest.json")
        )
        patterns = ("checkpoints/*", "plan/*", "exports/merged/*", "samples.jsonl", "events.jsonl", "losses.bin")
        files = [file for pattern in patterns for file in self.run.glob(pattern) if file.is_file()]
        hidden = [file for file in self.folder.rglob(".*") if file.name != ".metadata" and file.suffix != ".lock"]
        return {
            "files": {str(file.relative_to(self.run)): file.read_bytes() for file in files},
            "checkpoints": sorted(entry.name for entry in (self.run / "checkpoints").iterdir()),
            "weights": {name: file["hash"] for name, file in manifest["files"].items() if "__" in name},
            "metrics": exact_of(self.run),
            "status": [status[key] for key in ("state", "step", "steps", "exit_code", "reason")],
            "ledger": ledger["sources"],
            "stores": sorted(Path(store).name for store in ledger["stores"].values()),
            "leftovers": [str(file.relative_to(self.folder)) for file in hidden],
        }


@pytest.fixture(scope="module")
def whole(recipe: str, make_once: Any) -> Place:
    """A run that nobody touched."""

    def make(folder: Path) -> None:
        done = Place(folder, recipe).make().train(killed_before=0)
        assert done.returncode == 0, done.stderr

    return Place(make_once("kills-everywhere", make), recipe)


@pytest.fixture(scope="module")
def killed(recipe: str, make_once: Any) -> Place:
    """A run that was killed while it wrote its second checkpoint: to be resumed."""

    def make(folder: Path) -> None:
        done = Place(folder, recipe).make().train(killed_before="fsync run/checkpoints/.step-000002.writing")
        assert done.returncode == -signal.SIGKILL, done.stderr

    return Place(make_once("kills-everywhere-again", make), recipe)


def kill_and_resume(place: Place, when: str | int, whole: dict[str, Any], exact_of: Any, *options: str) -> str | None:
    """The call before which the run was killed; None if it was finished by then."""
    died = place.train(*options, killed_before=when)
    if died.returncode == 0:
        return None
    assert died.returncode == -signal.SIGKILL, died.stderr
    call = place.operations()[-1]
    # before config.yaml is there the folder is no run yet, and `whet train` starts one with and without --resume
    is_run = (place.run / "config.yaml").exists()
    done = place.train(*(["--resume"] if is_run or len(place.operations()) % 2 else []))
    assert done.returncode == 0, f"killed before {call}: {done.stderr}"
    assert place.result(exact_of) == whole, f"killed before {call}"
    return call.split()[0]


@pytest.mark.parametrize(
    "when",
    [
        "openat run/.config.yaml",
        "openat run/checkpoints/.latest#2",  # the last checkpoint: no later one corrects `latest`
    ],
)
def test_a_run_killed_at_a_bad_moment_ends_like_an_uninterrupted_one(
    when: str, whole: Place, recipe: str, tmp_path: Path, exact_of: Any
) -> None:
    place = Place(tmp_path / "killed", recipe).make()
    assert kill_and_resume(place, when, whole.result(exact_of), exact_of) == "openat"


@pytest.mark.slow
@pytest.mark.parametrize("share", range(SHARES))
def test_a_run_killed_before_any_file_operation_ends_like_an_uninterrupted_one(
    share: int, whole: Place, recipe: str, tmp_path: Path, exact_of: Any, record_property: Any
) -> None:
    expected, operations, kills = whole.result(exact_of), len(whole.operations()), Counter[str]()
    for number in range(1 + share, operations + 1, SHARES):
        place = Place(tmp_path / str(number), recipe).make()
        call = kill_and_resume(place, number, expected, exact_of)
        kills[call or "finished before"] += 1
        shutil.rmtree(place.folder)
    record_property("shown", f"share {share} of {operations} kills of a new run, all equal: {dict(kills)}")
    assert kills["finished before"] <= 2  # threads take turns in another order each time


@pytest.mark.slow
@pytest.mark.parametrize("share", range(SHARES))
def test_a_resumed_run_killed_before_any_file_operation_ends_like_an_uninterrupted_one(
    share: int, whole: Place, killed: Place, recipe: str, tmp_path: Path, exact_of: Any, record_property: Any
) -> None:
    expected, kills = whole.result(exact_of), Counter[str]()
    number = 1 + share
    while number:
        place = Place(tmp_path / str(number), recipe)
        shutil.copytree(killed.folder, place.folder, symlinks=True)
        call = kill_and_resume(place, number, expected, exact_of, "--resume")
        shutil.rmtree(place.folder)
        if call is None:
            break
        kills[call] += 1
        number += SHARES
    record_property("shown", f"share {share} of the kills of a resumed run, all equal: {dict(kills)}")
    assert sum(kills.values()) > 10


@pytest.mark.slow
def test_an_export_that_is_replaced_is_there_whenever_the_process_is_killed(
    whole: Place, recipe: str, tmp_path: Path, record_property: Any
) -> None:
    place = Place(tmp_path / "place", recipe)
    shutil.copytree(whole.folder, place.folder, symlinks=True)
    export = place.run / "exports" / "merged"
    before = {file.name: file.read_bytes() for file in export.iterdir()}
    assert place.whet("export", str(place.run), killed_before=0).returncode == 0
    operations = len(place.operations())
    for number in range(1, operations + 1):
        died = place.whet("export", str(place.run), killed_before=number)
        assert died.returncode in (0, -signal.SIGKILL), died.stderr
        now = {file.name: file.read_bytes() for file in export.iterdir()}
        assert now == before, f"killed before {place.operations()[-1]}"
    assert place.whet("export", str(place.run)).returncode == 0
    assert [entry.name for entry in export.parent.iterdir()] == ["merged"]
    record_property("shown", f"{operations} kills of a repeated export: the verified one was always there")
