"""Several processes under plain torchrun: the root cause is reported, and a requested stop is a stop."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from launch_options import OPTIONS, TWO

TORCHRUN = ("torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--signals-to-handle")
WITH_USR1 = (*TORCHRUN, "SIGTERM,SIGINT,SIGUSR1", "-m", "whet", "train")


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGUSR1, marks=pytest.mark.slow)])
def test_a_signal_to_torchrun_leaves_75_in_the_status(
    number: signal.Signals, start: Any, whet: Any, recipe: str, whole: Path, assert_same: Any
) -> None:
    run = start(*WITH_USR1, recipe, *OPTIONS)
    run.wait_for_step(12)
    run.process.send_signal(number)
    run.ended()
    assert (run.status["state"], run.status["exit_code"]) == ("stopped", 75)
    saved = (run.folder / "checkpoints" / "latest").read_text().strip()
    assert saved == f"step-{run.status['step']:06d}"
    if number != signal.SIGTERM:  # once is enough: it takes long
        return
    resumed = start(*WITH_USR1, recipe, *OPTIONS, "--resume")
    code, _, err = resumed.ended()
    assert code == 0, err
    assert_same(run.folder, whole)


@pytest.mark.slow
def test_workers_save_and_stop_when_torchrun_is_killed(real_python: str, start: Any, recipe: str) -> None:
    run = start(*WITH_USR1, recipe, *OPTIONS, "train.steps=100000")
    run.wait_for_step(8)
    workers = [run.worker(rank) for rank in range(2)]
    run.process.kill()
    until = time.monotonic() + 300
    while any(Path(f"/proc/{worker}").exists() for worker in workers) and time.monotonic() < until:
        time.sleep(0.05)
    assert not any(Path(f"/proc/{worker}").exists() for worker in workers)
    assert (run.status["state"], run.status["exit_code"]) == ("stopped", 75)
    assert (run.folder / "checkpoints" / "latest").read_text().strip() == f"step-{run.status['step']:06d}"


@pytest.mark.parametrize("rank", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_a_process_that_hangs_is_named_with_its_phase(rank: int, start: Any, recipe: str) -> None:
    run = start.launch(
        recipe, *OPTIONS, "train.steps=100000", *TWO, "parallel.timeout=0.05", "launch.max_restarts=0",
    )  # fmt: skip
    run.wait_for_step(8)
    stopped = run.worker(rank)
    os.kill(stopped, signal.SIGSTOP)
    until = time.monotonic() + 300
    while not (run.folder / "logs" / f"rank-{1 - rank}.json").exists():
        assert time.monotonic() < until, "the watchdog did not report"
        time.sleep(0.1)
    os.kill(stopped, signal.SIGKILL)  # torchrun does so too, after 30 s
    code, _, err = run.ended()
    assert code == 3, err
    assert "no process has made progress for 3 s (parallel.timeout = 0.05 minutes)" in err
    assert f"Behind the others: rank {rank} on " in err
    assert f"Waiting for it: rank {1 - rank}, in step " in err
    status = run.status
    assert (status["state"], status["exit_code"]) == ("failed", 3)
    assert f"rank {rank} on " in status["reason"]
    assert status["step"] >= 7  # steps that were finished


def test_the_other_ranks_name_the_rank_that_failed_first(start: Any, recipe: str, tmp_path: Path) -> None:
    """Rank 1 raises an error; rank 0 only loses its peer."""
    script = tmp_path / "whet_with_fault.py"
    script.write_text(FAULT)
    run = start(*TORCHRUN, "SIGTERM", script, "train", recipe, *OPTIONS)
    code, _, err = run.ended()
    assert code != 0
    assert "rank 1 on " in run.status["reason"]
    assert "failed in step 4: ZeroDivisionError: planted" in run.status["reason"]
    assert (run.status["state"], run.status["exit_code"]) == ("failed", 3)
    assert (run.folder / "logs" / "rank-1.json").exists()
    assert not (run.folder / "logs" / "rank-0.json").exists()
    assert "ZeroDivisionError: planted" in err


FAULT = """
import os

import torch

from whet.cli.app import main
from whet.core.heartbeat import PHASE

backward = torch.Tensor.backward


def broken(tensor, *args, **kwargs):
    if PHASE.step == 4 and os.environ["RANK"] == "1":
        raise ZeroDivisionError("planted")
    return backward(tensor, *args, **kwargs)


torch.Tensor.backward = broken
main()
"""
