"""kill -9 at any moment: the run is continued and ends with the weights and metrics of one that nobody touched."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import forkserver
from forkserver import children_of, fork_of

Exact = Callable[[Path], list[dict[str, Any]]]
WEIGHTS = "exports/merged/model.safetensors"
STEPS = 45 if os.environ.get("WHET_TEST_ALL") == "1" else 30
"""A kill comes after six steps at most, and there must be some left for the last."""
OPTIONS = (
    "train.precision=fp64", f"train.steps={STEPS}", "checkpoint.every=2", "eval.every=5", "export.at_end=merged",
    "train.micro_rows=1",
)  # fmt: skip
DYING = str(Path(__file__).with_name("dying.py"))
ON_DISK = {"fsync": 80, "rename": 6, "replace": 12, "unlink": 40, "rmdir": 9}
"""Calls by which files come and go, and how many of them there are in some six steps."""
_IN_LOAD = 12


@pytest.fixture
def begin() -> Iterator[Callable[..., subprocess.Popen[bytes]]]:
    """Start Python in a group of its own, which is killed at the end of the test."""
    started: list[subprocess.Popen[bytes]] = []

    def run(*arguments: str) -> subprocess.Popen[bytes]:
        started.append(
            forkserver.Popen(
                [sys.executable, *arguments], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, start_new_session=True
            )
        )
        return started[-1]

    yield run
    for process in started:
        kill_all(process)
        process.communicate()


def kill_all(process: subprocess.Popen[bytes]) -> None:
    """torchrun's processes are in sessions of their own."""
    for number in (*map(fork_of, children_of(process.pid)), fork_of(process.pid)):
        with contextlib.suppress(ProcessLookupError):
            os.kill(number, signal.SIGKILL)


def steps_done(folder: Path) -> int:
    """As metrics.jsonl has them."""
    file = folder / "metrics.jsonl"
    lines = file.read_bytes().split(b"\n")[:-1] if file.exists() else []
    return max((json.loads(line)["step"] for line in lines), default=0)


def wait_and_kill(
    process: subprocess.Popen[bytes], folder: Path, draw: random.Random, kill: Callable[[subprocess.Popen[bytes]], None]
) -> bool:
    """At a random moment, mostly after some more steps, sometimes while it starts; tells whether it was in time."""
    until = time.monotonic() + 90
    if draw.random() < 0.2:
        until = time.monotonic() + draw.uniform(0.5, 6)
    target = steps_done(folder) + draw.randint(1, 6)
    while process.poll() is None and steps_done(folder) < target and time.monotonic() < until:
        time.sleep(0.002)
    time.sleep(draw.uniform(0, 0.03))
    was_alive = process.poll() is None
    kill(process)
    process.wait(90)
    return was_alive


def one_of(process: subprocess.Popen[bytes]) -> None:
    """Kill the last rank; torchrun ends the others."""
    children = children_of(process.pid)
    if children:
        os.kill(fork_of(children[-1]), signal.SIGKILL)
    else:
        kill_all(process)


def is_equal(folder: Path, whole: Path, exact_of: Exact) -> None:
    assert exact_of(folder) == exact_of(whole)
    assert (folder / WEIGHTS).read_bytes() == (whole / WEIGHTS).read_bytes()
    assert not list((folder / "checkpoints").glob(".*"))


def survive(
    kinds: list[str], seed: int, command: list[str], folder: Path, begin: Callable[..., subprocess.Popen[bytes]]
) -> int:
    """Start and kill in these ways, one after the other, then let it finish; gives how many kills came in time."""
    draw, kills = random.Random(seed), 0
    for kind in kinds:
        if kind in ("all", "one"):
            process = begin("-m", *command)
            kills += wait_and_kill(process, folder, draw, kill_all if kind == "all" else one_of)
            continue
        if kind == "load" and not list(folder.glob("checkpoints/step-*/manifest.json")):
            kind = "fsync"  # there is nothing to load yet
        number = draw.randint(1, _IN_LOAD if kind == "load" else ON_DISK[kind])
        process = begin(DYING, kind, str(number), *command[1:])
        process.communicate(timeout=120)
        kills += process.returncode == -signal.SIGKILL
    process = begin("-m", *command)
    _, err = process.communicate(timeout=200)
    assert process.returncode == 0, err.decode()
    return kills


def arguments(recipe: str, folder: Path) -> list[str]:
    return ["whet", "train", recipe, *OPTIONS, f"run.dir={folder}", "--resume"]


@pytest.fixture(scope="module")
def whole(shared_run: Any) -> Path:
    return shared_run("kills-whole", *OPTIONS)


def test_kills_of_every_kind(whole: Path, recipe: str, tmp_path: Path, begin: Any, exact_of: Exact) -> None:
    kinds = ["all", "fsync", "load", "replace"]
    folder = tmp_path / "run"
    assert survive(kinds, 1, arguments(recipe, folder), folder, begin) == len(kinds)
    is_equal(folder, whole, exact_of)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(9))
def test_kills_at_random(seed: int, whole: Path, recipe: str, tmp_path: Path, begin: Any, exact_of: Exact) -> None:
    draw = random.Random(seed)
    kinds = draw.choices(["all", "load", *ON_DISK], [3, 2, 2, 1, 1, 1, 1], k=6)
    folder = tmp_path / "run"
    assert survive(kinds, seed, arguments(recipe, folder), folder, begin) == len(kinds)
    is_equal(folder, whole, exact_of)


def in_two(recipe: str, folder: Path) -> list[str]:
    run = ["torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m"]
    return [*run, *arguments(recipe, folder)]


@pytest.fixture(scope="module")
def whole_by_two(recipe: str, make_once: Any) -> Path:
    def make(folder: Path) -> None:
        command = [sys.executable, "-m", *in_two(recipe, folder)]
        done = subprocess.run(command, capture_output=True, check=False, timeout=200)
        assert done.returncode == 0, done.stderr.decode()

    return make_once("kills-whole-by-two", make)


def test_one_of_two_processes_is_killed(
    whole_by_two: Path, recipe: str, tmp_path: Path, begin: Any, exact_of: Exact
) -> None:
    folder = tmp_path / "run"
    assert survive(["one"], 4, in_two(recipe, folder), folder, begin) == 1
    is_equal(folder, whole_by_two, exact_of)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_processes_are_killed_at_random(
    seed: int, whole_by_two: Path, recipe: str, tmp_path: Path, begin: Any, exact_of: Exact
) -> None:
    folder = tmp_path / "run"
    assert survive(["one", "all", "one", "all"], seed, in_two(recipe, folder), folder, begin) == 4
    is_equal(folder, whole_by_two, exact_of)
