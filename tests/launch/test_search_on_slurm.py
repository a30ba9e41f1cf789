"""Trials of `whet search` as jobs of a real Slurm: queued, adopted, cancelled, lost with their node."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from slurm_cluster import Cluster

import forkserver
from conftest import steps_in
from whet.config import read_config
from whet.core.errors import ExitCode
from whet.core.json_lines import read_json_lines
from whet.search.slurm_trials import SlurmPlace
from whet.search.trials import TrialEnd, TrialRun

SETTINGS = ("launch.processes=1", "launch.slurm.time=10", "export.at_end=none")
SEARCH = (
    *SETTINGS, "train.optimizer.lr={search: log, low: 1e-4, high: 1e-2}", "search.method=random", "train.steps=24",
    "checkpoint.every=4",
)  # fmt: skip


def wait(place: SlurmPlace) -> list[TrialEnd]:
    until = time.monotonic() + 300
    while not (ends := place.poll(0.5)):
        assert time.monotonic() < until
    return ends


def jobs_of(run: Path) -> list[int]:
    return [line["job"] for line in read_json_lines(run / "slurm/jobs.jsonl")[0]]


def test_a_queued_trial_is_submitted_once_and_cancelled_with_the_search(
    cluster: Cluster, recipe: str, tmp_path: Path
) -> None:
    hold = "launch.slurm.options=[--hold]"
    configs = [read_config(Path(recipe), [*SETTINGS, hold, f"run.dir={tmp_path / name}"]) for name in ("one", "two")]
    trials = [TrialRun(number, Path(recipe), config, until=4) for number, config in enumerate(configs)]
    before = SlurmPlace()
    before.start(trials[0])
    after = SlurmPlace()  # of the same search, after it was killed
    for trial in trials:
        after.start(trial)
    assert [len(jobs_of(trial.folder)) for trial in trials] == [1, 1]
    assert "--until 4" in (trials[0].folder / "slurm/job.sh").read_text()
    assert after.poll(0.01) == []
    cluster.run("scancel", str(jobs_of(trials[1].folder)[0]))  # somebody gives the trial up
    [end] = wait(after)
    assert (end.number, end.exit_code) == (1, ExitCode.FAILED)
    assert "it was cancelled" in end.reason
    after.stop()
    [end] = wait(after)
    assert (end.number, end.exit_code) == (0, ExitCode.STOPPED)


@pytest.fixture
def start_search(cluster: Cluster, recipe: str, tmp_path: Path) -> Callable[..., subprocess.Popen[str]]:
    def start(*options: str) -> subprocess.Popen[str]:
        words = [sys.executable, "-m", "whet", "search", recipe, "--on", "slurm", *SEARCH, f"run.dir={tmp_path / 's'}"]
        return forkserver.Popen(
            [*words, *options, "--json"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )  # fmt: skip

    return start


def wait_for_step(run: Path, step: int) -> None:
    until = time.monotonic() + 300
    while steps_in(run) < step:
        assert time.monotonic() < until, f"{run} did not reach step {step}"
        time.sleep(0.02)


@pytest.mark.slow
def test_a_killed_search_finds_its_jobs_again_and_a_trial_survives_its_node(
    start_search: Any, cluster: Cluster, tmp_path: Path
) -> None:
    options = ("search.max_trials=2", "search.concurrent=2", "launch.slurm.max_requeues=0", "train.steps=60")
    first = start_search(*options)
    runs = [tmp_path / "s" / f"trial-00{number}" for number in (0, 1)]
    wait_for_step(runs[0], 2)
    os.kill(forkserver.fork_of(first.pid), signal.SIGKILL)
    first.communicate()
    second = start_search(*options, "--resume")
    wait_for_step(runs[0], 6)
    node = cluster.run("squeue", "-h", "-j", str(jobs_of(runs[0])[0]), "-o", "%N").strip()
    cluster.kill_node(int(node.removeprefix("n")))
    try:
        out, err = second.communicate(timeout=240)
        assert second.returncode == 0, err
    finally:
        cluster.start_node(int(node.removeprefix("n")))
    found = json.loads(out)
    assert {trial["state"] for trial in found["trials"]} == {"complete"}, err
    for run in runs:
        steps = [line["step"] for line in read_json_lines(run / "metrics.jsonl")[0] if "loss" in line]
        assert steps == list(range(1, 61))
    assert len(jobs_of(runs[0])) == 2


@pytest.mark.slow
def test_a_cancelled_trial_is_given_up_and_ctrl_c_saves_the_others(
    start_search: Any, whet: Callable[..., Any], recipe: str, cluster: Cluster, tmp_path: Path
) -> None:
    options = ("search.max_trials=3", "search.concurrent=1", "train.steps=400")
    process = start_search(*options)
    runs = [tmp_path / "s" / f"trial-00{number}" for number in (0, 1, 2)]
    wait_for_step(runs[0], 2)
    cluster.run("scancel", str(jobs_of(runs[0])[0]))
    wait_for_step(runs[1], 2)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=240)
    assert process.returncode == ExitCode.STOPPED, err
    assert "trial 0 failed" in err
    assert "it was cancelled" in err.replace("\n", " ")
    done = steps_in(runs[1])
    assert (runs[1] / "checkpoints" / f"step-{done:06d}" / "manifest.json").exists()
    assert not runs[2].exists()
