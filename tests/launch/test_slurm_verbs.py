"""Verbs and programs as jobs of a real Slurm of two nodes on this machine."""

from __future__ import annotations

import json
import os
import pty
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from slurm_cluster import Cluster

import whet.data.prepare.build as build_module

LINE = {"messages": [{"role": "user", "content": "?"}, {"role": "assistant", "content": "!"}]}


@pytest.fixture
def submit(
    whet: Any, cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., dict[str, Any]]:
    """Run `whet launch --on slurm --json --wait`; returns what it prints."""
    monkeypatch.chdir(tmp_path)

    def run(*words: str, code: int = 0) -> dict[str, Any]:
        at = words.index("--")
        settings = ("launch.slurm.time=10", f"launch.rendezvous=127.0.0.1:{cluster.free_port()}", *words[:at])
        ended = whet("launch", "--on", "slurm", "--json", "--wait", *settings, *words[at:])
        logs = "".join(path.read_text() for path in tmp_path.glob("jobs/*/*.out"))
        assert ended.code == code, ended.err + logs
        return dict(json.loads(ended.out))

    return run


@pytest.fixture
def prepare(recipe: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """`prepare` of 900 conversations in four chunks, of which whet makes three shards."""
    lines = [LINE | {"number": number} for number in range(900)]
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    size = (tmp_path / "data.jsonl").stat().st_size
    monkeypatch.setattr(build_module, "_SHARD_BYTES_PER_CORE", size // 3)
    return ["prepare", recipe, "data.validation=null", "data.sources=[{path: data.jsonl}]", "data.store=store"]


def content(store: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in store.iterdir()}


def test_an_array_prepares_the_store_of_one_process(
    submit: Any, whet: Any, prepare: list[str], tmp_path: Path, cluster: Cluster
) -> None:
    found = submit("--", *prepare, "--shard", "auto", "--quiet")
    assert (found["exit_code"], found["tasks"], len(found["jobs"])) == (0, 3, 2)
    recorded = (tmp_path / "jobs/prepare-two-processes/jobs.jsonl").read_text().splitlines()
    assert [json.loads(line)["job"] for line in recorded] == found["jobs"]
    made = content(tmp_path / "store/train")
    shutil.rmtree(tmp_path / "store")
    assert whet(*prepare).code == 0
    assert content(tmp_path / "store/train") == made


@pytest.mark.slow
def test_a_shard_that_fails_ends_all_and_the_next_launch_continues(
    submit: Any, whet: Any, prepare: list[str], tmp_path: Path, cluster: Cluster
) -> None:
    good = (tmp_path / "data.jsonl").read_text()
    setup = "launch.slurm.setup=['[ \"$SLURM_ARRAY_TASK_ID\" != 1 ] || [ -e mended ] || exit 9']"
    found = submit(setup, "--", *prepare, "--shard", "auto", code=9)
    assert f"job {found['job']}_1: exit code 9" in found["reason"]
    text = cluster.wait_for_state(found["jobs"][1], "CANCELLED")
    assert "Reason=DependencyNeverSatisfied" in text or "JobState=CANCELLED" in text
    assert not (tmp_path / "store/train").exists()
    kept = sorted(path.name for path in tmp_path.glob("store/.*.work/*"))
    assert kept == ["00000000.npz", "00000002.npz", "00000003.npz"]
    (tmp_path / "mended").touch()
    submit(setup, "--", *prepare, "--shard", "auto")
    made = content(tmp_path / "store/train")
    shutil.rmtree(tmp_path / "store")
    assert (tmp_path / "data.jsonl").read_text() == good
    assert whet(*prepare).code == 0
    assert content(tmp_path / "store/train") == made


@pytest.mark.slow
def test_the_exit_code_of_a_verb_is_passed_on(submit: Any, tmp_path: Path, whet: Any) -> None:
    found = submit("--", "eval", "nowhere", code=1)
    assert "exit code 1; its output is in" in found["reason"]
    assert "nowhere: no such folder" in (tmp_path / f"jobs/eval-nowhere/{found['job']}.out").read_text()
    ended = whet("launch", "--on", "slurm", "launch.slurm.partition=none", "--", "eval", "nowhere")
    assert ended.code == 1
    assert "launch.slurm.partition: Slurm refused the job" in ended.err


PROGRAM = """
import os, sys, time
from pathlib import Path
import torch
torch.distributed.init_process_group("gloo")
value = torch.ones(1)
torch.distributed.all_reduce(value)
rank, attempts = os.environ["RANK"], Path(f"attempts-{os.environ['RANK']}")
attempts.write_text(attempts.read_text() + "x" if attempts.exists() else "x")
print(f"rank {rank} of {int(value)}", flush=True)
if rank == "1" and len(attempts.read_text()) <= int(sys.argv[1]):
    os._exit(7)
if sys.argv[2] == "hangs" and len(attempts.read_text()) == 2:
    time.sleep(60)
torch.distributed.barrier()
"""


@pytest.mark.slow
@pytest.mark.parametrize(("crashes", "other", "code"), [(1, "", 0), (2, "", 7), (2, "hangs", 7)])
def test_a_program_on_two_nodes_is_restarted(submit: Any, tmp_path: Path, crashes: int, other: str, code: int) -> None:
    """Its exit code is that of the node that failed, even if the other one is killed."""
    (tmp_path / "program.py").write_text(PROGRAM)
    settings = ("launch.nodes=2", "launch.processes=1", "launch.max_restarts=1", "launch.wait=0.1")
    found = submit(*settings, "--", sys.executable, "program.py", str(crashes), other, code=code)
    text = (tmp_path / f"jobs/program/{found['job']}.out").read_text()
    assert text.count("rank 1 of 2") == 2
    assert text.count("rank 0 of 2") == 2


@pytest.mark.slow
def test_a_verb_in_the_terminal(cluster: Cluster, tmp_path: Path, real_python: str) -> None:
    """As srun --pty has it: a terminal on the node, and the exit code."""
    command = "test -t 0 && test -t 1 && read line && echo got $line && exit 5"
    words = [real_python, "-m", "whet", "launch", "--interactive", "launch.slurm.time=5", "--", "bash", "-c", command]
    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(tmp_path)
        os.execv(words[0], words)
    os.write(terminal, b"hello\n")
    shown, until = b"", time.monotonic() + 300
    try:
        while time.monotonic() < until and (part := os.read(terminal, 4096)):
            shown += part
    except OSError:  # its other end is closed
        pass
    _, status = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(status) == 5, shown
    assert b"got hello" in shown


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("jupyter-lab") is None, reason="needs JupyterLab on the PATH")
def test_jupyter_runs_on_a_node_and_ends_with_its_job(
    whet: Any, cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    ended = whet("launch", "--notebook", "launch.slurm.time=10", "--json")
    assert ended.code == 0, ended.err
    found = json.loads(ended.out)
    token = Path(found["token_file"]).read_text()
    assert found["tunnel"].startswith(f"ssh -N -L 8888:{found['host']}:{found['port']} ")
    assert token not in ended.out + ended.err + cluster.run("scontrol", "show", "job", str(found["job"]))
    cluster.run("scancel", str(found["job"]))
    cluster.wait_for_state(found["job"], "CANCELLED")
    until = time.monotonic() + 300
    while Path(found["token_file"]).exists():
        assert time.monotonic() < until
        time.sleep(0.1)
    assert token not in (tmp_path / f"jobs/notebook/{found['job']}.out").read_text()
