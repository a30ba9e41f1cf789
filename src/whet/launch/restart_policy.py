"""How an attempt ended, read from its exit code, torchrun's report and the run folder; and whether to restart."""

from __future__ import annotations

import contextlib
import json
import re
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from whet.core.errors import ExitCode
from whet.core.heartbeat import read_first_error
from whet.core.json_lines import read_json_lines
from whet.core.run_folder import read_status
from whet.core.signals import STOPPED_BEFORE_CHECKPOINT
from whet.launch.log_policies import PolicyMatch

_MAX_BACKOFF_S = 60.0
_VOLATILE_NUMBERS = re.compile(r"0x[0-9a-fA-F]+|\d+")


@dataclass(frozen=True, slots=True)
class AttemptResult:
    """How one attempt ended."""

    kind: Literal["done", "stopped", "input", "crashed"]
    exit_code: int
    """The exit code of the process that failed first; torchrun turns every code into 1."""
    step: int | None
    """Finished steps; the newest checkpoint may be older. None: not known, as of a program of the user's."""
    message: str = ""
    rank: int | None = None
    """Which process failed first; None: unknown."""
    host: str | None = None
    match: PolicyMatch | None = None
    """The line of its output that a log policy matched."""

    @property
    def who(self) -> str:
        where = f" on {self.host}" if self.host else ""
        return "the run" if self.rank is None else f"rank {self.rank}{where}"

    @property
    def when(self) -> str:
        return "" if self.step is None else f" after step {self.step}"


@dataclass(frozen=True, slots=True)
class Restart:
    """Restart from the newest checkpoint."""

    after_s: float


@dataclass(frozen=True, slots=True)
class Finish:
    """Do not restart."""

    exit_code: int
    reason: str
    exclude: str | None = None
    """A node of Slurm's without which the job shall be queued again."""


def decide_restart(
    history: Sequence[AttemptResult], max_restarts: int, first_wait_s: float, node: str | None = None
) -> Restart | Finish:
    """Restart after a crash, with exponential backoff; not after a requested stop, wrong input, a crash that repeats in
    the same step with the same message, or a line that a log policy matches. A pure function of the attempts so far.

    `node`: of Slurm's, which can be excluded; None where there is no other one.
    """
    last = history[-1]
    if last.kind == "done":
        return Finish(ExitCode.DONE, "finished")
    if last.kind == "stopped":
        return Finish(last.exit_code, last.message)
    if last.kind == "input":
        return Finish(last.exit_code, last.message)
    if last.match is not None:
        return _apply_policy(last, last.match, node)
    if len(history) > 1 and is_same_failure(last, history[-2]):
        return Finish(last.exit_code, f"{last.who} failed again{last.when}, with the same message: {last.message}")
    if len(history) > max_restarts:
        limit = f"no restarts left (launch.max_restarts = {max_restarts})"
        return Finish(last.exit_code, f"{limit}; {last.who} failed{last.when}: {last.message}")
    return Restart(min(_MAX_BACKOFF_S, first_wait_s * 2 ** min(len(history) - 1, 30)))


def _apply_policy(last: AttemptResult, match: PolicyMatch, node: str | None) -> Finish:
    failed = f"{last.who} failed{last.when}: {last.message or 'no error message'}; {match}"
    if match.action == "give_up":
        return Finish(last.exit_code, f"{failed}. It is not restarted")
    if node is not None:
        return Finish(ExitCode.STOPPED, f"{failed}. The job is queued again without {node}", node)
    return Finish(
        last.exit_code,
        f"{failed}. There is no other node that whet could use, so it is not restarted: continue it elsewhere, with "
        "--resume",
    )


def is_same_failure(one: AttemptResult, other: AttemptResult) -> bool:
    """Whether two failures are the same up to numbers: addresses, ports and times differ between attempts. Where the
    steps are not known, the second attempt may have come further."""
    return one.step is not None and (one.step, _VOLATILE_NUMBERS.sub("#", one.message)) == (
        other.step,
        _VOLATILE_NUMBERS.sub("#", other.message),
    )


# How an attempt ended, read from its exit code, torchrun's report and the run folder.

_STOPPED = (ExitCode.STOPPED, ExitCode.INTERRUPTED)
_INPUT = (ExitCode.INPUT, ExitCode.USAGE)
_TORCHRUN_KILL_SIGNALS = (signal.SIGTERM, signal.SIGKILL)
"""What torchrun sends to the other workers when one has failed."""


def read_program_result(code: int, report: Path, stop_requested: bool, by_program: bool) -> AttemptResult:
    """How an attempt of a program of the user's ended: every exit code but 0 is a crash, unless a stop was requested or
    the program says so with 75."""
    if code == ExitCode.DONE:
        return AttemptResult("done", ExitCode.DONE, None)
    # torchrun ends the others with SIGTERM
    failures = sorted(_read_failures(report), key=lambda one: (one["exit_code"] == -signal.SIGTERM, one["time"]))
    if stop_requested and not failures:  # before there was a process
        return AttemptResult("stopped", ExitCode.STOPPED if by_program else ExitCode.INTERRUPTED, None, "stopped")
    first = failures[0] if failures else _without_report(code) | {"exit_code": code}
    ended: int = first["exit_code"]
    exit_code = 128 - ended if ended < 0 else ended  # as a shell has it
    if stop_requested or ended == ExitCode.STOPPED:
        return AttemptResult("stopped", exit_code, None, "stopped")
    if first.get("final"):
        return AttemptResult("input", ended, None, first["message"])
    return AttemptResult("crashed", exit_code, None, first["message"] or f"exit code {ended}", first["rank"])


def read_attempt_result(
    folder: Path,
    code: int,
    report: Path | None,
    earlier: frozenset[str],
    stop_requested: bool,
    by_program: bool = False,
) -> AttemptResult:
    """`code`: of the process that was started. `report`: torchrun's; None if a single process was started directly.
    `earlier`: what `report_texts` gave before the attempt.
    `stop_requested`: a signal was forwarded; `by_program`: by a scheduler, which will start the run again."""
    step = finished_steps(folder)
    if code == ExitCode.DONE:
        return AttemptResult("done", ExitCode.DONE, step)
    status = _new_status(folder, earlier)
    state = status.get("state")
    first = _first_failure(folder, code, report, earlier)
    may_be_requested = stop_requested or not _is_root_cause(first)
    if may_be_requested and state == "stopped" and status.get("exit_code") in _STOPPED:
        return AttemptResult("stopped", status["exit_code"], step, status.get("reason") or "stopped")
    if stop_requested and state != "failed":
        return _stopped_result(folder, step, by_program)
    if first["exit_code"] in _STOPPED:
        return _stopped_result(folder, step, by_program=first["exit_code"] == ExitCode.STOPPED)
    if first.get("final"):
        return AttemptResult("input", first["exit_code"], step, first["message"])
    kind = "input" if first["exit_code"] in _INPUT and first["rank"] is not None else "crashed"
    exit_code = ExitCode.INPUT if kind == "input" else ExitCode.FAILED
    return AttemptResult(kind, exit_code, step, first["message"], first["rank"], first.get("host"))  # type: ignore[arg-type]


def _new_status(folder: Path, earlier: frozenset[str]) -> dict[str, Any]:
    """status.json, if it was written since."""
    with contextlib.suppress(OSError, UnicodeDecodeError):
        if (folder / "status.json").read_text() not in earlier:
            return read_status(folder)
    return {}


def _is_root_cause(failure: dict[str, Any]) -> bool:
    """Whether a process failed by itself. torchrun then stops the others, so that the status may be `stopped` without
    a request. A process that stopped, or only lost another one, is no cause."""
    code = failure["exit_code"]
    has_failed = failure.get("own_error") or code in _INPUT or (code < 0 and code != -signal.SIGTERM)
    return bool(has_failed and failure["rank"] is not None)


def _stopped_result(folder: Path, step: int, by_program: bool) -> AttemptResult:
    if any(folder.glob("checkpoints/step-*/manifest.json")):
        return AttemptResult("stopped", ExitCode.STOPPED, step, "stopped; the last checkpoint is complete")
    if by_program:
        return AttemptResult("stopped", ExitCode.STOPPED, step, STOPPED_BEFORE_CHECKPOINT)
    return AttemptResult("stopped", ExitCode.INTERRUPTED, step, "interrupted before there was anything to save")


def _first_failure(folder: Path, code: int, report: Path | None, earlier: frozenset[str]) -> dict[str, Any]:
    """The root cause among failures that cause each other. In this order, because the earlier cannot be a consequence:

    a crash of its own (SIGSEGV, SIGABRT), which leaves no error report; an error report, which is about the process's
    own error, not about a lost peer; SIGKILL, from outside or from torchrun to a worker that did not end; other exit
    codes, those with a message first and stopped processes last.
    """
    report_of_process = read_first_error(folder, earlier)
    if report is None:
        message = f"killed by {signal.Signals(-code).name}" if code < 0 else read_status(folder).get("reason") or ""
        return {"rank": 0, "exit_code": code, "message": message}
    failures = _read_failures(report)
    crashed = [one for one in failures if one["exit_code"] < 0 and -one["exit_code"] not in _TORCHRUN_KILL_SIGNALS]
    killed = [one for one in failures if one["exit_code"] == -signal.SIGKILL]
    exited = [one for one in failures if one["exit_code"] > 0]
    exited.sort(key=lambda one: (one["exit_code"] in _STOPPED, not one["message"], one["time"]))
    reported = [report_of_process | {"own_error": True}] if report_of_process else []
    causes = [*crashed, *reported, *killed, *exited]
    return causes[0] if causes else _without_report(code)


def _read_failures(report: Path) -> list[dict[str, Any]]:
    """torchrun's report: the failed processes of this machine."""
    with contextlib.suppress(OSError, ValueError):
        return list(json.loads(report.read_text()))
    return []


def _without_report(code: int) -> dict[str, Any]:
    name = signal.Signals(-code).name if code < 0 else f"exit code {code}"
    return {"rank": None, "exit_code": ExitCode.FAILED, "message": f"torchrun ended without a report ({name})"}


def finished_steps(folder: Path) -> int:
    """The last step in metrics.jsonl; the newest checkpoint may be older."""
    lines, _ = read_json_lines(folder / "metrics.jsonl")
    return next((line["step"] for line in reversed(lines) if isinstance(line.get("step"), int)), 0)
