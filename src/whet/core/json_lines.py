"""Files of JSON objects, one per line, to which runs append."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

from whet.core.console import warn
from whet.core.files import atomic_write, hash_prefix, is_open_at, move_aside


class JsonLinesWriter:
    """An append-only file of JSON objects, one per line, that knows its size and hash.

    If someone deletes or replaces it meanwhile, as editors do when they save, its lines are written again.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: IO[bytes] = path.open("a+b")
        self._file.seek(0)
        self._hash = hash_prefix(self._file)
        self.size = self._file.seek(0, os.SEEK_END)

    def write(self, record: dict[str, Any]) -> None:
        """Append one object and flush it to the operating system."""
        line = json.dumps(record, ensure_ascii=False, allow_nan=False).encode() + b"\n"
        if not is_open_at(self._file, self._path):
            self._put_back()
        self._file.write(line)
        self._file.flush()
        self._hash.update(line)
        self.size += len(line)

    def hash(self) -> str:
        """The hash of all lines, as they were written."""
        return self._hash.hexdigest()

    def close(self) -> None:
        """Sync to the disk and close."""
        os.fsync(self._file.fileno())
        self._file.close()

    def _put_back(self) -> None:
        other = move_aside(self._path).name if os.path.lexists(self._path) else None
        self._file.seek(0)
        atomic_write(self._path, self._file.read())
        self._file.close()
        self._file = self._path.open("a+b")
        happened = f"replaced by another file, which is now {other}," if other else "deleted"
        warn(f"{self._path}: {happened} while a run was writing to it. All lines of the run are in it again")


def append_json_line(path: Path, record: dict[str, Any]) -> None:
    """Append one object in a single write, so that lines of several writers do not mix."""
    line = json.dumps(record, ensure_ascii=False, allow_nan=False).encode() + b"\n"
    handle = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
    try:
        os.write(handle, line)
    finally:
        os.close(handle)


def read_json_lines(path: Path) -> tuple[list[dict[str, Any]], list[int]]:
    """All objects of a JSON-lines file, and the numbers of lines that hold none. A last line without an end, which a
    writer or a crash left so, is neither."""
    records, damaged = [], []
    if path.is_file():
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                record = parse_json_line(line)
                if record is not None:
                    records.append(record)
                elif line.endswith(b"\n"):
                    damaged.append(number)
    return records, damaged


def parse_json_line(line: bytes) -> dict[str, Any] | None:
    """The object in a complete line of a JSON-lines file; None if the line is damaged."""
    try:
        record = json.loads(line, parse_constant=_reject_constant) if line.endswith(b"\n") else None
    except (ValueError, RecursionError):
        return None
    return record if isinstance(record, dict) else None


def describe_lines(numbers: Sequence[int]) -> str:
    """`line 7`, or `lines 7, 8, 9 and 12 more`."""
    shown, more = ", ".join(map(str, numbers[:5])), len(numbers) - 5
    return f"line{'s' if len(numbers) > 1 else ''} {shown}" + (f" and {more:,} more" if more > 0 else "")


def _reject_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")
