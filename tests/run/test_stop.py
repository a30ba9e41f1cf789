"""Stopping: whoever asks, and whenever, the run can be resumed and ends as if nothing had been."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import forkserver

Exact = Callable[[Path], list[Any]]
State = Callable[[Path], dict[str, bytes]]


def test_a_stop_file_stops_like_a_signal_and_only_once(
    whet: Any, wait_for_lines: Any, recipe: str, tmp_path: Path, tiny_run: Path, exact_of: Callable[[Path], list[Any]]
) -> None:
    folder = tmp_path / "run"

    def ask() -> None:
        wait_for_lines(folder, 3)
        (folder / "stop").touch()

    asking = threading.Thread(target=ask)
    asking.start()
    ended = whet("train", recipe, "train.precision=fp64", f"run.dir={folder}")
    asking.join()
    assert ended.code == 75
    assert "a checkpoint is saved. To continue: whet runs resume " in ended.err
    status = json.loads((folder / "status.json").read_text())
    assert (status["state"], status["exit_code"]) == ("stopped", 75)
    assert status["step"] == len(exact_of(folder)) - 1  # not the step of the last heartbeat
    assert whet("train", recipe, "train.precision=fp64", f"run.dir={folder}", "--resume").code == 0
    assert exact_of(folder) == exact_of(tiny_run)


SIGNALLED = """
import importlib, os, signal, sys
where, number = sys.argv.pop(1), int(sys.argv.pop(1))
module, name = where.split(":")
module = importlib.import_module(module)
real = getattr(module, name)

def asked(*args, **kwargs):
    setattr(module, name, real)
    os.kill(os.getpid(), number)
    return real(*args, **kwargs)

setattr(module, name, asked)
from whet.cli.app import main
main()
"""
"""The real command; when it comes to a certain function, it gets a signal."""

MOMENTS = {
    "importing": ("whet.config:read_config", signal.SIGTERM, None),
    "preparing": ("whet.run.lifecycle:prepare_data", signal.SIGUSR1, None),
    "loading": ("whet.run.assemble:build_model", signal.SIGTERM, 0),
    "checking": ("whet.run.models.model_builder:choose_packing", signal.SIGUSR1, 0),
    "measuring": ("whet.run.assemble:evaluate_run", signal.SIGTERM, 0),
    "first step": ("whet.training.trainer:train_step", signal.SIGTERM, 1),
    "its last moment": ("whet.training.trainer:finish_step", signal.SIGTERM, 1),
    "shipping": ("whet.run.lifecycle:export_model", signal.SIGTERM, 12),
}
"""A function that is called then, the signal, and the steps that the status knows of; None: there is no folder yet."""
QUICK = ("loading", "first step", "its last moment")


@pytest.mark.parametrize(
    "moment", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in MOMENTS]
)
def test_a_stop_signal_at_any_moment_ends_with_75_and_the_run_resumes(
    moment: str, whet: Any, recipe: str, tmp_path: Path, tiny_run: Path, exact_of: Exact, state_of: State
) -> None:
    where, number, steps = MOMENTS[moment]
    folder = tmp_path / "run"
    options = ["train", recipe, "train.precision=fp64", f"run.dir={folder}"]
    options += ["export.at_end=merged"] if moment == "shipping" else []
    command = [sys.executable, "-c", SIGNALLED, where, str(int(number)), *options, "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 75, done.stderr
    assert json.loads(done.stdout)["exit_code"] == 75
    assert "Traceback" not in done.stderr
    if steps is None:
        assert not folder.exists()
    else:
        status = json.loads((folder / "status.json").read_text())
        assert (status["state"], status["exit_code"], status["step"]) == ("stopped", 75, steps)
    again = whet(*options, "--resume")
    assert again.code == 0, again.err
    assert exact_of(folder) == exact_of(tiny_run)
    assert state_of(folder) == state_of(tiny_run)


def test_a_stop_during_an_evaluation_computes_no_further_step_and_evaluates_once(
    whet: Any, recipe: str, tmp_path: Path, exact_of: Exact, state_of: State
) -> None:
    options = ["train", recipe, "train.precision=fp64", "train.steps=5", "eval.at_start=false", "eval.every=3"]
    whole, folder = tmp_path / "whole", tmp_path / "run"
    assert whet(*options, f"run.dir={whole}").code == 0
    command = [sys.executable, "-c", SIGNALLED, "whet.run.assemble:evaluate_run", str(int(signal.SIGINT)), *options]
    done = subprocess.run([*command, f"run.dir={folder}"], capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 75, done.stderr
    assert "stopped after step 3 of 5" in done.stderr
    assert [line["step"] for line in exact_of(folder)] == [1, 2, 3, 3]
    assert whet(*options, f"run.dir={folder}", "--resume").code == 0
    assert exact_of(folder) == exact_of(whole)
    assert state_of(folder) == state_of(whole)


@pytest.mark.slow
def test_a_run_stopped_every_few_seconds_finishes(
    recipe: str, tmp_path: Path, tiny_run: Path, exact_of: Exact, state_of: State, real_python: str
) -> None:
    """As a scheduler does that takes the machine away and starts the job again."""
    folder, codes = tmp_path / "run", []
    whet = [real_python, "-m", "whet", "train", recipe, "train.precision=fp64", f"run.dir={folder}", "--resume"]
    for tenths in range(25, 400, 4):
        limit = ["timeout", "--preserve-status", "-s", "TERM", f"{tenths / 10}"]
        done = subprocess.run([*limit, *whet], capture_output=True, text=True, check=False)
        codes.append(done.returncode)
        assert done.returncode in (0, 75), done.stderr
        if done.returncode == 0:
            break
    assert codes.count(75) > 2
    assert codes[-1] == 0
    assert exact_of(folder) == exact_of(tiny_run)
    assert state_of(folder) == state_of(tiny_run)


def test_a_resumed_run_that_is_stopped_while_it_loads_keeps_its_steps(whet: Any, recipe: str, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    options = ["train", recipe, f"run.dir={folder}", "train.steps=4", "export.at_end=none"]
    assert whet(*options, "--until", "2").code == 0
    where = MOMENTS["loading"][0]
    command = [sys.executable, "-c", SIGNALLED, where, str(int(signal.SIGTERM)), *options, "--resume"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 75, done.stderr
    status = json.loads((folder / "status.json").read_text())
    assert (status["state"], status["step"], status["steps"]) == ("stopped", 2, 4)
    assert whet(*options, "--resume").code == 0


@pytest.mark.usefixtures("default_hangup")
def test_a_terminal_that_is_closed_stops_the_run_in_good_order(
    recipe: str, tmp_path: Path, wait_for_lines: Any
) -> None:
    """The hangup is a signal, and from then on writing to the terminal fails."""
    folder, (terminal, stderr) = tmp_path / "run", os.openpty()
    command = [sys.executable, "-m", "whet", "train", recipe, f"run.dir={folder}", "train.steps=100000"]
    with forkserver.Popen(command, stdin=stderr, stdout=stderr, stderr=stderr) as process:
        os.close(stderr)
        wait_for_lines(folder, 4)
        os.close(terminal)
        process.send_signal(signal.SIGHUP)
        assert process.wait(60) == 75
    status = json.loads((folder / "status.json").read_text())
    assert (status["state"], status["exit_code"]) == ("stopped", 75)
    assert (folder / "checkpoints" / "latest").read_text() == f"step-{status['step']:06d}\n"


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 20))])
def test_twenty_mixed_signals_leave_a_true_status(
    seed: int, recipe: str, tmp_path: Path, start: Any, whet: Any, wait_for_lines: Any
) -> None:
    draw = random.Random(seed)
    folder = tmp_path / "run"
    options = ["train", recipe, f"run.dir={folder}", "train.steps=100000", "checkpoint.every=2", "export.at_end=none"]
    process = start(*options)
    wait_for_lines(folder, draw.choice([1, 3, 6]))
    for _ in range(20):
        process.send_signal(draw.choice([signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1]))
        time.sleep(draw.choice([0.0, 0.001, 0.01, 0.05]))
    _, err = process.communicate(timeout=60)
    status = json.loads((folder / "status.json").read_text())
    assert "Traceback" not in err
    assert (status["state"], status["exit_code"]) == ("stopped", process.returncode), err
    assert process.returncode in (75, 130)
    assert whet(*options, "--resume", "--until", str(status["step"] + 1)).code == 0


@pytest.mark.parametrize("how", ["deleted", "moved"])
def test_a_run_folder_that_disappears_ends_the_run_with_a_plain_error(
    how: str, whet: Any, recipe: str, tmp_path: Path, wait_for_lines: Any
) -> None:
    folder, other = tmp_path / "run", tmp_path / "other"

    def remove() -> None:
        wait_for_lines(folder, 4)
        folder.rename(other)
        if how == "deleted":
            shutil.rmtree(other)

    removing = threading.Thread(target=remove)
    removing.start()
    options = ["train", recipe, "train.steps=100000", "checkpoint.every=2", "export.at_end=none"]
    ended = whet(*options, f"run.dir={folder}")
    removing.join()
    assert ended.code == 1
    assert f"{folder}: the run folder was deleted or moved" in ended.err
    assert "Traceback" not in ended.err
    assert not folder.exists()
    if how == "moved":
        assert whet(*options, f"run.dir={other}", "--resume", "--until", "9").code == 0
