"""A run that is started, watched, and started again from its newest checkpoint when it crashes."""

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

from whet.core.console import say, warn
from whet.core.errors import FAILED, INPUT
from whet.core.files import append_line, read_json, write_json
from whet.core.interrupt import ASKING
from whet.core.run import note_failure
from whet.fleet.agent import REPORT
from whet.fleet.decide import End, Ending, Restart, decide
from whet.fleet.ending import read_ending
from whet.fleet.job import Job
from whet.fleet.torchrun import command

_POLL_S = 0.2
_STDERR = 2  # stdout belongs to this command's own result


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a launch ended."""

    exit_code: int
    reason: str
    attempts: list[Ending]


def supervise(job: Job) -> Outcome:
    """Start the job until it is done, is stopped, or is not worth another attempt."""
    history: list[Ending] = []
    marker = Marker(job)
    with _Signals() as signals:
        while True:
            began = time.time()
            ending = _attempt(job, job.resume or bool(history), signals, marker, began)
            history.append(ending)
            decision: Restart | End = decide(history, job.max_restarts, job.wait_s)
            if isinstance(decision, Restart) and (other := marker.read()):
                decision = End(FAILED, f"{other['host']} has given up: {other['reason']}")
            _log(job, len(history), began, ending, decision)
            if isinstance(decision, End):
                return _end(job, decision, history, marker)
            warn(
                f"{ending.who} failed after step {ending.step}: {ending.message or 'without a word'}. Restart "
                f"{len(history)} of {job.max_restarts} in {decision.after_s:g} s"
            )
            if signals.wait(decision.after_s):
                return _end(job, End(*_while_waiting(job, signals)), history, marker)


def _end(job: Job, decision: End, history: list[Ending], marker: Marker) -> Outcome:
    if decision.exit_code == FAILED:
        note_failure(job.folder, decision.reason, FAILED)
    if decision.exit_code in (FAILED, INPUT):
        marker.write(decision.reason)
    return Outcome(decision.exit_code, decision.reason, history)


def _while_waiting(job: Job, signals: _Signals) -> tuple[int, str]:
    """Asked to stop when nothing runs."""
    stopped = read_ending(job.folder, 1, None, time.time(), asked=True, again=signals.again)
    return stopped.exit_code, stopped.message


def _attempt(job: Job, resume: bool, signals: _Signals, marker: Marker, began: float) -> Ending:
    """Start the processes, pass signals on to them, and wait for their end."""
    words = command(job, resume)
    with tempfile.TemporaryDirectory(prefix="whet-launch-") as scratch:
        report = Path(scratch) / "report.json" if "whet.fleet.agent" in words else None
        env = {**os.environ, **job.env} | ({} if report is None else {REPORT: str(report)})
        # In a session of their own: Ctrl-C in a terminal would reach them twice, and the second time means "at once".
        process = subprocess.Popen(words, env=env, stdout=_STDERR, start_new_session=True)
        with signals.passed_to(process, has_workers=report is not None):
            alone = False
            while (code := _ended(process)) is None:
                if not alone and marker.read() is not None:  # another machine's processes will not come back
                    alone = True
                    process.terminate()
        return read_ending(job.folder, code, report, began, asked=signals.count > 0, again=signals.again)


def _ended(process: subprocess.Popen[bytes]) -> int | None:
    """Its exit code, or None after a moment in which it did not end."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        return process.wait(timeout=_POLL_S)
    return None


def _log(job: Job, attempt: int, began: float, ending: Ending, decision: Restart | End) -> None:
    """A line of launch.jsonl. A folder without a run, or with that of another, is left as it is."""
    if ending.kind == "input" or not (job.folder / "config.yaml").exists():
        return
    line = {"attempt": attempt, "node": socket.gethostname(), "began": began, "ended": time.time(), **asdict(ending)}
    line |= {"then": "restart" if isinstance(decision, Restart) else "end", **asdict(decision)}
    with contextlib.suppress(OSError):
        append_line(job.folder / "launch.jsonl", line)


class Marker:
    """Tells the supervisors on the other machines that this one has given up; they would wait at the rendezvous."""

    def __init__(self, job: Job) -> None:
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


class _Signals:
    """Signals to this process, passed on to the processes of the run."""

    def __init__(self) -> None:
        self.count = 0
        self.again = False
        """A program asked, which will start the run again; Ctrl-C is a person's."""
        self._process: subprocess.Popen[bytes] | None = None
        self._has_workers = False

    def __enter__(self) -> _Signals:
        wanted = [signal.SIGINT, *ASKING]
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
        workers = _children(self._process.pid) if self._has_workers else []
        for pid in workers or [self._process.pid]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM if number == signal.SIGHUP else number)
        if self.count == 1:
            say("asked the run to stop when its step is saved")


def _children(pid: int) -> list[int]:
    """The processes that a process has started, as Linux tells."""
    found: list[int] = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            found += map(int, task.read_text().split())
    return found
