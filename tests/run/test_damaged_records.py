"""A run with damaged files beside intact checkpoints resumes, says what it found, and ends with the same weights."""

from __future__ import annotations

import json
import random
import resource
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from whet.core.checksums import read_hashed_json, write_hashed_json
from whet.data.plan.planner import Plan

Exact = Callable[[Path], list[dict[str, Any]]]
State = Callable[[Path], dict[str, bytes]]
FULL = "train.precision=fp64"


@pytest.fixture
def interrupted(tiny_run: Path, tmp_path: Path) -> Path:
    """tiny_run as it was when it had its checkpoint of step 8; metrics.jsonl goes on to the end."""
    folder = tmp_path / "run"
    shutil.copytree(tiny_run, folder)
    shutil.rmtree(folder / "exports")
    shutil.rmtree(folder / "checkpoints/step-000012")
    (folder / "status.json").unlink()
    return folder


def flip(file: Path, bit: int) -> None:
    content = bytearray(file.read_bytes())
    content[bit // 8] ^= 1 << bit % 8
    file.write_bytes(content)


def test_all_of_them_damaged_at_once(
    whet: Any, recipe: str, interrupted: Path, tiny_run: Path, exact_of: Exact, state_of: State
) -> None:
    metrics = interrupted / "metrics.jsonl"
    lines = metrics.read_bytes().splitlines(keepends=True)
    metrics.write_bytes(b"".join(lines[:2]) + b"\xff" + lines[2][1:] + b"".join(lines[3:6]) + bytes(200))
    found = metrics.read_bytes()
    (interrupted / "events.jsonl").write_bytes(b'{"step": 3}\n{"st')
    for name in ("status.json", "plan.json", "checkpoints/latest", "checkpoints/best"):
        (interrupted / name).write_bytes(b"\xff\0[[[")
    flip(interrupted / "config.yaml", 0)
    ended = whet("train", recipe, FULL, f"run.dir={interrupted}", "--resume")
    assert ended.code == 0, ended.err
    assert "Traceback" not in ended.err
    said = " ".join(ended.err.split())
    assert f"{metrics}: changed since the checkpoint of step 8: " in said
    assert "bytes are missing; lines 3, 7 cannot be read. The whole file is kept as damaged-metrics.jsonl" in said
    assert f"{interrupted / 'events.jsonl'}: changed since the checkpoint of step 8: line 2 cannot be read" in said
    assert f"{interrupted / 'status.json'}: damaged" in said
    assert (
        "config.yaml was changed after the run wrote it. The settings in step-000008/manifest.json take its place"
        in said
    )
    assert (interrupted / "damaged-metrics.jsonl").read_bytes() == found
    exact = exact_of(tiny_run)
    assert exact_of(interrupted) == [line for n, line in enumerate(exact) if n in (0, 1, 3, 4, 5) or n > 8]
    assert state_of(interrupted) == state_of(tiny_run)
    assert (interrupted / "checkpoints/best").read_bytes() == (tiny_run / "checkpoints/best").read_bytes()
    assert read_hashed_json(interrupted / "plan.json")["precision"] == "fp64"
    page = whet("report", interrupted)
    assert page.code == 0
    assert "damaged-metrics.jsonl: kept by a resumed run" in (interrupted / "report.html").read_text()


def test_a_changed_number_and_a_deleted_file_are_reported(
    whet: Any, recipe: str, interrupted: Path, tiny_run: Path, state_of: State
) -> None:
    metrics = interrupted / "metrics.jsonl"
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    lines[5]["loss"] = 1e9  # would be a spike, and widen what counts as one
    lines[-1]["val_loss"] = 0.0
    metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))
    ended = whet("train", recipe, FULL, f"run.dir={interrupted}", "--resume")
    assert ended.code == 0, ended.err
    assert "changed since the checkpoint of step 8: its lines are not those that were written" in " ".join(
        ended.err.split()
    )
    assert state_of(interrupted) == state_of(tiny_run)


@pytest.mark.slow
def test_random_bit_flips_beside_the_checkpoints(
    whet: Any, recipe: str, interrupted: Path, tiny_run: Path, tmp_path: Path, state_of: State
) -> None:
    """Whatever flips: a traceback never, the weights of the uninterrupted run or an error that names the file."""
    draw, state = random.Random(0), state_of(tiny_run)
    status = read_hashed_json(tiny_run / "status.json")
    write_hashed_json(interrupted / "status.json", status | {"state": "stopped", "exit_code": 75})
    names = (
        "metrics.jsonl", "status.json", "plan.json", "config.yaml", "ledger.json", "checkpoints/latest",
        "checkpoints/best",
    )  # fmt: skip
    outcomes = {"same": 0, "refused": 0}
    for number in range(42):
        folder = tmp_path / f"flip-{number}"
        shutil.copytree(interrupted, folder)
        file = folder / names[number % len(names)]
        flip(file, draw.randrange(8 * file.stat().st_size))
        ended = whet("train", recipe, FULL, f"run.dir={folder}", "--resume")
        assert "Traceback" not in ended.err
        if ended.code == 0:
            outcomes["same"] += 1
            assert state_of(folder) == state
        else:
            outcomes["refused"] += 1
            assert str(folder) in "".join(ended.err.split())
        shutil.rmtree(folder)
    assert outcomes["same"] >= 24


def test_too_many_open_files_names_the_limit_and_deletes_nothing(
    whet: Any, recipe: str, interrupted: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load(folder: Path) -> Plan:
        limits = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, limits[1]))
        try:
            return intact(folder)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)

    intact = Plan.load
    monkeypatch.setattr(Plan, "load", load)
    ended = whet("train", recipe, FULL, f"run.dir={interrupted}", "--resume")
    assert ended.code == 1
    assert "this process has too many open files" in ended.err
    assert "ulimit -n" in ended.err
    assert "elete" not in ended.err
    assert "Traceback" not in ended.err
    assert (interrupted / "plan/rows.npy").exists()
