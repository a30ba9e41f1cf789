"""Runs on a real Slurm whose nodes fail, whose time ends, or whose user makes a mistake."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from launch_options import OPTIONS, STEPS
from slurm_cluster import Cluster, missing_programs, slurm_cluster

import whet as package
from whet.launch.slurm import follow_run


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    """A cluster of this test's own, which it may break."""
    missing = missing_programs()
    if missing:
        pytest.skip(f"needs the Debian packages slurm-wlm and munge (no {missing[0]}): make system-deps")
    folder = Path(tempfile.mkdtemp(prefix="whet-", dir="/tmp"))
    folder.chmod(0o755)
    try:
        with slurm_cluster(folder / "s") as cluster:
            for name, value in cluster.environment.items():
                monkeypatch.setenv(name, value)
            source = str(Path(package.__file__).parents[1])
            monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [source, os.environ.get("PYTHONPATH")])))
            yield cluster
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return tmp_path / "run"


@pytest.fixture
def submit(whet: Any, recipe: str, cluster: Cluster, run: Path) -> Callable[..., dict[str, Any]]:
    """Submit a run of few steps; returns what --json prints, with the messages."""

    def launch(*options: str, code: int = 0) -> dict[str, Any]:
        ended = whet(
            "launch", recipe, "--on", "slurm", f"run.dir={run}", *OPTIONS, "launch.slurm.time=10",
            "launch.processes=1", f"launch.rendezvous=127.0.0.1:{cluster.free_port()}", "--json", *options,
        )  # fmt: skip
        assert ended.code == code, ended.err
        return {**json.loads(ended.out), "messages": ended.err.replace("\n", " ")}

    return launch


def plant(folder: Path, monkeypatch: pytest.MonkeyPatch, code: str) -> None:
    """Have every Python of the job run some code at its start."""
    (folder / "planted").mkdir()
    (folder / "planted/sitecustomize.py").write_text(code)
    monkeypatch.setenv("PYTHONPATH", f"{folder / 'planted'}:{os.environ['PYTHONPATH']}")


BAD_NODE = """
import os, sys
if os.environ.get("SLURMD_NODENAME") == "n1" and "RANK" in os.environ:
    sys.stderr.write("NVRM: Xid (PCI:0000:03:00): 79, GPU has fallen off the bus\\n")
    sys.stderr.flush()
    os._exit(9)
"""
POLICY = "launch.log_policies=[{{pattern: 'Xid .*: 79', action: {action}}}]"


@pytest.mark.slow
def test_a_bad_node_is_excluded_and_the_run_ends_the_same(
    submit: Any, cluster: Cluster, run: Path, whole: Path, assert_same: Any, tmp_path: Path,
    real_python: str, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    plant(tmp_path, monkeypatch, BAD_NODE)
    job = submit("launch.nodes=1-2", POLICY.format(action="exclude_node"))["job"]
    text = cluster.wait_for_state(job, "COMPLETED")
    assert "Restarts=1" in text
    assert "ExcNodeList=n1" in text
    assert "GPU has fallen off the bus'. The job is queued again without n1" in cluster.output(run, job)
    assert_same(run, whole)
    assert_same_weights(run, whole)


@pytest.mark.slow
def test_a_bad_node_ends_the_run_if_the_policy_says_so(
    submit: Any, cluster: Cluster, run: Path, tmp_path: Path, real_python: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(tmp_path, monkeypatch, BAD_NODE)
    found = submit("launch.nodes=2", POLICY.format(action="give_up"), "--wait", code=3)
    output = cluster.output(run, found["job"])
    assert "(give_up) matches the line 'NVRM: Xid (PCI:0000:03:00): 79" in output
    assert "Restart 1 of 3" not in output.split("matches the line")[0].split("n1")[0]


@pytest.mark.slow
def test_the_other_node_continues_when_one_dies(
    submit: Any, cluster: Cluster, run: Path, whole: Path, assert_same: Any
) -> None:
    job = submit("launch.nodes=1-2")["job"]
    wait_for_step(cluster, job, run, 12)
    assert "NumNodes=2" in cluster.run("scontrol", "show", "job", str(job), "--oneliner")
    cluster.kill_node(2)
    text = cluster.wait_for_state(job, "COMPLETED")
    assert "Restarts=1" in text
    assert " NodeList=n1 " in text
    assert "continuing after step" in cluster.output(run, job)
    assert_same(run, whole)
    assert_same_weights(run, whole)


# The first start is slow, so that the time limit ends it; later ones, which find a checkpoint, are quick.
SLOW_START = """
import os, sys, threading, time

def slow_down():
    while not hasattr(getattr(sys.modules.get("torch"), "Tensor", None), "backward"):
        time.sleep(0.05)
    import torch

    backward = torch.Tensor.backward

    def slow_backward(*args, **kwargs):
        time.sleep(3)
        return backward(*args, **kwargs)

    torch.Tensor.backward = slow_backward

if not os.path.exists(RUN + "/checkpoints/latest"):
    threading.Thread(target=slow_down, daemon=True).start()
"""


@pytest.mark.slow
@pytest.mark.parametrize("how", ["requeue", "chain", "kill"])
def test_a_run_that_its_time_limit_ends_continues_and_ends_the_same(
    how: str, submit: Any, cluster: Cluster, run: Path, whole: Path, assert_same: Any, tmp_path: Path,
    real_python: str, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Slurm's own clock: it sends its warning 30 to 60 s after the start. `kill`: the warning is one that the job does
    not know, and the time limit ends it."""
    plant(tmp_path, monkeypatch, f"RUN = {str(run)!r}\n{SLOW_START}")
    if how == "requeue":
        job = submit("launch.slurm.time=2", "launch.slurm.warning=60")["job"]
        assert "Restarts=0" not in cluster.wait_for_state(job, "COMPLETED", timeout_s=280)
    else:
        # on busy cores the second job may meet its limit, too; those after the last step end at once
        options = ["launch.slurm.max_requeues=0", "--chain", "5"]
        if how == "kill":
            options += ["launch.slurm.time=1", "launch.slurm.options=['--signal=B:CONT@60']", "checkpoint.every=2"]
        else:
            options += ["launch.slurm.time=2", "launch.slurm.warning=60"]
        first, *_, last = submit(*options)["jobs"]
        text = cluster.wait_for_state(first, "FAILED", "TIMEOUT", timeout_s=280)
        assert ("JobState=TIMEOUT" if how == "kill" else "ExitCode=75:0") in text
        cluster.wait_for_state(last, "COMPLETED", timeout_s=400)
    assert_same(run, whole)
    assert_same_weights(run, whole)


@pytest.mark.slow
def test_requeues_are_limited(submit: Any, cluster: Cluster, run: Path) -> None:
    job = submit("launch.slurm.max_requeues=1", "train.steps=100000")["job"]
    wait_for_step(cluster, job, run, 2)
    cluster.run("scancel", "--batch", "--signal=USR1", str(job))
    cluster.wait_for_state(job, "PENDING")
    saved = int(json.loads((run / "status.json").read_text())["step"])
    wait_for_step(cluster, job, run, saved + 2)
    cluster.run("scancel", "--batch", "--signal=USR1", str(job))
    text = cluster.wait_for_state(job, "FAILED")
    assert "Restarts=1" in text
    assert "ExitCode=75:0" in text


@pytest.mark.slow
@pytest.mark.parametrize("nodes", [1, 2])
def test_a_node_that_does_not_see_the_run_folder_is_named(
    nodes: int, submit: Any, cluster: Cluster, run: Path, tmp_path: Path
) -> None:
    cluster.kill_node(2)
    cluster.start_node(2, hidden=tmp_path)
    where = ["launch.slurm.options=[--nodelist=n2]"] if nodes == 1 else ["launch.nodes=2"]
    found = submit(*where, "--wait", code=1 if nodes == 2 else 3)
    if nodes == 1:
        assert "without output: its first node could not write" in found["reason"]
    else:
        assert f"error: run.dir: n2 does not see {run}/slurm/recipe.yaml" in cluster.output(run, found["job"])
    assert not (run / "config.yaml").exists()


@pytest.mark.slow
def test_a_job_that_is_cancelled_saves_and_can_be_continued(
    submit: Any, cluster: Cluster, run: Path, whole: Path, assert_same: Any
) -> None:
    job = submit()["job"]
    wait_for_step(cluster, job, run, 5)
    cluster.run("scancel", str(job))
    cluster.wait_for_state(job, "CANCELLED")
    code, reason = follow_run(run, [job])
    assert (code, "it was cancelled" in reason, "--resume" in reason) == (75, True, True)
    assert submit("--resume", "--wait")["exit_code"] == 0
    assert_same(run, whole)


def assert_same_weights(one: Path, other: Path) -> None:
    """The last checkpoints hold the same weights up to fp64 rounding."""
    mine, theirs = (weights(folder / f"checkpoints/step-{STEPS:06d}/model") for folder in (one, other))
    assert mine.keys() == theirs.keys()
    for name, tensor in mine.items():
        torch.testing.assert_close(tensor, theirs[name], rtol=1e-9, atol=1e-12)


def weights(folder: Path) -> dict[str, torch.Tensor]:
    from torch.distributed.checkpoint import FileSystemReader, load

    reader = FileSystemReader(folder)
    shapes = reader.read_metadata().state_dict_metadata
    tensors = {name: torch.empty(each.size, dtype=each.properties.dtype) for name, each in shapes.items()}
    load(tensors, storage_reader=reader, no_dist=True)
    return tensors


def wait_for_step(cluster: Cluster, job: int, run: Path, step: int) -> None:
    metrics, until = run / "metrics.jsonl", time.monotonic() + 300
    while not metrics.exists() or f'"step": {step}' not in metrics.read_text():
        assert time.monotonic() < until, cluster.output(run, job)
        time.sleep(0.05)
