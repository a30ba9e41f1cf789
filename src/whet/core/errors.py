"""Errors a person can act on, each with the exit code that `whet` ends with."""

from __future__ import annotations

import errno
from pathlib import Path

DONE, INPUT, USAGE, FAILED, STOPPED, INTERRUPTED = 0, 1, 2, 3, 75, 130
"""Exit codes: done; the user's input or data is at fault; wrong usage; the run failed and can be resumed;
stopped on request, and --resume goes on from a checkpoint or begins anew (EX_TEMPFAIL, which schedulers read as
"requeue me"); interrupted by Ctrl-C when there was nothing to save."""


class WhetError(Exception):
    """The user's input, data or machine is at fault. The message names place, value and remedy."""

    exit_code = INPUT


class UsageError(WhetError):
    """The command was used wrongly."""

    exit_code = USAGE


class RunFailedError(WhetError):
    """A run broke in the middle; its last checkpoint is good."""

    exit_code = FAILED


class StoppedError(WhetError):
    """A run was asked to stop and did so; it can be resumed."""

    exit_code = STOPPED


class CancelledError(WhetError):
    """The user interrupted before there was anything to save."""

    exit_code = INTERRUPTED


_DISK_ERRORS = {
    errno.ENOSPC: "the disk is full",
    errno.EDQUOT: "your disk quota is used up",
    errno.EROFS: "the file system is read-only",
    errno.EACCES: "permission denied",
    errno.EPERM: "permission denied",
    errno.ENOTDIR: "a part of the path is not a folder",
    errno.EIO: "the disk or its file system fails (input/output error)",
    errno.ESTALE: "the network's file system lost the folder (stale file handle)",
}


_DISK_ERROR_TEXTS = (
    (errno.ENOSPC, "No space left on device"),
    (errno.ENOSPC, "inline_container"),  # torch.save on a full disk: "enforce fail at inline_container.cc"
    (errno.EROFS, "Read-only file system"),
    (errno.EIO, "Input/output error"),
    (errno.ESTALE, "Stale file handle"),
)


def disk_error(error: BaseException, doing: str, place: str | Path) -> WhetError | None:
    """A WhetError for a disk that is full, read-only or forbidden; None if `error` has another cause.

    Libraries wrap OSError in their own types, some of them as text only, so the chain and the text are read.
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
        errno.EIO: "Look into the system's log, and choose a folder on another disk",
        errno.ESTALE: "Mount it again, or choose a folder on another disk",
    }.get(code, "Choose a folder you may write to")
    return WhetError(
        f"{place}: {_DISK_ERRORS[code]} while {doing}. {remedy} (run.dir for runs, the environment variable "
        "WHET_CACHE for prepared data and models). Nothing half-written was left behind."
    )


class BadRecordError(Exception):
    """A record that cannot be used; the text says why and what to do. The origin is added by the reader."""

    def __init__(self, reason: str, explanation: str) -> None:
        super().__init__(explanation)
        self.reason = reason
