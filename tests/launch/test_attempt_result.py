"""The root cause of a failed attempt, from torchrun's report and error reports."""

from __future__ import annotations

import json
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from whet.core.error_report import write_error_report
from whet.launch.restart_policy import read_attempt_result


def failure(rank: int, code: int, message: str = "", at: float = 0.0) -> dict[str, Any]:
    return {"rank": rank, "exit_code": code, "message": message, "time": at}


def ending(folder: Path, code: int, *failures: dict[str, Any], stop_requested: bool = False) -> tuple[Any, ...]:
    report = folder / "report.json"
    report.write_text(json.dumps(failures))
    found = read_attempt_result(folder, code, report, began=0.0, stop_requested=stop_requested)
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
    assert read_attempt_result(tmp_path, -15, None, began=0.0, stop_requested=True, by_program=True).exit_code == 75
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "latest").write_text("step-000010\n")
    assert ending(tmp_path, 1, failure(0, -15), stop_requested=True)[:2] == ("stopped", 75)


def test_a_status_of_an_earlier_attempt_is_ignored(tmp_path: Path) -> None:
    status = {"state": "stopped", "exit_code": 75, "heartbeat": time.time(), "reason": "stopped after step 3"}
    (tmp_path / "status.json").write_text(json.dumps(status))
    assert ending(tmp_path, 1, failure(0, 75))[:2] == ("stopped", 75)
    found = read_attempt_result(tmp_path, -signal.SIGKILL, None, began=time.time() + 60, stop_requested=False)
    assert (found.kind, found.message) == ("crashed", "killed by SIGKILL")


def test_the_step_is_that_of_the_last_complete_line(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n{"step": 2}\n{"st')
    assert read_attempt_result(tmp_path, -9, None, began=0.0, stop_requested=False).step == 2
