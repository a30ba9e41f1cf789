"""How an attempt ended, read from exit code, torchrun's report and the run folder; and whether to restart."""

from __future__ import annotations

import contextlib
import json
import re
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from whet.core.error_report import read_first_error
from whet.core.errors import ExitCode
from whet.core.files import read_json_lines
from whet.core.run_folder import read_status
from whet.core.signals import STOPPED_BEFORE_CHECKPOINT

# What to do after a run's processes have ended: a pure function of how they ended so far.

_MAX_BACKOFF_S = 60.0
_VOLATILE_NUMBERS = re.compile(r"0x[0-9a-fA-F]+|\d+")


@dataclass(frozen=True, slots=True)
class AttemptResult:
    """How one attempt ended."""

    kind: Literal["done", "stopped", "input", "crashed"]
    exit_code: int
    """What `whet train` would have ended with, had it been alone."""
    step: int
    """Finished steps, of which the newest checkpoint may hold fewer."""
    message: str = ""
    rank: int | None = None
    """Which process failed first, where that is known."""
    host: str | None = None

    @property
    def who(self) -> str:
        where = f" on {self.host}" if self.host else ""
        return "the run" if self.rank is None else f"rank {self.rank}{where}"


@dataclass(frozen=True, slots=True)
class Restart:
    """Start again from the newest checkpoint."""

    after_s: float


@dataclass(frozen=True, slots=True)
class Finish:
    """Leave it at that."""

    exit_code: int
    reason: str


def decide_restart(history: Sequence[AttemptResult], max_restarts: int, first_wait_s: float) -> Restart | Finish:
    """Only a crash is worth another attempt: what was asked for, or is wrong with the input, will not change by it.

    Nor will a crash that comes again in the same step with the same words.
    """
    last = history[-1]
    if last.kind == "done":
        return Finish(ExitCode.DONE, "finished")
    if last.kind == "stopped":
        return Finish(last.exit_code, last.message)
    if last.kind == "input":
        return Finish(ExitCode.INPUT, last.message)
    if len(history) > 1 and is_same_failure(last, history[-2]):
        return Finish(
            ExitCode.FAILED, f"{last.who} failed after step {last.step} again, in the same way: {last.message}"
        )
    if len(history) > max_restarts:
        used_up = f"launch.max_restarts = {max_restarts} is used up"
        return Finish(ExitCode.FAILED, f"{used_up}; at last {last.who} failed after step {last.step}: {last.message}")
    return Restart(min(_MAX_BACKOFF_S, first_wait_s * 2 ** min(len(history) - 1, 30)))


def is_same_failure(one: AttemptResult, other: AttemptResult) -> bool:
    """Whether two failures are one. Addresses, ports and times in messages differ from attempt to attempt."""
    return (one.step, _VOLATILE_NUMBERS.sub("#", one.message)) == (
        other.step,
        _VOLATILE_NUMBERS.sub("#", other.message),
    )


# How an attempt ended, from what it left: its exit code, the launcher's report, and the files in the run's folder.

_TORCHRUN_KILL_SIGNALS = (signal.SIGTERM, signal.SIGKILL)
"""What it sends to the others when one has failed."""


def read_attempt_result(
    folder: Path, code: int, report: Path | None, began: float, asked: bool, again: bool = False
) -> AttemptResult:
    """`code`: of the process that was started. `report`: the launcher's, None where a single process was started.
    `asked`: whether it had been asked to stop; `again`: by a program, which will start it again."""
    step = finished_steps(folder)
    if code == ExitCode.DONE:
        return AttemptResult("done", ExitCode.DONE, step)
    status = read_status(folder)
    is_news = float(status.get("heartbeat") or 0.0) >= began
    if (
        is_news
        and status.get("state") == "stopped"
        and status.get("exit_code") in (ExitCode.STOPPED, ExitCode.INTERRUPTED)
    ):
        return AttemptResult("stopped", status["exit_code"], step, status.get("reason") or "stopped")
    if asked and not (is_news and status.get("state") == "failed"):
        return _stopped_result(folder, step, again)
    first = _first_failure(folder, code, report, began)
    if first["exit_code"] in (ExitCode.STOPPED, ExitCode.INTERRUPTED):
        return _stopped_result(folder, step, again=first["exit_code"] == ExitCode.STOPPED)
    kind = (
        "input" if first["exit_code"] in (ExitCode.INPUT, ExitCode.USAGE) and first["rank"] is not None else "crashed"
    )
    exit_code = ExitCode.INPUT if kind == "input" else ExitCode.FAILED
    return AttemptResult(kind, exit_code, step, first["message"], first["rank"], first.get("host"))  # type: ignore[arg-type]


def _stopped_result(folder: Path, step: int, again: bool) -> AttemptResult:
    if (folder / "checkpoints" / "latest").exists():
        return AttemptResult("stopped", ExitCode.STOPPED, step, "stopped; the last checkpoint is good")
    if again:
        return AttemptResult("stopped", ExitCode.STOPPED, step, STOPPED_BEFORE_CHECKPOINT)
    return AttemptResult("stopped", ExitCode.INTERRUPTED, step, "interrupted before there was anything to save")


def _first_failure(folder: Path, code: int, report: Path | None, began: float) -> dict[str, Any]:
    """What failed first. The processes die of each other, so the order is that of what cannot be a consequence.

    A process that broke by itself (SIGSEGV, SIGABRT) had no words; one that has words found its own fault, not
    another's absence; SIGKILL came from outside, or from torchrun to one that did not end with the others.
    """
    words = read_first_error(folder, began)
    if report is None:
        message = f"killed by {signal.Signals(-code).name}" if code < 0 else read_status(folder).get("reason") or ""
        return {"rank": 0, "exit_code": code, "message": message}
    failures: list[dict[str, Any]] = []
    with contextlib.suppress(OSError, ValueError):
        failures = json.loads(report.read_text())
    broken = [one for one in failures if one["exit_code"] < 0 and -one["exit_code"] not in _TORCHRUN_KILL_SIGNALS]
    killed = [one for one in failures if one["exit_code"] == -signal.SIGKILL]
    told = [one for one in failures if one["exit_code"] > 0]
    told.sort(key=lambda one: (not one["message"], one["time"]))
    causes = [*broken, *([words] if words else []), *killed, *told]
    if causes:
        return causes[0]
    name = signal.Signals(-code).name if code < 0 else f"exit code {code}"
    return {"rank": None, "exit_code": ExitCode.FAILED, "message": f"the launcher ended without a report ({name})"}


def finished_steps(folder: Path) -> int:
    """Finished steps, of which the last may not be saved."""
    for line in reversed(read_json_lines(folder / "metrics.jsonl")):
        return int(line["step"])
    return 0
