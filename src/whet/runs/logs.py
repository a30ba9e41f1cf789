"""The log of a run: what its processes printed, kept in its folder, or the output of its Slurm job."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from whet.core.errors import WhetError
from whet.core.json_lines import read_json_lines

_POLL_S = 0.3
_SHOWN_LINES = 20
"""Of what was there before, when a log is followed."""


def find_log(folder: Path, rank: int | None) -> Path:
    """The log of a rank. Without one, the output of the newest Slurm job, which has all ranks and what failed before
    them; without Slurm, the log of rank 0."""
    files = (file for file in folder.glob("logs/rank-*.log") if file.is_file())
    logs = {int(file.stem[5:]): file for file in files if file.stem[5:].isdecimal()}
    if rank is not None:
        if rank not in logs:
            known = ", ".join(map(str, sorted(logs))) or "none"
            raise WhetError(f"{folder}: there is no log of rank {rank}. Ranks with a log: {known}")
        return logs[rank]
    later = {
        str(line.get("job"))
        for line in read_json_lines(folder / "slurm" / "jobs.jsonl")[0]
        if line.get("script") == "then.sh"
    }
    outputs = [file for file in folder.glob("slurm/*.out") if file.stem not in later and file.is_file()]
    if outputs:
        return max(outputs, key=lambda file: file.stat().st_mtime)
    if 0 not in logs:
        raise WhetError(
            f"{folder}: it has no log. A run writes logs/rank-0.log from its start; one of an earlier whet did not, "
            "and a queued job has none yet"
        )
    return logs[0]


def read_log(file: Path) -> list[str]:
    """The lines of a log."""
    return file.read_text(encoding="utf-8", errors="replace").splitlines()


def follow_log(folder: Path, rank: int | None, is_active: Callable[[], bool]) -> Iterator[str]:
    """The last lines of a log, then new ones as they come, until the run has ended. The next job of a chain has another
    file."""
    file, position, rest = None, 0, b""
    while True:
        ended = not is_active()  # before reading: what is written later is not lost
        try:
            newest = find_log(folder, rank)
        except WhetError:
            if ended:
                raise
            time.sleep(_POLL_S)
            continue
        if newest != file or newest.stat().st_size < position:
            position, rest = (0 if file is not None else _tail_position(newest)), b""
            file = newest
        with file.open("rb") as opened:
            opened.seek(position)
            content = opened.read()
        position += len(content)
        *lines, rest = (rest + content).split(b"\n")
        yield from (line.decode(errors="replace") for line in lines)
        if ended:
            if rest:
                yield rest.decode(errors="replace")
            return
        if not content:
            time.sleep(_POLL_S)


def _tail_position(file: Path) -> int:
    """Where the last lines begin."""
    with file.open("rb") as opened:
        start = max(0, os.fstat(opened.fileno()).st_size - 2**16)
        opened.seek(start)
        content = opened.read()
    end = content.rfind(b"\n") + 1
    for _ in range(_SHOWN_LINES):
        at = content.rfind(b"\n", 0, max(0, end - 1))
        if at < 0:
            return start
        end = at + 1
    return start + end
