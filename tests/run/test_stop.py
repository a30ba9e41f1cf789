"""Stopping: whoever asks, and whenever, the run can be resumed and ends as if nothing had been."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Exact = Callable[[Path], list[Any]]
WEIGHTS = "exports/merged/model.safetensors"


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
    assert "a checkpoint is saved" in ended.err
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
    "checking": ("whet.run.model_builder:check_packing", signal.SIGUSR1, 0),
    "measuring": ("whet.run.assemble:evaluate_run", signal.SIGTERM, 0),
    "first step": ("whet.training.trainer:train_step", signal.SIGTERM, 2),  # all processes hear of it in the next
    "shipping": ("whet.run.lifecycle:export_model", signal.SIGTERM, 12),
}
"""A function that is called then, the signal, and the steps that the status knows of; None: there is no folder yet."""
QUICK = ("loading", "first step")


@pytest.mark.parametrize(
    "moment", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in MOMENTS]
)
def test_a_stop_signal_at_any_moment_ends_with_75_and_the_run_resumes(
    moment: str, whet: Any, recipe: str, tmp_path: Path, tiny_run: Path, exact_of: Exact
) -> None:
    where, number, steps = MOMENTS[moment]
    folder = tmp_path / "run"
    options = ["train", recipe, "train.precision=fp64", f"run.dir={folder}"]
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
    assert (folder / WEIGHTS).read_bytes() == (tiny_run / WEIGHTS).read_bytes()


@pytest.mark.slow
def test_a_run_stopped_every_few_seconds_finishes(
    recipe: str, tmp_path: Path, tiny_run: Path, exact_of: Exact, real_python: str
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
    assert (folder / WEIGHTS).read_bytes() == (tiny_run / WEIGHTS).read_bytes()


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
