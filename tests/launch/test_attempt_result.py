"""The root cause of a failed attempt, from torchrun's report and error reports."""

from __future__ import annotations

import json
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from whet.core.heartbeat import read_first_error, report_texts, write_error_report
from whet.launch.restart_policy import read_attempt_result


def failure(rank: int, code: int, message: str = "", at: float = 0.0) -> dict[str, Any]:
    return {"rank": rank, "exit_code": code, "message": message, "time": at}


def ending(folder: Path, code: int, *failures: dict[str, Any], stop_requested: bool = False) -> tuple[Any, ...]:
    report = folder / "report.json"
    report.write_text(json.dumps(failures))
    found = read_attempt_result(folder, code, report, earlier=frozenset(), stop_requested=stop_requested)
    return found.kind, found.exit_code, found.rank, found.message


def test_a_segmentation_fault_precedes_error_reports(tmp_path: Path) -> None:
    write_error_report(tmp_path, 0, "CUDA error", 3)
    found = ending(tmp_path, 1, failure(0, 3, "CUDA error"), failure(2, -signal.SIGSEGV, "killed by SIGSEGV"))
    assert found == ("crashed", 3, 2, "killed by SIGSEGV")


def test_an_error_report_precedes_sigkill(tmp_path: Path) -> None:
    write_error_report(tmp_path, 1, "out of memory", 3)
    found = ending(tmp_path, 1, failure(0, -signal.SIGKILL, "killed by SIGKILL"), failure(1, 3, "out of memory"))
    assert found == ("crashed", 3, 1, "out of memory")


def test_sigkill_precedes_a_lost_peer(tmp_path: Path) -> None:
    found = ending(
        tmp_path, 1, failure(0, 3, "another process is gone"), failure(1, -signal.SIGKILL, "killed by SIGKILL")
    )
    assert found == ("crashed", 3, 1, "killed by SIGKILL")


def test_the_earliest_message_wins_and_sigterm_is_ignored(tmp_path: Path) -> None:
    found = ending(tmp_path, 1, failure(0, -15), failure(1, 3, "b", 9), failure(2, 3, "a", 8), failure(3, 3, "", 7))
    assert found == ("crashed", 3, 2, "a")


@pytest.mark.parametrize("code", [1, 2])
def test_wrong_input_is_not_a_crash(code: int, tmp_path: Path) -> None:
    assert ending(tmp_path, 1, failure(0, code, "no such file")) == ("input", 1, 0, "no such file")


def test_torchrun_without_a_report_has_crashed(tmp_path: Path) -> None:
    assert ending(tmp_path, -signal.SIGKILL) == (
        "crashed", 3, None, "torchrun ended without a report (SIGKILL)",
    )  # fmt: skip


def test_a_requested_stop_is_75_with_a_checkpoint_or_by_a_program(tmp_path: Path) -> None:
    assert ending(tmp_path, 1, failure(0, -15), stop_requested=True)[:2] == ("stopped", 130)
    assert ending(tmp_path, 1, failure(0, 130))[:2] == ("stopped", 130)
    assert ending(tmp_path, 1, failure(0, 75))[:2] == ("stopped", 75)  # before the first step
    assert (
        read_attempt_result(tmp_path, -15, None, earlier=frozenset(), stop_requested=True, by_program=True).exit_code
        == 75
    )
    (tmp_path / "checkpoints" / "step-000010").mkdir(parents=True)
    (tmp_path / "checkpoints" / "step-000010" / "manifest.json").touch()
    assert ending(tmp_path, 1, failure(0, -15), stop_requested=True)[:2] == ("stopped", 75)


def test_a_status_of_an_earlier_attempt_is_ignored(tmp_path: Path) -> None:
    status = {"state": "stopped", "exit_code": 75, "heartbeat": time.time(), "reason": "stopped after step 3"}
    (tmp_path / "status.json").write_text(json.dumps(status))
    assert ending(tmp_path, 1, failure(0, 75))[:2] == ("stopped", 75)
    found = read_attempt_result(tmp_path, -signal.SIGKILL, None, report_texts(tmp_path), stop_requested=False)
    assert (found.kind, found.message) == ("crashed", "killed by SIGKILL")


@pytest.mark.parametrize("skew_s", [-86400, 86400])
def test_reports_of_machines_with_wrong_clocks(skew_s: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A report of this attempt counts though its clock is a day behind; an earlier one does not, though a day ahead."""
    clock = time.time
    monkeypatch.setattr(time, "time", lambda: clock() + skew_s)
    write_error_report(tmp_path, 1, "of the last attempt", 3)
    stopped_status(tmp_path)
    earlier = report_texts(tmp_path)
    assert read_first_error(tmp_path, earlier) is None
    assert read_attempt_result(tmp_path, -9, None, earlier, stop_requested=False).kind == "crashed"
    write_error_report(tmp_path, 1, "of this attempt", 3)
    found = read_first_error(tmp_path, earlier)
    assert found is not None
    assert found["message"] == "of this attempt"
    stopped_status(tmp_path)
    assert read_attempt_result(tmp_path, 75, None, earlier, stop_requested=False).kind == "stopped"


def test_the_step_is_that_of_the_last_complete_line(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n{"step": 2}\n{"st')
    assert read_attempt_result(tmp_path, -9, None, earlier=frozenset(), stop_requested=False).step == 2


def stopped_status(folder: Path) -> None:
    """As a process leaves it that torchrun or a user has stopped."""
    status = {
        "state": "stopped",
        "exit_code": 75,
        "heartbeat": time.time(),
        "reason": "stopped before a step was saved",
    }
    (folder / "status.json").write_text(json.dumps(status))


@pytest.mark.parametrize("code", [-signal.SIGKILL, -signal.SIGSEGV])
def test_that_torchrun_stops_the_others_is_no_request(code: int, tmp_path: Path) -> None:
    stopped_status(tmp_path)
    found = ending(tmp_path, 1, failure(0, 75, "stopped on request"), failure(1, code, "killed"))
    assert found == ("crashed", 3, 1, "killed")
    assert ending(tmp_path, 1, failure(0, 75), failure(1, code), stop_requested=True)[:2] == ("stopped", 75)


def test_an_error_of_one_rank_precedes_that_the_others_were_stopped(tmp_path: Path) -> None:
    stopped_status(tmp_path)
    found = ending(tmp_path, 1, failure(0, 75, "stopped on request"), failure(1, 1, "no such file"))
    assert found == ("input", 1, 1, "no such file")
    write_error_report(tmp_path, 1, "out of memory", 3)
    found = ending(tmp_path, 1, failure(0, 75, "stopped on request"), failure(1, 3, "out of memory"))
    assert found == ("crashed", 3, 1, "out of memory")


def test_a_stop_requested_on_another_machine_is_a_stop_here(tmp_path: Path) -> None:
    stopped_status(tmp_path)
    assert ending(tmp_path, 1, failure(2, 3, "another process of this run exited"))[:2] == ("stopped", 75)
    no_rank = failure(0, 1, "torchrun: the rendezvous is closed") | {"rank": None}
    assert ending(tmp_path, 1, no_rank)[:2] == ("stopped", 75)
