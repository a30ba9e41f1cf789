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
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Any

from whet.core.checksums import read_hashed_json
from whet.core.console import info, warn
from whet.core.errors import ExitCode
from whet.core.files import write_json
from whet.core.heartbeat import report_texts
from whet.core.json_lines import append_json_line
from whet.core.notify import Notifier
from whet.core.run_folder import SUPERVISOR_VARIABLE, record_failure
from whet.core.signals import child_pids, exit_is_undisturbed, identify_process, stop_signals
from whet.launch.local import LaunchJob, launch_command
from whet.launch.log_policies import ProcessOutput, excludable_node, exclude_node
from whet.launch.restart_policy import (
    AttemptResult,
    Finish,
    Restart,
    decide_restart,
    finished_steps,
    read_attempt_result,
    read_program_result,
)
from whet.launch.torchrun_agent import REPORT_VARIABLE

GIVEN_UP_VARIABLE = "WHET_GIVEN_UP"
_POLL_S = 0.2
_STDERR = 2  # stdout is for the result of whet launch


@dataclass(frozen=True, slots=True)
class LaunchResult:
    """How a launch ended."""

    exit_code: int
    reason: str
    attempts: list[AttemptResult]

    def as_dict(self) -> dict[str, Any]:
        """For --json."""
        return {
            "exit_code": self.exit_code,
            "reason": self.reason,
            "restarts": len(self.attempts) - 1,
            "attempts": [asdict(attempt) for attempt in self.attempts],
        }


def supervise(job: LaunchJob, stdout: int | None = _STDERR) -> LaunchResult:
    """Start the job, and again after each crash, until decide_restart ends it. `stdout`: of the processes."""
    attempts: list[AttemptResult] = []
    given_up = GivenUpFile(job)
    with _SignalForwarder(is_run=job.folder is not None) as signals:
        while True:
            began = time.time()
            output = ProcessOutput(job.log_policies, stdout)
            result = _run_attempt(job, job.resume or bool(attempts), signals, given_up, output)
            attempts.append(result)
            decision: Restart | Finish = decide_restart(attempts, job.max_restarts, job.wait_s, excludable_node())
            if isinstance(decision, Restart) or (job.folder is None and result.kind != "done"):
                decision = given_up.decision(job) or decision
            _log_attempt(job, len(attempts), began, result, decision)
            if isinstance(decision, Finish):
                return _finish_launch(job, decision, attempts, given_up)
            warn(
                f"{result.who} failed{result.when}: {result.message or 'no error message'}. Restart "
                f"{len(attempts)} of {job.max_restarts} in {decision.after_s:g} s"
            )
            if signals.wait(decision.after_s):
                stopped = Finish(*_stopped_during_backoff(job, signals))
                if job.folder is None:
                    stopped = given_up.decision(job) or stopped
                return _finish_launch(job, stopped, attempts, given_up)


def _finish_launch(
    job: LaunchJob, decision: Finish, attempts: list[AttemptResult], given_up: GivenUpFile
) -> LaunchResult:
    has_crashed = decision.exit_code == ExitCode.FAILED or len(attempts) > 1
    if job.folder is not None and has_crashed and decision.exit_code in (ExitCode.FAILED, ExitCode.INPUT):
        record_failure(job.folder, decision.reason, decision.exit_code)
    if job.folder is not None and decision.exit_code in (ExitCode.FAILED, ExitCode.INPUT) and given_up.read() is None:
        notifier = Notifier(job.notify, job.folder)
        notifier.send("failed", decision.reason, attempts=len(attempts))
        notifier.wait()
    if decision.exclude is not None:
        exclude_node(decision.exclude)
    if decision.exclude is not None or decision.exit_code not in (
        ExitCode.DONE, ExitCode.STOPPED, ExitCode.INTERRUPTED, 128 + signal.SIGTERM,
    ):  # fmt: skip
        given_up.write(decision, makes_folder=decision.exit_code != ExitCode.INPUT)
    return LaunchResult(decision.exit_code, decision.reason, attempts)


def _stopped_during_backoff(job: LaunchJob, signals: _SignalForwarder) -> tuple[int, str]:
    """A signal between two attempts."""
    if job.folder is None:
        return ExitCode.STOPPED if signals.by_program else ExitCode.INTERRUPTED, "stopped before the restart"
    stopped = read_attempt_result(
        job.folder, 1, None, report_texts(job.folder), stop_requested=True, by_program=signals.by_program
    )
    return stopped.exit_code, stopped.message


def _run_attempt(
    job: LaunchJob, resume: bool, signals: _SignalForwarder, given_up: GivenUpFile, output: ProcessOutput
) -> AttemptResult:
    """Start the processes, forward signals to them, and wait until they end."""
    command = launch_command(job, resume)
    earlier = frozenset[str]() if job.folder is None else report_texts(job.folder)
    with tempfile.TemporaryDirectory(prefix="whet-launch-") as scratch:
        report = Path(scratch) / "report.json" if job.uses_torchrun else None
        env = {**os.environ, **job.env, SUPERVISOR_VARIABLE: identify_process(os.getpid()) or ""}
        env |= {} if report is None else {REPORT_VARIABLE: str(report)}
        # in a new session: otherwise Ctrl-C in a terminal reaches them twice, and the second one stops at once
        process = subprocess.Popen(command, env=env, stdout=output.stdout, stderr=output.stderr, start_new_session=True)
        with output.read(), signals.forwarded_to(process, has_workers=report is not None):
            gone: dict[str, Any] | None = None
            while (code := output.wait(process, _POLL_S)) is None:
                signals.announce()
                if gone is None and (gone := given_up.read()) is not None:  # its processes will not come back
                    process.terminate()
        if job.folder is None:
            assert report is not None
            result = read_program_result(code, report, signals.count > 0, signals.by_program)
            return replace(result, match=output.match)
        if gone is not None and not signals.count:  # they were stopped, but on nobody's request
            message = f"{gone['host']} has given up: {gone['reason']}"
            return AttemptResult("crashed", ExitCode.FAILED, finished_steps(job.folder), message)
        result = read_attempt_result(
            job.folder, code, report, earlier, stop_requested=signals.count > 0, by_program=signals.by_program
        )
        return replace(result, match=output.match)


def _log_attempt(job: LaunchJob, attempt: int, began: float, result: AttemptResult, decision: Restart | Finish) -> None:
    """Append a line to launch.jsonl, except in a folder without a run or with another one."""
    if result.kind == "input" or job.folder is None or not (job.folder / "config.yaml").exists():
        return
    line = {"attempt": attempt, "node": socket.gethostname(), "began": began, "ended": time.time(), **asdict(result)}
    line |= {"then": "restart" if isinstance(decision, Restart) else "end", **asdict(decision)}
    with contextlib.suppress(OSError):
        append_json_line(job.folder / "launch.jsonl", line)


class GivenUpFile:
    """Tells the supervisors on other machines, which wait at the rendezvous, to give up too: logs/given-up.json, or for
    a program in a Slurm job the file that its script names.

    srun kills the other tasks when one has failed, and passes on the highest exit code. So a program that is stopped
    after another node gave up ends with that node's exit code.
    """

    def __init__(self, job: LaunchJob) -> None:
        self._file: Path | None = None
        if job.nodes > 1 and job.folder is not None:
            self._file = job.folder / "logs" / "given-up.json"
        elif job.nodes > 1 and GIVEN_UP_VARIABLE in os.environ:
            self._file = Path(os.environ[GIVEN_UP_VARIABLE])
        if self._file is not None:
            self._file.unlink(missing_ok=True)

    def write(self, decision: Finish, makes_folder: bool) -> None:
        """`makes_folder`: also where the run has not made its folder yet. Wrong input leaves no folder."""
        if self._file is not None and not self._file.exists():
            line = {"host": socket.gethostname(), "reason": decision.reason, "exit_code": decision.exit_code}
            with contextlib.suppress(OSError):
                self._file.parent.mkdir(parents=makes_folder, exist_ok=True)
                write_json(self._file, line | {"time": time.time()})

    def decision(self, job: LaunchJob) -> Finish | None:
        """What to do if another machine has given up; None if none has."""
        other = self.read()
        if other is None:
            return None
        exit_code = other["exit_code"] if job.folder is None else ExitCode.FAILED
        return Finish(exit_code, f"{other['host']} has given up: {other['reason']}")

    def read(self) -> dict[str, Any] | None:
        if self._file is None or not self._file.exists():
            return None
        with contextlib.suppress(Exception):
            return read_hashed_json(self._file, host=str, reason=str, exit_code=int)
        return None


class _SignalForwarder:
    """Forwards signals of this process to the processes of the run. Processes of the user's program that outlive a
    first signal are killed by a second Ctrl-C; those of a run save before they end."""

    def __init__(self, is_run: bool) -> None:
        self.count = 0
        self._is_run = is_run
        self.by_program = False
        """From a scheduler, which will start the run again; SIGINT is Ctrl-C."""
        self._process: subprocess.Popen[bytes] | None = None
        self._has_workers = self._is_announced = False
        self._groups: set[int] = set()
        """Process groups of a program that were signalled."""

    def __enter__(self) -> _SignalForwarder:
        self._before = {number: signal.signal(number, self._forward) for number in stop_signals()}
        return self

    def __exit__(self, *_: object) -> None:
        if exit_is_undisturbed():  # srun kills this task when one on another node has failed
            return
        for number, handler in self._before.items():
            signal.signal(number, handler)

    @contextlib.contextmanager
    def forwarded_to(self, process: subprocess.Popen[bytes], has_workers: bool) -> Iterator[None]:
        self._process, self._has_workers = process, has_workers
        try:
            yield
        finally:
            self._process = None
            for group in self._groups:  # what a shell starts in the background ignores SIGINT
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(group, signal.SIGKILL)

    def wait(self, seconds: float) -> bool:
        """Sleep; returns True as soon as a signal has arrived."""
        until = time.monotonic() + seconds
        while not self.count and time.monotonic() < until:
            time.sleep(min(_POLL_S, max(0.0, until - time.monotonic())))
        return self.count > 0

    def _forward(self, number: int, frame: FrameType | None) -> None:
        self.count += 1
        self.by_program = self.by_program or number != signal.SIGINT
        if self._process is None:
            return
        # to the workers, not to torchrun: it kills those that are still saving 30 s after a signal
        workers = child_pids(self._process.pid) if self._has_workers else []
        for pid in workers or [self._process.pid]:
            with contextlib.suppress(ProcessLookupError):
                if self._is_run or not workers or os.getpgid(pid) != pid:
                    os.kill(pid, number)
                else:  # a shell that alone gets a signal waits for its child
                    self._groups.add(pid)
                    os.killpg(pid, signal.SIGKILL if self.count > 1 and number == signal.SIGINT else number)

    def announce(self) -> None:
        """Say once that a signal was forwarded. Not in the handler, which may have interrupted another message."""
        if self.count and not self._is_announced:
            self._is_announced = True
            hint = "" if self.by_program else "; a second Ctrl-C kills"
            info("stopping after the current step is saved" if self._is_run else f"stopping{hint}")
