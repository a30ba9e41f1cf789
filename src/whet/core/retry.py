"""Reading files with retries: network file systems fail for a moment and recover."""

from __future__ import annotations

import errno
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from whet.core.errors import WhetError, os_error

T = TypeVar("T")

RETRY_DELAYS_S = (0.5, 1.0, 2.0, 4.0, 8.0)
"""The pause before each further attempt."""

_MISSING = (FileNotFoundError, NotADirectoryError, IsADirectoryError)
_TRANSIENT_ERRNOS = (
    errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.EAGAIN, errno.EREMOTEIO, errno.ENOTCONN, errno.ECONNRESET,
    errno.EHOSTDOWN, errno.EHOSTUNREACH, errno.ENOLINK, errno.ECOMM,
)  # fmt: skip

_LIMITS = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)
"""Of this process or machine: they say nothing about the file."""


class UnreadableError(WhetError):
    """A file exists and cannot be read; its content may be intact."""


def read_with_retries(read: Callable[[], T], path: Path) -> T:
    """Call `read`, again after transient I/O errors, and raise an UnreadableError when they persist. A missing file is
    not retried: FileNotFoundError reaches the caller."""
    for wait_s in (*RETRY_DELAYS_S, None):
        try:
            return read()
        except _MISSING:
            raise
        except OSError as error:
            if wait_s is None or error.errno not in _TRANSIENT_ERRNOS:
                raise _make_unreadable_error(path, error, tries=1 if wait_s else 1 + len(RETRY_DELAYS_S)) from error
            time.sleep(wait_s)
    raise AssertionError


def _make_unreadable_error(path: Path, error: OSError, tries: int) -> UnreadableError:
    if error.errno in _LIMITS:
        return UnreadableError(str(os_error(error, "reading", path)))
    often = f" (tried {tries} times in {sum(RETRY_DELAYS_S):g} s)" if tries > 1 else ""
    return UnreadableError(
        f"{error.filename or path}: cannot be read: {error.strerror or error}{often}. It may be intact: check the "
        "disk, the network and the permissions, then start it again (whet train: with --resume)"
    )
