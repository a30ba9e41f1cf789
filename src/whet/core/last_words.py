"""The last words of a process: what it died of, where a supervisor finds it. No process of a run fails unheard."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import time
from pathlib import Path
from typing import Any

from whet.core.files import write_json
from whet.core.whereabouts import HERE


def leave_in_run(folder: Path, rank: int, message: str, exit_code: int) -> None:
    """logs/rank-N.json in the run's folder: seen from every machine that shares it. It must not fail: the error that
    is to be told is more important than telling it."""
    with contextlib.suppress(OSError):
        (folder / "logs").mkdir(exist_ok=True)
        write_json(
            folder / "logs" / f"rank-{rank}.json",
            {
                "rank": rank, "host": socket.gethostname(), "pid": os.getpid(), "time": time.time(),
                "step": HERE.step, "doing": HERE.doing, "exit_code": exit_code, "message": message,
            },
        )  # fmt: skip


def leave_to_launcher(message: str) -> None:
    """The file that torchrun gives each process for this: its summary then names the error instead of a link."""
    file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if file:
        words = {"message": {"message": message, "extraInfo": {"py_callstack": message, "timestamp": int(time.time())}}}
        with contextlib.suppress(OSError):
            Path(file).parent.mkdir(parents=True, exist_ok=True)
            Path(file).write_text(json.dumps(words))


def first_in_run(folder: Path, since: float) -> dict[str, Any] | None:
    """The last words of the process that failed first, among those that failed after `since`."""
    found = []
    for file in folder.glob("logs/rank-*.json"):
        with contextlib.suppress(OSError, ValueError):  # another machine may be writing it, or tidying up
            words = json.loads(file.read_text())
            if words["time"] >= since:
                found.append(words)
    return min(found, key=lambda words: words["time"], default=None)
