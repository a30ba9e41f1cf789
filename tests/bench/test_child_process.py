"""Child processes end with their parent, and their stderr is logged."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from whet.bench import runner


def test_stderr_is_logged_and_stdout_returned(tmp_path: Path) -> None:
    ended = runner.run_process(
        ["sh", "-c", "echo out; printf 'one\\nlast \\n\\n' >&2; exit 4"], tmp_path / "log", os.environ
    )
    assert (ended.code, ended.out, ended.killed_by) == (4, "out\n", None)
    assert runner.last_log_line(tmp_path / "log") == "last"
    assert time.time() - ended.began < 60


def test_the_name_of_a_signal(tmp_path: Path) -> None:
    assert runner.run_process(["sh", "-c", "kill -9 $$"], tmp_path / "log", os.environ).killed_by == "SIGKILL"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_processes_end_with_their_parent(tmp_path: Path, number: signal.Signals) -> None:
    """Including a grandchild, and one that ignores SIGTERM."""
    pids = tmp_path / "pids"
    script = f"trap '' TERM; (trap '' TERM; sleep 99; sleep 99) & echo $$ $! > {pids}; wait"
    code = (
        "import os, sys; from pathlib import Path; from whet.bench import runner\n"
        "runner._TERMINATE_TIMEOUT_S = 0.2\n"
        "runner.run_process(['sh', '-c', sys.argv[1]], Path(sys.argv[2]), os.environ)"
    )
    parent = subprocess.Popen([sys.executable, "-c", code, script, str(tmp_path / "log")], stderr=subprocess.DEVNULL)
    deadline = time.time() + 30
    while not (pids.exists() and pids.read_text().strip()) and time.time() < deadline:
        time.sleep(0.05)
    started = [int(pid) for pid in pids.read_text().split()]
    assert all(_alive(pid) for pid in started)
    parent.send_signal(number)
    assert parent.wait(20) != 0
    while any(_alive(pid) for pid in started) and time.time() < deadline:
        time.sleep(0.05)
    assert [pid for pid in started if _alive(pid)] == []


def _alive(pid: int) -> bool:
    """Whether it is neither gone nor a zombie."""
    try:
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
