"""How an attempt ended, from what it left: its exit code, the launcher's report, and the files in the run's folder."""

from __future__ import annotations

import contextlib
import json
import signal
from pathlib import Path
from typing import Any

from whet.core.errors import DONE, FAILED, INPUT, INTERRUPTED, STOPPED, USAGE
from whet.core.files import read_json_lines
from whet.core.interrupt import STOPPED_EARLY
from whet.core.last_words import first_in_run
from whet.core.run import read_status
from whet.fleet.decide import Ending

_FROM_TORCHRUN = (signal.SIGTERM, signal.SIGKILL)
"""What it sends to the others when one has failed."""


def read_ending(folder: Path, code: int, report: Path | None, began: float, asked: bool, again: bool = False) -> Ending:
    """`code`: of the process that was started. `report`: the launcher's, None where a single process was started.
    `asked`: whether it had been asked to stop; `again`: by a program, which will start it again."""
    step = steps_done(folder)
    if code == DONE:
        return Ending("done", DONE, step)
    status = read_status(folder)
    is_news = float(status.get("heartbeat") or 0.0) >= began
    if is_news and status.get("state") == "stopped" and status.get("exit_code") in (STOPPED, INTERRUPTED):
        return Ending("stopped", status["exit_code"], step, status.get("reason") or "stopped")
    if asked and not (is_news and status.get("state") == "failed"):
        return _stopped(folder, step, again)
    first = _first(folder, code, report, began)
    if first["exit_code"] in (STOPPED, INTERRUPTED):
        return _stopped(folder, step, again=first["exit_code"] == STOPPED)
    kind = "input" if first["exit_code"] in (INPUT, USAGE) and first["rank"] is not None else "crashed"
    exit_code = INPUT if kind == "input" else FAILED
    return Ending(kind, exit_code, step, first["message"], first["rank"], first.get("host"))  # type: ignore[arg-type]


def _stopped(folder: Path, step: int, again: bool) -> Ending:
    if (folder / "checkpoints" / "latest").exists():
        return Ending("stopped", STOPPED, step, "stopped; the last checkpoint is good")
    if again:
        return Ending("stopped", STOPPED, step, STOPPED_EARLY)
    return Ending("stopped", INTERRUPTED, step, "interrupted before there was anything to save")


def _first(folder: Path, code: int, report: Path | None, began: float) -> dict[str, Any]:
    """What failed first. The processes die of each other, so the order is that of what cannot be a consequence.

    A process that broke by itself (SIGSEGV, SIGABRT) had no words; one that has words found its own fault, not
    another's absence; SIGKILL came from outside, or from torchrun to one that did not end with the others.
    """
    words = first_in_run(folder, began)
    if report is None:
        message = f"killed by {signal.Signals(-code).name}" if code < 0 else read_status(folder).get("reason") or ""
        return {"rank": 0, "exit_code": code, "message": message}
    failures: list[dict[str, Any]] = []
    with contextlib.suppress(OSError, ValueError):
        failures = json.loads(report.read_text())
    broken = [one for one in failures if one["exit_code"] < 0 and -one["exit_code"] not in _FROM_TORCHRUN]
    killed = [one for one in failures if one["exit_code"] == -signal.SIGKILL]
    told = [one for one in failures if one["exit_code"] > 0]
    told.sort(key=lambda one: (not one["message"], one["time"]))
    causes = [*broken, *([words] if words else []), *killed, *told]
    if causes:
        return causes[0]
    name = signal.Signals(-code).name if code < 0 else f"exit code {code}"
    return {"rank": None, "exit_code": FAILED, "message": f"the launcher ended without a report ({name})"}


def steps_done(folder: Path) -> int:
    """Finished steps, of which the last may not be saved."""
    for line in reversed(read_json_lines(folder / "metrics.jsonl")):
        return int(line["step"])
    return 0
