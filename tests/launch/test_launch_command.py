"""`whet launch`: crashed runs restart from their checkpoint; hopeless ones end with the reason."""

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
from launch_options import OPTIONS, TWO

from forkserver import children_of


def test_a_run_restarts_from_its_checkpoint_after_a_rank_is_killed(
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
def test_a_signal_stops_a_launch_with_75_and_resume_finishes_it(
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
    if number != signal.SIGUSR1:  # once is enough: slow
        return
    ended = whet("train", recipe, *OPTIONS, f"run.dir={run.folder}", "--resume")  # with one process instead of two
    assert ended.code == 0, ended.err
    assert_same(run.folder, whole)


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, 2])
def test_sigterm_before_the_first_step_ends_with_75(
    processes: int, start: Any, whet: Any, recipe: str, whole: Path, assert_same: Any
) -> None:
    run = start.launch(recipe, *OPTIONS, f"launch.processes={processes}")
    until = time.monotonic() + 300
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


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_killed_before_the_first_step_is_restarted_not_stopped(rank: int, start: Any, recipe: str) -> None:
    run = start.launch(recipe, *OPTIONS, *TWO, "train.steps=2")
    until = time.monotonic() + 300
    while not (run.folder / "config.yaml").exists():
        assert time.monotonic() < until
        time.sleep(0.005)
    os.kill(run.worker(rank), signal.SIGKILL)
    code, _, err = run.ended()
    assert code == 0, err
    assert [(line["kind"], line["then"]) for line in run.attempts] == [("crashed", "restart"), ("done", "end")]
    assert run.status["state"] == "finished"


@pytest.mark.parametrize("processes", [1, 2])
def test_a_stop_file_ends_a_launch_without_a_restart(processes: int, start: Any, recipe: str) -> None:
    run = start.launch(recipe, *OPTIONS, f"launch.processes={processes}")
    run.wait_for_step(5)
    (run.folder / "stop").touch()
    code, _, err = run.ended()
    assert code == 75, err
    assert len(run.attempts) == 1


@pytest.mark.slow
def test_a_launch_under_coreutils_timeout_ends_with_75(start: Any, recipe: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "whet", "launch", recipe, "launch.processes=1", f"run.dir={tmp_path / 'run'}"]
    ended = subprocess.run(
        ["timeout", "--preserve-status", "-s", "TERM", "40", *command, "train.steps=100000"], capture_output=True
    )
    assert ended.returncode == 75, ended.stderr


def test_a_failure_that_repeats_in_the_same_step_is_not_restarted(start: Any, recipe: str) -> None:
    run = start.launch(recipe, *OPTIONS, *TWO, "train.optimizer.lr=1e300", "launch.max_restarts=9")
    code, _, err = run.ended()
    assert code == 3, err
    assert "with the same message" in err
    assert [line["then"] for line in run.attempts] == ["restart", "end"], run.attempts
    assert run.attempts[-2]["step"] == run.attempts[-1]["step"]
    assert run.status["state"] == "failed"
    assert "not finite" in run.status["reason"]


@pytest.mark.slow
def test_different_failures_use_up_the_restarts(start: Any, recipe: str) -> None:
    run = start.launch(recipe, *OPTIONS, "launch.processes=1", "launch.max_restarts=1")
    for step in (8, 22):
        run.wait_for_step(step)
        for pid in children_of(run.process.pid):
            os.kill(pid, signal.SIGKILL)
    code, _, err = run.ended()
    assert code == 3, err
    assert "no restarts left (launch.max_restarts = 1)" in err
    assert [line["message"] for line in run.attempts] == ["killed by SIGKILL"] * 2
    assert (run.status["state"], run.status["exit_code"]) == ("failed", 3)


@pytest.mark.parametrize("processes", [1, 2])
def test_wrong_input_is_reported_and_not_restarted(processes: int, start: Any, recipe: str) -> None:
    run = start.launch(recipe, f"launch.processes={processes}", "model.path=nowhere")
    code, _, err = run.ended()
    assert code == 1
    assert "Traceback" not in err
    assert 1 <= err.count("error: model.path: nowhere: no such folder") <= processes  # the others are ended at once
    assert "Restart" not in err
    assert not run.folder.exists()


def test_a_second_launch_of_a_run_is_refused_and_names_the_owner(start: Any, recipe: str) -> None:
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


def test_a_run_saves_and_stops_when_whet_launch_is_killed(real_python: str, start: Any, recipe: str) -> None:
    run = start.launch(recipe, *OPTIONS, "train.steps=100000", *TWO)
    run.wait_for_step(5)
    run.process.kill()
    until = time.monotonic() + 300
    while run.status["state"] == "running":
        assert time.monotonic() < until, "the run continues without a supervisor"
        time.sleep(0.1)
    assert (run.status["state"], run.status["exit_code"]) == ("stopped", 75)


def test_a_folder_that_holds_a_run_is_refused_before_processes_start(whet: Any, recipe: str, tmp_path: Path) -> None:
    (tmp_path / "config.yaml").touch()
    ended = whet("launch", recipe, f"run.dir={tmp_path}", *TWO, "--json")
    assert ended.code == 1
    assert "this folder holds a run already" in json.loads(ended.out)["error"]


def test_a_dry_run_prints_the_command(start: Any, whet: Any, recipe: str, tmp_path: Path) -> None:
    words = ["launch", recipe, "launch.processes=2", f"run.dir={tmp_path / 'run'}", "--dry-run"]
    ended = whet(*words, "launch.env={NAME: a b}")
    assert ended.code == 0
    assert 'NAME="${NAME:?}"' in ended.out
    assert "a b" not in ended.out
    assert "--nproc-per-node 2 --max-restarts 0" in ended.out
    assert json.loads(whet(*words, "--json").out)["processes"] == 2
    assert not (tmp_path / "run").exists()
