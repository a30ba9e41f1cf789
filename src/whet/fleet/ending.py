"""How an attempt ended, from what it left: its exit code, the launcher's report, and the files in the run's folder."""

from __future__ import annotations

import contextlib
import json
import signal
from pathlib import Path
from typing import Any

from whet.core.errors import DONE, FAILED, INPUT, INTERRUPTED, STOPPED, USAGE
from whet.core.files import read_json_lines
from whet.core.last_words import first_in_run
from whet.core.run import read_status
from whet.fleet.decide import Ending

_TORCHRUN_S = 1.0  # torchrun's times are whole seconds


def read_ending(folder: Path, code: int, report: Path | None, began: float, asked: bool) -> Ending:
    """`code`: of the process that was started. `report`: the launcher's, None where a single process was started.
    `asked`: whether it had been asked to stop."""
    step = steps_done(folder)
    if code == DONE:
        return Ending("done", DONE, step)
    status = read_status(folder)
    is_news = float(status.get("heartbeat") or 0.0) >= began
    if is_news and status.get("state") == "stopped" and status.get("exit_code") in (STOPPED, INTERRUPTED):
        return Ending("stopped", status["exit_code"], step, status.get("reason") or "stopped")
    if asked:
        return _stopped(folder, step)
    first = _first(folder, code, report, began)
    if first["exit_code"] in (STOPPED, INTERRUPTED):
        return _stopped(folder, step)
    kind = "input" if first["exit_code"] in (INPUT, USAGE) and first["rank"] is not None else "crashed"
    exit_code = INPUT if kind == "input" else FAILED
    return Ending(kind, exit_code, step, first["message"], first["rank"], first.get("host"))  # type: ignore[arg-type]


def _stopped(folder: Path, step: int) -> Ending:
    if (folder / "checkpoints" / "latest").exists():
        return Ending("stopped", STOPPED, step, "stopped; the last checkpoint is good")
    return Ending("stopped", INTERRUPTED, step, "interrupted before there was anything to save")


def _first(folder: Path, code: int, report: Path | None, began: float) -> dict[str, Any]:
    """What failed first. A process that was killed could not say so, and the others died of it; one that could speak
    did so before them. torchrun's SIGTERM to the others is never the cause."""
    words = first_in_run(folder, began)
    if report is None:
        message = f"killed by {signal.Signals(-code).name}" if code < 0 else ""
        reason = read_status(folder).get("reason") or "" if not message else ""
        return words or {"rank": 0, "exit_code": code, "message": message or reason}
    failures: list[dict[str, Any]] = []
    with contextlib.suppress(OSError, ValueError):
        failures = json.loads(report.read_text())
    causes = [one for one in failures if one["exit_code"] != -signal.SIGTERM]
    killed = [one for one in causes if one["exit_code"] < 0]
    if killed:
        return killed[0]
    told = min(causes, key=lambda one: (not one["message"], one["time"]), default=None)
    if words is not None and (told is None or words["time"] <= told["time"] + _TORCHRUN_S):
        return words
    name = signal.Signals(-code).name if code < 0 else f"exit code {code}"
    return told or {"rank": None, "exit_code": FAILED, "message": f"the launcher ended without a report ({name})"}


def steps_done(folder: Path) -> int:
    """Finished steps, of which the last may not be saved."""
    for line in reversed(read_json_lines(folder / "metrics.jsonl")):
        return int(line["step"])
    return 0
