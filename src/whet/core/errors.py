"""Errors that a user can act on, and the exit code that `whet` ends with for each."""

from __future__ import annotations

import errno
from enum import IntEnum
from pathlib import Path


class ExitCode(IntEnum):
    """How a command ended. The values are part of the interface: docs/guide.md lists them."""

    DONE = 0
    INPUT = 1
    """The user's input, data or machine is at fault."""
    USAGE = 2
    """Wrong options or arguments."""
    FAILED = 3
    """The run failed and can be resumed."""
    STOPPED = 75
    """Stopped on request; --resume continues. EX_TEMPFAIL, which schedulers take as "requeue"."""
    INTERRUPTED = 130
    """Ctrl-C before there was anything to save."""


class WhetError(Exception):
    """The user's input, data or machine is at fault. The message names place, value and remedy."""

    exit_code = ExitCode.INPUT


class UsageError(WhetError):
    """Wrong options or arguments."""

    exit_code = ExitCode.USAGE


class RunFailedError(WhetError):
    """A run failed; its last checkpoint is good."""

    exit_code = ExitCode.FAILED


class StoppedError(WhetError):
    """A run stopped on request; it can be resumed."""

    exit_code = ExitCode.STOPPED


class CancelledError(WhetError):
    """The user pressed Ctrl-C before there was anything to save."""

    exit_code = ExitCode.INTERRUPTED


class BadRecordError(Exception):
    """A record that cannot be used. `reason` is its name in the ledger; the reader adds the file and line."""

    def __init__(self, reason: str, explanation: str) -> None:
        super().__init__(explanation)
        self.reason = reason


def first_line(error: BaseException) -> str:
    """The first line of an exception's message, or its type where it has none."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)


def describe_error(error: BaseException) -> str:
    """`ValueError: first line of the message`."""
    name, line = type(error).__name__, first_line(error)
    return name if line == name else f"{name}: {line}"


_DISK_ERRORS = {
    errno.ENOSPC: "the disk is full",
    errno.EDQUOT: "your disk quota is used up",
    errno.EROFS: "the file system is read-only",
    errno.EACCES: "permission denied",
    errno.EPERM: "permission denied",
    errno.ENOTDIR: "a part of the path is not a folder",
    errno.EIO: "the disk or its file system fails (input/output error)",
    errno.ESTALE: "the network file system lost the folder (stale file handle)",
}
_DISK_ERROR_TEXTS = (
    (errno.ENOSPC, "No space left on device"),
    (errno.ENOSPC, "inline_container"),  # torch.save on a full disk: "enforce fail at inline_container.cc"
    (errno.EROFS, "Read-only file system"),
    (errno.EIO, "Input/output error"),
    (errno.ESTALE, "Stale file handle"),
)


def disk_error(error: BaseException, doing: str, place: str | Path) -> WhetError | None:
    """A WhetError for a disk that is full, read-only or failing; None if `error` has another cause.

    Libraries wrap OSError in their own types, some as text only, so both the chain and the text are examined.
    """
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, OSError) and seen.errno in _DISK_ERRORS:
            return _make_disk_error(seen.errno, doing, seen.filename or place)
        seen = seen.__cause__ or seen.__context__
    for code, text in _DISK_ERROR_TEXTS:
        if text in str(error):
            return _make_disk_error(code, doing, place)
    return None


def _make_disk_error(code: int, doing: str, place: str | Path) -> WhetError:
    remedy = {
        errno.ENOSPC: "Free some space, or choose a folder on another disk",
        errno.EDQUOT: "Free some space, or choose a folder on another disk",
        errno.EIO: "Check the system log, and choose a folder on another disk",
        errno.ESTALE: "Mount it again, or choose a folder on another disk",
    }.get(code, "Choose a folder you may write to")
    return WhetError(
        f"{place}: {_DISK_ERRORS[code]} while {doing}. {remedy} (run.dir for runs, the environment variable "
        "WHET_CACHE for prepared data and models). Nothing half-written was left behind."
    )
