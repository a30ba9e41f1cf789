"""`whet launch`: a run that is hurt goes on; one that cannot be helped ends with the reason."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from fleet_options import OPTIONS, TWO

from forkserver import children_of


def test_a_killed_rank_is_named_and_the_run_goes_on_from_its_checkpoint(
    start: Any, recipe: str, whole: Path, assert_same: Any
) -> None:
    run = start.launch(recipe, *OPTIONS, *TWO, "--json")
    run.wait_for_step(22)
    run.wait_for_checkpoint(20)
    os.kill(run.worker(1), signal.SIGKILL)
    code, out, err = run.ended()
    assert code == 0, err
    assert "Traceback" not in err
    assert "continuing after step 20" in err
    first, second = run.attempts
    assert (first["kind"], first["rank"], first["message"], first["then"]) == (
        "crashed", 1, "killed by SIGKILL", "restart",
    )  # fmt: skip
    assert first["step"] >= 22
    assert (second["kind"], second["then"]) == ("done", "end")
    result = json.loads(out)
    assert (result["exit_code"], result["restarts"]) == (0, 1)
    assert run.status["state"] == "finished"
    assert_same(run.folder, whole)


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGINT])
def test_a_launch_that_is_asked_to_stop_ends_with_75_and_can_be_finished(
    number: signal.Signals, start: Any, whet: Any, recipe: str, whole: Path, assert_same: Any
) -> None:
    run = start.launch(recipe, *OPTIONS, *TWO)
    run.wait_for_step(12)
    run.process.send_signal(number)
    code, _, err = run.ended()
    assert code == 75, err
    assert "Traceback" not in err
    assert (run.status["state"], run.status["exit_code"]) == ("stopped", 75)
    assert [(line["kind"], line["then"]) for line in run.attempts] == [("stopped", "end")]
    saved = (run.folder / "checkpoints" / "latest").read_text().strip()
    assert saved == f"step-{run.status['step']:06d}"
    if number != signal.SIGUSR1:  # once is enough: it takes long
        return
    ended = whet("train", recipe, *OPTIONS, f"run.dir={run.folder}", "--resume")  # with one process instead of two
    assert ended.code == 0, ended.err
    assert_same(run.folder, whole)


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, 2])
def test_a_launch_that_a_program_asks_to_stop_before_the_first_step_ends_with_75(
    processes: int, start: Any, whet: Any, recipe: str, whole: Path, assert_same: Any
) -> None:
    run = start.launch(recipe, *OPTIONS, f"launch.processes={processes}")
    until = time.monotonic() + 60
    while not (run.folder / "config.yaml").exists():
        assert time.monotonic() < until
        time.sleep(0.01)
    run.process.send_signal(signal.SIGTERM)
    code, _, err = run.ended()
    assert code == 75, err
    assert "Traceback" not in err
    assert (run.status["state"], run.status["exit_code"]) == ("stopped", 75)
    ended = whet("train", recipe, *OPTIONS, f"run.dir={run.folder}", "--resume")
    assert ended.code == 0, ended.err
    assert_same(run.folder, whole)


@pytest.mark.parametrize("processes", [1, 2])
def test_a_stop_file_ends_a_launch_without_a_restart(processes: int, start: Any, recipe: str) -> None:
    run = start.launch(recipe, *OPTIONS, f"launch.processes={processes}")
    run.wait_for_step(5)
    (run.folder / "stop").touch()
    code, _, err = run.ended()
    assert code == 75, err
    assert len(run.attempts) == 1


@pytest.mark.slow
def test_timeout_of_coreutils_gives_75_around_a_launch(start: Any, recipe: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "whet", "launch", recipe, "launch.processes=1", f"run.dir={tmp_path / 'run'}"]
    ended = subprocess.run(
        ["timeout", "--preserve-status", "-s", "TERM", "40", *command, "train.steps=100000"], capture_output=True
    )
    assert ended.returncode == 75, ended.stderr


def test_a_failure_that_repeats_in_the_same_step_is_not_tried_again_and_again(start: Any, recipe: str) -> None:
    run = start.launch(recipe, *OPTIONS, *TWO, "train.optimizer.lr=1e300", "launch.max_restarts=9")
    code, _, err = run.ended()
    assert code == 3, err
    assert "again, in the same way" in err
    assert [line["then"] for line in run.attempts] == ["restart", "end"], run.attempts
    assert run.attempts[-2]["step"] == run.attempts[-1]["step"]
    assert run.status["state"] == "failed"
    assert "not finite" in run.status["reason"]


@pytest.mark.slow
def test_restarts_are_used_up_by_failures_that_differ(start: Any, recipe: str) -> None:
    run = start.launch(recipe, *OPTIONS, "launch.processes=1", "launch.max_restarts=1")
    for step in (8, 22):
        run.wait_for_step(step)
        for pid in children_of(run.process.pid):
            os.kill(pid, signal.SIGKILL)
    code, _, err = run.ended()
    assert code == 3, err
    assert "launch.max_restarts = 1 is used up" in err
    assert [line["message"] for line in run.attempts] == ["killed by SIGKILL"] * 2
    assert (run.status["state"], run.status["exit_code"]) == ("failed", 3)


@pytest.mark.parametrize("processes", [1, 2])
def test_wrong_input_is_said_once_and_not_tried_again(processes: int, start: Any, recipe: str) -> None:
    run = start.launch(recipe, f"launch.processes={processes}", "model.path=nowhere")
    code, _, err = run.ended()
    assert code == 1
    assert "Traceback" not in err
    assert 1 <= err.count("error: model.path: nowhere: no such folder") <= processes  # the others are ended at once
    assert "Restart" not in err
    assert not run.folder.exists()


def test_a_second_launch_of_the_same_run_is_refused_with_its_owner(start: Any, recipe: str) -> None:
    run = start.launch(recipe, *OPTIONS, "train.steps=100000", "launch.processes=1")
    run.wait_for_step(3)
    second = start.launch(recipe, *OPTIONS, "train.steps=100000", *TWO, "--resume")
    code, _, err = second.ended()
    assert code == 1
    owner = run.status
    assert f"in use by {owner['host']} pid {owner['pid']} since " in err
    assert "ago" in err
    assert run.process.poll() is None
    assert not (run.folder / "launch.jsonl").exists()


def test_a_supervisor_that_is_killed_leaves_a_run_that_saves_and_stops(
    real_python: str, start: Any, recipe: str
) -> None:
    run = start.launch(recipe, *OPTIONS, "train.steps=100000", *TWO)
    run.wait_for_step(5)
    run.process.kill()
    until = time.monotonic() + 90
    while run.status["state"] == "running":
        assert time.monotonic() < until, "it trains on, and nobody watches"
        time.sleep(0.1)
    assert (run.status["state"], run.status["exit_code"]) == ("stopped", 75)


def test_a_dry_run_prints_the_command_and_starts_nothing(start: Any, whet: Any, recipe: str, tmp_path: Path) -> None:
    words = ["launch", recipe, "launch.processes=2", f"run.dir={tmp_path / 'run'}", "--dry-run"]
    ended = whet(*words, "launch.env={NAME: a b}")
    assert ended.code == 0
    assert "'NAME=a b'" in ended.out
    assert "--nproc-per-node 2 --max-restarts 0" in ended.out
    assert json.loads(whet(*words, "--json").out)["processes"] == 2
    assert not (tmp_path / "run").exists()
