"""A contender's process: stderr goes to a log, and it ends with its parent."""

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
    """How it ended."""

    code: int
    began: float
    """Of the wall clock."""
    seconds: float
    out: str

    @property
    def killed_by(self) -> str | None:
        """The signal that ended it, by name."""
        return signal.Signals(-self.code).name if self.code < 0 else None


def run_process(command: Sequence[str], log: Path, environment: Mapping[str, str]) -> ProcessResult:
    """Run a command to its end. stderr goes to `log`; stdout is given back. Ctrl-C and SIGTERM end it with us."""
    asked: list[int] = []
    process: subprocess.Popen[bytes] | None = None
    with log.open("wb") as words, raise_on_stop_signals():
        began = time.time()
        try:
            with collect_stop_signals(
                asked, lambda: None
            ):  # or a signal would come between starting it and knowing what to end
                process = subprocess.Popen(
                    command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=words, env=dict(environment),
                    start_new_session=True,
                )  # fmt: skip
            if asked:
                raise KeyboardInterrupt
            out, _ = process.communicate()
        except BaseException:
            if process is not None:
                _terminate(process)
            raise
        finally:
            if process is not None:
                _signal_group(process, signal.SIGKILL)  # workers that it left behind would be in the next one's way
    return ProcessResult(process.returncode, began, time.time() - began, out.decode(errors="replace"))


def last_log_line(log: Path) -> str:
    """The last line of a log that says anything; of a traceback that is the error."""
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
    """To it and to all that it started."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, number)
