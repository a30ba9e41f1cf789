"""The phase of this process, which the watchdog reads, and the report that it writes when it fails. No torch."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from whet.core import launch_env
from whet.core.checksums import read_hashed_json
from whet.core.display import mask_secrets
from whet.core.errors import ExitCode, RunFailedError, WhetError
from whet.core.files import write_json


@dataclass(slots=True)
class Phase:
    """The phase of one process. Entering one is a few assignments; nothing is written until someone reads it."""

    step: int = 0
    """The current step, counted from 1; 0 before the first."""
    name: str = "starting"
    waits: int = 0
    """How many collectives and barriers it has entered; it may still be inside the last one."""
    waiting: bool = False
    """Whether it is inside one."""
    unbounded: bool = False
    """Whether the phase may take any time, such as preparing data: then being alive is enough for the watchdog."""
    since: float = 0.0
    """When the phase began, on this process's monotonic clock."""

    def enter(self, name: str, step: int | None = None, unbounded: bool = False) -> None:
        """Begin a phase."""
        if step is not None:
            self.step = step
        self.name, self.waiting, self.unbounded = name, False, unbounded
        self.since = time.monotonic()

    def begin_wait(self) -> None:
        """Enter a collective or a barrier within the current phase."""
        self.waits += 1
        self.waiting = True
        self.since = time.monotonic()

    def end_wait(self) -> None:
        self.waiting = False
        self.since = time.monotonic()

    def snapshot(self) -> dict[str, Any]:
        """For other processes: `for_s` replaces the monotonic clock, which they do not share."""
        fields = asdict(self)
        return fields | {"for_s": time.monotonic() - fields.pop("since")}


PHASE = Phase(since=time.monotonic())
"""The phase of this process."""


def describe_phase(snapshot: Mapping[str, Any]) -> str:
    """Such as `in step 12, computing gradients, waiting for the others`."""
    step = f"in step {snapshot['step']}" if snapshot["step"] else "before the first step"
    waiting = ", waiting for the others" if snapshot["waiting"] else ""
    return f"{step}, {snapshot['name']}{waiting}"


def format_age(seconds: float) -> str:
    """How long ago something was: `5 s ago`, `3 h ago`."""
    seconds = max(0, round(seconds))
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds // size} {unit} ago"
    return f"{seconds} s ago"


# Error reports of a failed process: RUN/logs/rank-N.json for the supervisor, and torchrun's error file.


def write_error_report(folder: Path, rank: int, message: str, exit_code: int) -> None:
    """Write logs/rank-N.json into the run folder, where every machine that shares it can read it.

    Never raises: the error being reported matters more than the report.
    """
    with contextlib.suppress(OSError):
        (folder / "logs").mkdir(exist_ok=True)
        write_json(
            folder / "logs" / f"rank-{rank}.json",
            {
                "rank": rank, "host": socket.gethostname(), "pid": os.getpid(), "time": time.time(),
                "step": PHASE.step, "doing": PHASE.name, "exit_code": exit_code, "message": mask_secrets(message),
            },
        )  # fmt: skip


def write_torchelastic_error(message: str, exit_code: int) -> None:
    """Write the error file that torchrun gives each worker, so that its summary shows the message. An incomplete one,
    as of a full disk, would end torchrun with a traceback of its own."""
    file = launch_env.error_file()
    if file is not None:
        message = mask_secrets(message)
        info = {"py_callstack": message, "timestamp": int(time.time()), "rank": launch_env.rank(), "exit": exit_code}
        with contextlib.suppress(OSError):
            file.parent.mkdir(parents=True, exist_ok=True)
            write_json(file, {"message": {"message": message, "extraInfo": info}})


def read_neighbour_error() -> WhetError | None:
    """The error of another process that torchrun started on this machine: torchrun then stops the others with SIGTERM,
    which none of them can tell from a requested stop."""
    file = launch_env.error_file()
    for other in file.parent.parent.glob("*/error.json") if file is not None else ():
        with contextlib.suppress(OSError, ValueError, LookupError, TypeError):
            report = json.loads(other.read_text())["message"]
            code, rank = report["extraInfo"]["exit"], report["extraInfo"]["rank"]
            if code not in (ExitCode.STOPPED, ExitCode.INTERRUPTED) and rank != launch_env.rank():
                kind = WhetError if code == ExitCode.INPUT else RunFailedError
                return kind(f"rank {rank} on {socket.gethostname()} failed: {report['message']}")
    return None


def report_texts(folder: Path) -> frozenset[str]:
    """status.json and all error reports as they are, to tell later ones from them: by content, because the clocks of
    machines differ. Each has the time and the process id of its writer."""
    texts = []
    for file in (folder / "status.json", *folder.glob("logs/rank-*.json")):
        with contextlib.suppress(OSError, UnicodeDecodeError):
            texts.append(file.read_text())
    return frozenset(texts)


def read_first_error(folder: Path, earlier: frozenset[str]) -> dict[str, Any] | None:
    """The report of the process that failed first since `earlier` was read."""
    found = []
    for file in folder.glob("logs/rank-*.json"):
        with contextlib.suppress(OSError, WhetError, UnicodeDecodeError):  # another machine may write or remove it
            if file.read_text() not in earlier:
                found.append(read_hashed_json(file, time=(int, float), exit_code=int, rank=int, message=str))
    return min(found, key=lambda report: report["time"], default=None)
