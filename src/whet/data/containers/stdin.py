"""`-`: standard input, kept in a file, because it is read several times and by several processes."""

from __future__ import annotations

import atexit
import os
import shutil
import sys
import tempfile
from pathlib import Path

from whet.core.errors import WhetError
from whet.core.files import cache_dir

_KEPT = "WHET_STDIN"
"""Where it is kept, for this process and those that it starts: they cannot read the same input again."""


def spooled() -> Path:
    """The file with what came by standard input; it is removed when the process that read it ends."""
    if _KEPT in os.environ:
        return Path(os.environ[_KEPT])
    if sys.stdin is None or sys.stdin.isatty():
        raise WhetError("data.sources: -: nothing is piped in. Write: cat chats.jsonl | whet … data.sources=…")
    folder = cache_dir() / "stdin"
    folder.mkdir(parents=True, exist_ok=True)
    number, name = tempfile.mkstemp(dir=folder)
    path = Path(name)
    atexit.register(_forget, path, os.getpid())
    with os.fdopen(number, "wb") as file:
        shutil.copyfileobj(sys.stdin.buffer, file)
    os.environ[_KEPT] = name
    return path


def _forget(path: Path, owner: int) -> None:
    if os.getpid() == owner:
        path.unlink(missing_ok=True)
        os.environ.pop(_KEPT, None)
