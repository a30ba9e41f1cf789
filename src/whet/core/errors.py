"""Errors that a user can act on, and the exit code that `whet` ends with for each."""

from __future__ import annotations

import errno
import os
import re
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
    """The first line of an exception's message, with the next if it ends in a colon; its type where it has none."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    return " ".join(lines[: 2 if lines[0].endswith(":") else 1])


def refused_pickle(error: BaseException) -> str | None:
    """Why torch.load(weights_only=True) refused a file that holds more than weights; None if `error` is another."""
    import pickle  # only here: it would slow `whet --help`

    if not isinstance(error, pickle.UnpicklingError):
        return None
    named = re.search(r"(?:GLOBAL|Unsupported global:?|class)\s+([\w.]+\.[\w.]+)", str(error))
    reason = f"it refers to {named[1]}" if named else first_line(error)
    return f"contains more than weights: {reason}, and loading that could run arbitrary code"


def describe_error(error: BaseException) -> str:
    """`ValueError: first line of the message`."""
    name, line = type(error).__name__, first_line(error)
    return name if line == name else f"{name}: {line}"


_FREE_SPACE = "Free some space, or choose a folder on another disk"
_WRITABLE = "Check the permissions (`ls -l`), or choose a folder you may write to"
_OTHER_DISK = "Check the system log, and choose a folder on another disk"
_FOLDERS = (
    "(run.dir for runs, the environment variable WHET_CACHE for prepared data and models). Nothing half-written was "
    "left behind"
)

_OS_ERRORS = {
    errno.ENOSPC: ("the disk is full", f"{_FREE_SPACE} {_FOLDERS}"),
    errno.EDQUOT: ("your disk quota is used up", f"{_FREE_SPACE} {_FOLDERS}"),
    errno.EROFS: ("the file system is read-only", f"Choose a folder you may write to {_FOLDERS}"),
    errno.EACCES: ("permission denied", f"{_WRITABLE} {_FOLDERS}"),
    errno.EPERM: ("permission denied", f"{_WRITABLE} {_FOLDERS}"),
    errno.ENOTDIR: ("a part of the path is not a folder", f"Choose a folder you may write to {_FOLDERS}"),
    errno.EIO: ("the disk or its file system fails (input/output error)", f"{_OTHER_DISK} {_FOLDERS}"),
    errno.ENXIO: ("the disk or its file system fails (no such device)", f"{_OTHER_DISK} {_FOLDERS}"),
    errno.ENODEV: ("the disk or its file system fails (no such device)", f"{_OTHER_DISK} {_FOLDERS}"),
    errno.EFBIG: ("the file is larger than the file system or `ulimit -f` allows", f"{_FREE_SPACE} {_FOLDERS}"),
    errno.ESTALE: (
        "the network file system lost the folder (stale file handle)",
        f"Mount it again, or choose a folder on another disk {_FOLDERS}",
    ),
    errno.EMFILE: (
        "this process has too many open files",
        "Raise the limit (`ulimit -n 65536`, in Slurm or systemd LimitNOFILE), then start it again. No file is damaged",
    ),
    errno.ENFILE: (
        "this machine has too many open files",
        "Close other programs or raise the limit (`sysctl fs.file-max`), then start it again. No file is damaged",
    ),
    errno.ENOMEM: ("the machine has too little memory", "Close other programs, then start it again"),
    errno.ENAMETOOLONG: ("the path is too long for this file system", "Give a shorter one"),
    errno.ELOOP: ("its symbolic links lead in a circle", "Remove one of them (`ls -l` shows where each leads)"),
    errno.EBUSY: ("another program uses it", "Wait for it, then start again"),
    errno.ETXTBSY: ("another program uses it", "Wait for it, then start again"),
}
"""What an error of the operating system means, and what to do. An errno that is not here (ENOENT, EISDIR, …) means
something else at each place, and is handled there."""

_OS_ERROR_TEXTS = (
    (errno.ENOSPC, "No space left on device"),
    (errno.ENOSPC, " requested and "),  # numpy: "51200 requested and 44632 written"
    (errno.ENOSPC, "inline_container"),  # torch.save on a full disk: "enforce fail at inline_container.cc"
    (errno.EROFS, "Read-only file system"),
    (errno.EIO, "Input/output error"),
    (errno.ESTALE, "Stale file handle"),
    (errno.EMFILE, "Too many open files"),
)


def os_error(error: BaseException, doing: str, place: str | Path) -> WhetError | None:
    """A WhetError with the remedy for an error of the operating system; None if `error` has another cause.

    Libraries wrap OSError in their own types, some as text only, so both the chain and the text are examined.
    """
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, OSError) and seen.errno in _OS_ERRORS:
            return _make_os_error(seen.errno, doing, _file_name(seen) or place)
        seen = seen.__cause__ or seen.__context__
    for code, text in _OS_ERROR_TEXTS:
        if text in str(error):
            return _make_os_error(code, doing, place)
    return None


def _file_name(error: OSError) -> str | None:
    """A library may put a file descriptor into `filename`."""
    return os.fsdecode(error.filename) if isinstance(error.filename, str | bytes | os.PathLike) else None


def _make_os_error(code: int, doing: str, place: str | Path) -> WhetError:
    meaning, remedy = _OS_ERRORS[code]
    return WhetError(f"{place}: {meaning} while {doing}. {remedy}.")
