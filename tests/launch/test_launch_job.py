"""The command that is started, and the rendezvous."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from whet.core.errors import WhetError
from whet.launch import supervise
from whet.launch.config import LaunchConfig
from whet.launch.local import LaunchJob, format_command, launch_command, make_launch_job, train_command
from whet.launch.restart_policy import AttemptResult, Finish


def job(**launch: Any) -> LaunchJob:
    command = train_command(Path("my.yaml"), ("a=1",), quiet=True)
    return make_launch_job(command, Path("runs/my"), "my", LaunchConfig(**launch))


def test_one_process_is_started_directly() -> None:
    made = job(processes=1)
    assert launch_command(made, resume=False) == [sys.executable, "-m", "whet", "train", "my.yaml", "a=1", "--quiet"]
    assert launch_command(made, resume=True)[-2:] == ["--quiet", "--resume"]


def test_several_are_started_by_torchrun_which_forwards_sigusr1_and_does_not_restart() -> None:
    words = launch_command(job(processes=4), resume=False)
    assert words[:3] == [sys.executable, "-m", "whet.launch.torchrun_agent"]
    assert "--standalone" in words
    assert words[words.index("--nproc-per-node") + 1] == "4"
    assert words[words.index("--max-restarts") + 1] == "0"
    assert "SIGUSR1" in words[words.index("--signals-to-handle") + 1].split(",")


def test_several_machines_need_a_rendezvous() -> None:
    with pytest.raises(WhetError, match=r"launch\.rendezvous is missing: 2 machines .*HOST:PORT"):
        job(nodes=2, processes=1)
    with pytest.raises(WhetError, match=r"launch\.rendezvous: no\.such\.host\.invalid:29400 cannot be reached"):
        job(nodes=2, processes=1, rendezvous="no.such.host.invalid:29400")


def test_the_machine_of_the_rendezvous_is_its_host() -> None:
    made = job(nodes=2, processes=1, rendezvous="127.0.0.1:29400")
    assert made.rendezvous is not None
    assert (made.rendezvous.is_host, made.rendezvous.address) == (True, "127.0.0.1")
    words = launch_command(made, resume=False)
    assert words[words.index("--rdzv-conf") + 1] == "is_host=true"
    assert made.env["GLOO_SOCKET_IFNAME"] == "lo"


def test_the_environment_is_part_of_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS")
    made = job(processes=1, env={"NAME": "a b"})
    assert format_command(made, resume=False).startswith('env NAME="${NAME:?}" OMP_NUM_THREADS=')
    assert made.env["OMP_NUM_THREADS"] == str(len(os.sched_getaffinity(0)))


@pytest.mark.parametrize(("kind", "code"), [("stopped", 75), ("stopped", 143), ("crashed", 1)])
def test_a_program_ends_with_the_exit_code_of_the_node_that_gave_up(
    kind: Any, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """srun kills the tasks of the other nodes, and passes on the highest exit code of all."""

    def attempt(job: LaunchJob, resume: bool, signals: Any, given_up: supervise.GivenUpFile, output: Any) -> Any:
        given_up.write(Finish(7, "no restarts left"), makes_folder=True)  # the other node
        return AttemptResult(kind, code, None)

    program = LaunchJob(("program",), None, "program", 2, 1, None, {}, (), max_restarts=1, wait_s=0)
    monkeypatch.setattr(supervise, "_run_attempt", attempt)
    assert supervise.supervise(replace(program, max_restarts=0)).exit_code == code  # it does not know
    monkeypatch.setenv(supervise.GIVEN_UP_VARIABLE, str(tmp_path / "given-up.json"))
    found = supervise.supervise(program)
    assert found.exit_code == 7
    assert found.reason.endswith("has given up: no restarts left")
