"""`whet runs` from a second shell: a local run and one of Slurm are shown, stopped, resumed and cancelled."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from launch_options import OPTIONS, STEPS
from slurm_cluster import Cluster

from whet.launch.slurm_commands import SlurmUnavailableError
from whet.runs.control import cancel_run, stop_run
from whet.runs.slurm_states import query_jobs
from whet.runs.summary import RunSummary, summarize_run_folder


@pytest.fixture(autouse=True)
def in_empty_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """`whet runs` lists the runs below the current folder."""
    monkeypatch.chdir(tmp_path)


def submit(folder: Path, *options: str, lines: str = "sleep 99") -> list[int]:
    """Jobs of a run that only wait, as `whet launch` submits and notes them."""
    (folder / "slurm").mkdir(parents=True, exist_ok=True)
    script = folder / "slurm/job.sh"
    script.write_text(f"#!/bin/bash\n#SBATCH --output={folder}/slurm/%j.out\n{lines}\n")
    done = subprocess.run(["sbatch", "--parsable", *options, script], capture_output=True, text=True, check=True)
    with (folder / "slurm/jobs.jsonl").open("a") as file:
        file.write(json.dumps({"job": int(done.stdout), "submitted": time.time(), "script": "job.sh"}) + "\n")
    return [int(done.stdout)]


def wait_for(folder: Path, *states: str) -> RunSummary:
    until = time.monotonic() + 300
    while (found := summarize_run_folder(folder)).state.name not in states:
        assert time.monotonic() < until, (found.state, found.as_dict())
        time.sleep(0.05)
    return found


def test_queued_jobs_and_chains_are_shown_and_removed(cluster: Cluster, tmp_path: Path, whet: Any) -> None:
    run = tmp_path / "runs/a"
    [first] = submit(run, "--begin=now+1hour")
    [second] = submit(run, f"--dependency=afterany:{first}")
    found = summarize_run_folder(run)
    assert (found.state.name, found.job) == ("queued", first)
    assert [job.number for job in found.active_jobs] == [first, second]
    shown = json.loads(whet("runs", "--json").out)["runs"]
    assert [(each["name"], each["state"], each["job"]) for each in shown] == [("a", "queued", first)]
    ended = stop_run(found, lambda _: None)  # nothing has to be saved
    assert ended.active_jobs == []
    assert ended.state.name == "killed"
    assert not (run / "stop").exists()
    assert "cancelled" in ended.state.note
    for command in (("delete", "a", "--yes"), ("stop", "a")):
        assert whet("runs", *command).code == (0 if command[0] == "delete" else 1)


def test_a_job_that_ends_before_the_run_begins_has_its_log(cluster: Cluster, tmp_path: Path, whet: Any) -> None:
    run = tmp_path / "runs/a"
    [job] = submit(run, lines="echo module: not found; exit 7")
    found = wait_for(run, "killed")
    assert f"job {job}: failed" in found.state.note
    assert whet("runs", "logs", "a").out == "module: not found\n"


def test_cancel_removes_jobs_and_leaves_those_of_others(cluster: Cluster, tmp_path: Path) -> None:
    [job] = submit(tmp_path / "runs/a")
    [other] = submit(tmp_path / "runs/b")
    with (tmp_path / "runs/a/slurm/jobs.jsonl").open("a") as file:
        file.write(json.dumps({"job": other, "script": "job.sh"}) + "\n")  # as after a new set-up of the cluster
    cluster.wait_for_state(job, "RUNNING")
    found = wait_for(tmp_path / "runs/a", "starting")
    assert [each.number for each in found.active_jobs] == [job]
    ended = cancel_run(found, True, lambda _: None)
    assert ended.active_jobs == []
    assert query_jobs([other])[other].is_active
    assert summarize_run_folder(tmp_path / "runs/a").state.name == "killed"


def test_where_slurm_does_not_answer_the_files_are_shown(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    submit(tmp_path / "runs/a")
    with monkeypatch.context() as patch:
        patch.setenv("PATH", str(tmp_path))
        with pytest.raises(SlurmUnavailableError, match="squeue is not installed here"):
            query_jobs([1])
        found = summarize_run_folder(tmp_path / "runs/a")
    assert "squeue is not installed here. Use a login node" in found.problems[0]
    assert query_jobs([]) == {}
    assert query_jobs([987654]) == {}  # a single number that Slurm does not know is an error of squeue
    (tmp_path / "runs/a/slurm/jobs.jsonl").write_text('{"job": 987654, "script": "job.sh"}\n')
    assert "Slurm no longer knows it" in summarize_run_folder(tmp_path / "runs/a").state.note


# Real runs.


def step_of(folder: Path) -> int:
    return summarize_run_folder(folder).step or 0


def second_shell(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "whet", "runs", *words], cwd=folder, capture_output=True, text=True, check=False,
        timeout=300,
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("where", ["local", "launched", "slurm"])
def test_a_second_shell_shows_stops_and_resumes(
    where: str, cluster: Cluster, tmp_path: Path, recipe: str, whole: Path, assert_same: Any, start: Any
) -> None:
    run, settings = tmp_path / "runs/a", [*OPTIONS, "run.project=tea", "launch.processes=1"]
    if where == "slurm":
        port = f"launch.rendezvous=127.0.0.1:{cluster.free_port()}"
        done = subprocess.run(
            [sys.executable, "-m", "whet", "launch", recipe, f"run.dir={run}", *settings, "--on", "slurm", port,
             "launch.slurm.time=10", "--chain", "2"],
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
    else:
        start("whet", "train" if where == "local" else "launch", recipe, *settings, run="runs/a")
    until = time.monotonic() + 300
    while not run.exists() or step_of(run) < 3:
        assert time.monotonic() < until
        time.sleep(0.02)
    [shown] = json.loads(second_shell(tmp_path, "--project", "tea", "--json").stdout)["runs"]
    assert shown["state"] == "running"
    assert shown["host"]
    assert (shown["job"] is not None) == (where == "slurm")
    stopped = second_shell(tmp_path, "stop", "a", "--json")
    assert stopped.returncode == 0, stopped.stderr
    [ended] = json.loads(stopped.stdout)["runs"]
    assert (ended["state"], ended["exit_code"]) == ("stopped", 75)
    assert 3 <= ended["step"] < STEPS
    assert not any(job["state"] in ("PENDING", "RUNNING") for job in ended["jobs"])
    resumed = second_shell(tmp_path, "resume", "a", "--json")
    assert resumed.returncode == 0, resumed.stderr
    assert wait_for(run, "finished").step == STEPS
    assert_same(run, whole)
    log = second_shell(tmp_path, "logs", "a", "--rank", "0").stdout
    assert f"stopped after step {ended['step']}" in log
    assert f"a checkpoint is saved. To continue: whet runs resume {run}" in log
    assert second_shell(tmp_path, "delete", "a", "--yes").returncode == 0
    assert not run.exists()


@pytest.mark.slow
def test_cancel_of_a_slurm_run_ends_it_with_its_chain(cluster: Cluster, tmp_path: Path, recipe: str, whet: Any) -> None:
    run = tmp_path / "runs/a"
    ended = whet(
        "launch", recipe, "--on", "slurm", f"run.dir={run}", *OPTIONS, "train.steps=4000", "launch.slurm.time=10",
        "launch.processes=1", f"launch.rendezvous=127.0.0.1:{cluster.free_port()}", "--chain", "2",
        "--then", "eval {run}", "--json",
    )  # fmt: skip
    jobs = json.loads(ended.out)
    until = time.monotonic() + 300
    while step_of(run) < 3:
        assert time.monotonic() < until
        time.sleep(0.02)
    assert second_shell(tmp_path, "cancel", "a").returncode == 0
    found = summarize_run_folder(run)
    assert found.active_jobs == []
    assert {job.number for job in found.jobs} == {*jobs["jobs"], jobs["then"]}
    assert found.state.name == "stopped"
