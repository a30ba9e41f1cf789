"""The command that is started, and the rendezvous."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest

from whet.core.errors import WhetError
from whet.launch.config import LaunchConfig
from whet.launch.local import LaunchJob, format_command, launch_command, make_launch_job, train_command


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
