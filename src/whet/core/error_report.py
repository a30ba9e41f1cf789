"""Error reports of a failed process: RUN/logs/rank-N.json for the supervisor, torchelastic's error file for torchrun."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import time
from pathlib import Path
from typing import Any

from whet.core.files import write_json
from whet.core.heartbeat import PHASE


def write_error_report(folder: Path, rank: int, message: str, exit_code: int) -> None:
    """logs/rank-N.json in the run's folder: seen from every machine that shares it. It must not fail: the error that
    is to be told is more important than telling it."""
    with contextlib.suppress(OSError):
        (folder / "logs").mkdir(exist_ok=True)
        write_json(
            folder / "logs" / f"rank-{rank}.json",
            {
                "rank": rank, "host": socket.gethostname(), "pid": os.getpid(), "time": time.time(),
                "step": PHASE.step, "doing": PHASE.doing, "exit_code": exit_code, "message": message,
            },
        )  # fmt: skip


def write_torchelastic_error(message: str) -> None:
    """The file that torchrun gives each process for this: its summary then names the error instead of a link."""
    file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if file:
        words = {"message": {"message": message, "extraInfo": {"py_callstack": message, "timestamp": int(time.time())}}}
        with contextlib.suppress(OSError):
            Path(file).parent.mkdir(parents=True, exist_ok=True)
            Path(file).write_text(json.dumps(words))


def read_first_error(folder: Path, since: float) -> dict[str, Any] | None:
    """The last words of the process that failed first, among those that failed after `since`."""
    found = []
    for file in folder.glob("logs/rank-*.json"):
        with contextlib.suppress(OSError, ValueError):  # another machine may be writing it, or tidying up
            words = json.loads(file.read_text())
            if words["time"] >= since:
                found.append(words)
    return min(found, key=lambda words: words["time"], default=None)
