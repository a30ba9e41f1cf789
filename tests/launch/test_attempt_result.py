"""Who failed first, from what the processes and torchrun left."""

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


def ending(folder: Path, code: int, *failures: dict[str, Any], asked: bool = False) -> tuple[Any, ...]:
    report = folder / "report.json"
    report.write_text(json.dumps(failures))
    found = read_attempt_result(folder, code, report, began=0.0, asked=asked)
    return found.kind, found.exit_code, found.rank, found.message


def test_a_process_that_broke_by_itself_comes_before_all_others(tmp_path: Path) -> None:
    write_error_report(tmp_path, 0, "CUDA error", 3)
    found = ending(tmp_path, 1, failure(0, 3, "CUDA error"), failure(2, -signal.SIGSEGV, "killed by SIGSEGV"))
    assert found == ("crashed", 3, 2, "killed by SIGSEGV")


def test_words_come_before_who_was_killed_with_the_others(tmp_path: Path) -> None:
    write_error_report(tmp_path, 1, "out of memory", 3)
    found = ending(tmp_path, 1, failure(0, -signal.SIGKILL, "killed by SIGKILL"), failure(1, 3, "out of memory"))
    assert found == ("crashed", 3, 1, "out of memory")


def test_who_was_killed_from_outside_comes_before_who_lost_it(tmp_path: Path) -> None:
    found = ending(
        tmp_path, 1, failure(0, 3, "another process is gone"), failure(1, -signal.SIGKILL, "killed by SIGKILL")
    )
    assert found == ("crashed", 3, 1, "killed by SIGKILL")


def test_the_earliest_message_counts_and_sigterm_never_does(tmp_path: Path) -> None:
    found = ending(tmp_path, 1, failure(0, -15), failure(1, 3, "b", 9), failure(2, 3, "a", 8), failure(3, 3, "", 7))
    assert found == ("crashed", 3, 2, "a")


@pytest.mark.parametrize("code", [1, 2])
def test_wrong_input_is_no_crash(code: int, tmp_path: Path) -> None:
    assert ending(tmp_path, 1, failure(0, code, "no such file")) == ("input", 1, 0, "no such file")


def test_a_launcher_without_a_report_has_crashed(tmp_path: Path) -> None:
    assert ending(tmp_path, -signal.SIGKILL) == (
        "crashed", 3, None, "the launcher ended without a report (SIGKILL)",
    )  # fmt: skip


def test_what_was_asked_for_is_a_stop_and_worth_75_if_something_is_saved(tmp_path: Path) -> None:
    assert ending(tmp_path, 1, failure(0, -15), asked=True)[:2] == ("stopped", 130)
    assert ending(tmp_path, 1, failure(0, 130))[:2] == ("stopped", 130)
    assert ending(tmp_path, 1, failure(0, 75))[:2] == ("stopped", 75)  # before the first step: it begins anew
    assert read_attempt_result(tmp_path, -15, None, began=0.0, asked=True, again=True).exit_code == 75
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "latest").write_text("step-000010\n")
    assert ending(tmp_path, 1, failure(0, -15), asked=True)[:2] == ("stopped", 75)


def test_a_status_counts_only_if_it_is_of_this_attempt(tmp_path: Path) -> None:
    status = {"state": "stopped", "exit_code": 75, "heartbeat": time.time(), "reason": "stopped after step 3"}
    (tmp_path / "status.json").write_text(json.dumps(status))
    assert ending(tmp_path, 1, failure(0, 75))[:2] == ("stopped", 75)
    found = read_attempt_result(tmp_path, -signal.SIGKILL, None, began=time.time() + 60, asked=False)
    assert (found.kind, found.message) == ("crashed", "killed by SIGKILL")


def test_the_step_is_that_of_the_last_whole_line(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n{"step": 2}\n{"st')
    assert read_attempt_result(tmp_path, -9, None, began=0.0, asked=False).step == 2
