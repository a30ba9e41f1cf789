"""What the processes that are left say of one that is gone."""

from __future__ import annotations

import errno
import json
import os
import socket
import subprocess
from pathlib import Path
from typing import Any

import pytest

from whet.core.errors import RunFailedError
from whet.core.heartbeat import read_neighbour_error, write_error_report, write_torchelastic_error
from whet.core.signals import StopRequested, machine_id
from whet.run import lifecycle, multiprocess
from whet.run.multiprocess import Peer, report_failures


def test_a_process_that_was_killed_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    killed = subprocess.Popen(["sleep", "99"])
    here = Peer(socket.gethostname(), machine_id(), os.getpid())
    others = [Peer("b", machine_id(), killed.pid), Peer("c", "another machine", killed.pid)]

    def lose_peer() -> None:
        with report_failures(tmp_path, 0, 3) as peers:
            peers += [here, *others]
            raise RuntimeError("[gloo/transport/tcp/pair.cc:553] Connection closed by peer")

    killed.kill()
    with pytest.raises(RunFailedError, match=r"^rank 1 on b was killed .* Start it again to continue"):
        lose_peer()
    killed.wait()
    others.pop(0)
    monkeypatch.setattr(multiprocess, "_DEATH_WITHIN_S", 0.05)
    with pytest.raises(RunFailedError, match=r"^another process of this run exited: .*Connection closed by peer"):
        lose_peer()


def test_the_error_of_another_process_is_told_in_sentences(tmp_path: Path) -> None:
    def lose_peer() -> None:
        with report_failures(tmp_path, 0, 2):
            write_error_report(tmp_path, 1, "the disk is full.", 1)
            raise RuntimeError("Connection closed by peer")

    with pytest.raises(RunFailedError, match=r"failed in step \d+: the disk is full\. Start it again"):
        lose_peer()


@pytest.fixture
def neighbours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Writes the error of a rank as torchrun's worker of that rank does."""

    def fail(rank: int, message: str, exit_code: int) -> Path:
        file = tmp_path / "attempt_0" / str(rank) / "error.json"
        monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(file))
        monkeypatch.setenv("RANK", str(rank))
        write_torchelastic_error(message, exit_code)
        monkeypatch.delenv("RANK")
        monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "attempt_0" / "0" / "error.json"))
        return file

    return fail


def test_a_neighbour_that_stopped_is_no_failure(neighbours: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert read_neighbour_error() is None
    neighbours(0, "mine", 3)
    neighbours(1, "stopped on request", 75)
    neighbours(2, "interrupted", 130)
    neighbours(3, "", 1).write_text('{"message": "of another program"}')
    neighbours(4, "", 1).write_text("{")
    assert read_neighbour_error() is None
    for code, rank in ((1, 5), (3, 6)):
        file = neighbours(rank, "no such file", code)
        error = read_neighbour_error()
        assert error is not None
        assert (str(error), error.exit_code) == (f"rank {rank} on {socket.gethostname()} failed: no such file", code)
        file.unlink()


def test_a_full_disk_leaves_no_part_of_an_error_file(neighbours: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(handle: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    assert list(neighbours(1, "an error", 3).parent.iterdir()) == []


@pytest.mark.parametrize("place", ["prepare_data", "open_run_folder"])
def test_a_run_that_torchrun_ends_for_a_neighbour_has_failed(
    place: str, neighbours: Any, whet: Any, recipe: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def terminated(*_: Any, **__: Any) -> Any:
        neighbours(1, "data.sources: no such file", 1)
        raise StopRequested

    monkeypatch.setattr(lifecycle, place, terminated)
    ended = whet("train", recipe, f"run.dir={tmp_path / 'run'}", "--json")
    assert ended.code == 1
    assert json.loads(ended.out)["error"] == f"rank 1 on {socket.gethostname()} failed: data.sources: no such file"
    assert not (tmp_path / "run").exists()
