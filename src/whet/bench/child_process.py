"""Child processes of the benchmark: stderr goes to a log, and they end with their parent."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from whet.core.signals import collect_stop_signals, raise_on_stop_signals

_TERMINATE_TIMEOUT_S = 5.0


@dataclass(frozen=True, slots=True)
class ProcessResult:
    """The exit code, the times and the output of a process."""

    code: int
    began: float
    """Unix time."""
    seconds: float
    out: str

    @property
    def killed_by(self) -> str | None:
        """The name of the signal that ended it, if one did."""
        return signal.Signals(-self.code).name if self.code < 0 else None


def run_process(command: Sequence[str], log: Path, environment: Mapping[str, str]) -> ProcessResult:
    """Run a command to its end; stderr goes to `log`. Ctrl-C and SIGTERM end it together with this process."""
    signals: list[int] = []
    process: subprocess.Popen[bytes] | None = None
    with log.open("wb") as stderr, raise_on_stop_signals():
        began = time.time()
        try:
            # a signal between the start of the process and the assignment would leave it running
            with collect_stop_signals(signals, lambda: None):
                process = subprocess.Popen(
                    command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=stderr, env=dict(environment),
                    start_new_session=True,
                )  # fmt: skip
            if signals:
                raise KeyboardInterrupt
            out, _ = process.communicate()
        except BaseException:
            if process is not None:
                _terminate(process)
            raise
        finally:
            if process is not None:
                _signal_group(process, signal.SIGKILL)  # leftover workers would disturb the next contender
    return ProcessResult(process.returncode, began, time.time() - began, out.decode(errors="replace"))


def last_log_line(log: Path) -> str:
    """The last non-empty line of a log; of a traceback, the error."""
    lines = [line.strip() for line in log.read_text(errors="replace").replace("\r", "\n").splitlines()]
    return next((line for line in reversed(lines) if line), "")


def _terminate(process: subprocess.Popen[bytes]) -> None:
    _signal_group(process, signal.SIGTERM)
    try:
        process.wait(_TERMINATE_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        _signal_group(process, signal.SIGKILL)
        process.wait()


def _signal_group(process: subprocess.Popen[bytes], number: signal.Signals) -> None:
    """Signal the process and everything it started."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, number)
