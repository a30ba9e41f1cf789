"""Error reports of a failed process: RUN/logs/rank-N.json for the supervisor, and torchrun's error file."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import time
from pathlib import Path
from typing import Any

from whet.core import launch_env
from whet.core.checksums import read_hashed_json
from whet.core.display import mask_secrets
from whet.core.errors import WhetError
from whet.core.files import write_json
from whet.core.heartbeat import PHASE


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


def write_torchelastic_error(message: str) -> None:
    """Write the error file that torchrun gives each worker, so that its summary shows the message."""
    file = launch_env.error_file()
    if file is not None:
        message = mask_secrets(message)
        info = {"py_callstack": message, "timestamp": int(time.time())}
        with contextlib.suppress(OSError):
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(json.dumps({"message": {"message": message, "extraInfo": info}}))


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
