"""Start a run, forward signals to it, and restart it from its newest checkpoint after a crash."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from whet.core.console import info, warn
from whet.core.errors import ExitCode
from whet.core.files import append_json_line, read_json, write_json
from whet.core.run_folder import record_failure
from whet.core.signals import STOP_SIGNALS
from whet.launch.local import LaunchJob, launch_command
from whet.launch.restart_policy import AttemptResult, Finish, Restart, decide_restart, read_attempt_result
from whet.launch.torchrun_agent import REPORT_VARIABLE

_POLL_S = 0.2
_STDERR = 2  # stdout belongs to this command's own result


@dataclass(frozen=True, slots=True)
class LaunchResult:
    """How a launch ended."""

    exit_code: int
    reason: str
    attempts: list[AttemptResult]


def supervise(job: LaunchJob) -> LaunchResult:
    """Start the job until it is done, is stopped, or is not worth another attempt."""
    history: list[AttemptResult] = []
    marker = GivenUpFile(job)
    with _SignalForwarder() as signals:
        while True:
            began = time.time()
            ending = _run_attempt(job, job.resume or bool(history), signals, marker, began)
            history.append(ending)
            decision: Restart | Finish = decide_restart(history, job.max_restarts, job.wait_s)
            if isinstance(decision, Restart) and (other := marker.read()):
                decision = Finish(ExitCode.FAILED, f"{other['host']} has given up: {other['reason']}")
            _log_attempt(job, len(history), began, ending, decision)
            if isinstance(decision, Finish):
                return _finish_launch(job, decision, history, marker)
            warn(
                f"{ending.who} failed after step {ending.step}: {ending.message or 'without a word'}. Restart "
                f"{len(history)} of {job.max_restarts} in {decision.after_s:g} s"
            )
            if signals.wait(decision.after_s):
                return _finish_launch(job, Finish(*_stopped_during_backoff(job, signals)), history, marker)


def _finish_launch(job: LaunchJob, decision: Finish, history: list[AttemptResult], marker: GivenUpFile) -> LaunchResult:
    if decision.exit_code == ExitCode.FAILED:
        record_failure(job.folder, decision.reason, ExitCode.FAILED)
    if decision.exit_code in (ExitCode.FAILED, ExitCode.INPUT):
        marker.write(decision.reason)
    return LaunchResult(decision.exit_code, decision.reason, history)


def _stopped_during_backoff(job: LaunchJob, signals: _SignalForwarder) -> tuple[int, str]:
    """Asked to stop when nothing runs."""
    stopped = read_attempt_result(job.folder, 1, None, time.time(), asked=True, again=signals.again)
    return stopped.exit_code, stopped.message


def _run_attempt(
    job: LaunchJob, resume: bool, signals: _SignalForwarder, marker: GivenUpFile, began: float
) -> AttemptResult:
    """Start the processes, pass signals on to them, and wait for their end."""
    words = launch_command(job, resume)
    with tempfile.TemporaryDirectory(prefix="whet-launch-") as scratch:
        report = Path(scratch) / "report.json" if "whet.launch.torchrun_agent" in words else None
        env = {**os.environ, **job.env} | ({} if report is None else {REPORT_VARIABLE: str(report)})
        # In a session of their own: Ctrl-C in a terminal would reach them twice, and the second time means "at once".
        process = subprocess.Popen(words, env=env, stdout=_STDERR, start_new_session=True)
        with signals.passed_to(process, has_workers=report is not None):
            alone = False
            while (code := _poll_exit_code(process)) is None:
                if not alone and marker.read() is not None:  # another machine's processes will not come back
                    alone = True
                    process.terminate()
        return read_attempt_result(job.folder, code, report, began, asked=signals.count > 0, again=signals.again)


def _poll_exit_code(process: subprocess.Popen[bytes]) -> int | None:
    """Its exit code, or None after a moment in which it did not end."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        return process.wait(timeout=_POLL_S)
    return None


def _log_attempt(job: LaunchJob, attempt: int, began: float, ending: AttemptResult, decision: Restart | Finish) -> None:
    """A line of launch.jsonl. A folder without a run, or with that of another, is left as it is."""
    if ending.kind == "input" or not (job.folder / "config.yaml").exists():
        return
    line = {"attempt": attempt, "node": socket.gethostname(), "began": began, "ended": time.time(), **asdict(ending)}
    line |= {"then": "restart" if isinstance(decision, Restart) else "end", **asdict(decision)}
    with contextlib.suppress(OSError):
        append_json_line(job.folder / "launch.jsonl", line)


class GivenUpFile:
    """Tells the supervisors on the other machines that this one has given up; they would wait at the rendezvous."""

    def __init__(self, job: LaunchJob) -> None:
        self._file = job.folder / "logs" / "given-up.json" if job.nodes > 1 else None
        if self._file is not None:
            self._file.unlink(missing_ok=True)

    def write(self, reason: str) -> None:
        if self._file is not None and self._file.parent.exists() and not self._file.exists():
            with contextlib.suppress(OSError):
                write_json(self._file, {"host": socket.gethostname(), "reason": reason, "time": time.time()})

    def read(self) -> dict[str, Any] | None:
        if self._file is None or not self._file.exists():
            return None
        with contextlib.suppress(Exception):
            return dict(read_json(self._file))
        return None


class _SignalForwarder:
    """Signals to this process, passed on to the processes of the run."""

    def __init__(self) -> None:
        self.count = 0
        self.again = False
        """A program asked, which will start the run again; Ctrl-C is a person's."""
        self._process: subprocess.Popen[bytes] | None = None
        self._has_workers = False

    def __enter__(self) -> _SignalForwarder:
        wanted = [signal.SIGINT, *STOP_SIGNALS]
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # nohup wants no end with the terminal's
            wanted.append(signal.SIGHUP)
        self._before = {number: signal.signal(number, self._note) for number in wanted}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    @contextlib.contextmanager
    def passed_to(self, process: subprocess.Popen[bytes], has_workers: bool) -> Iterator[None]:
        self._process, self._has_workers = process, has_workers
        try:
            yield
        finally:
            self._process = None

    def wait(self, seconds: float) -> bool:
        """Sleep; True if a signal came before the end of it."""
        until = time.monotonic() + seconds
        while not self.count and time.monotonic() < until:
            time.sleep(min(_POLL_S, max(0.0, until - time.monotonic())))
        return self.count > 0

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.count += 1
        self.again = self.again or number != signal.SIGINT
        if self._process is None:
            return
        # Not to torchrun, where there is one: it kills, 30 s after a signal, whoever is still saving.
        workers = _child_pids(self._process.pid) if self._has_workers else []
        for pid in workers or [self._process.pid]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM if number == signal.SIGHUP else number)
        if self.count == 1:
            info("asked the run to stop when its step is saved")


def _child_pids(pid: int) -> list[int]:
    """The processes that a process has started, as Linux tells."""
    found: list[int] = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            found += map(int, task.read_text().split())
    return found
