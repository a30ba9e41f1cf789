"""Have the system read a model's files from the disk while this process does something else, without torch."""

from __future__ import annotations

import contextlib
import os
import threading
from pathlib import Path

_PIECE = 2**26


def read_ahead(path: str, revision: str | None = None) -> threading.Thread | None:
    """Ask for the weights of a model folder or of a hub's model that is on this machine, to be in memory when they are
    loaded; a hint, which never fails. Nothing is asked where they would fill more than half of the memory.

    The thread makes system calls and nothing else, so it may be there when processes are forked.
    """
    with contextlib.suppress(OSError):
        files = sorted(folder_of(path, revision).glob("*.safetensors"))
        if 0 < sum(file.stat().st_size for file in files) < _memory() // 2:
            thread = threading.Thread(target=_ask, args=(files,), name="read ahead", daemon=True)
            thread.start()
            return thread
    return None


def _ask(files: list[Path]) -> None:
    with contextlib.suppress(OSError):
        for path in files:
            with path.open("rb") as file:
                for start in range(0, path.stat().st_size, _PIECE):  # the system may wait for the disk in each call
                    os.posix_fadvise(file.fileno(), start, _PIECE, os.POSIX_FADV_WILLNEED)


def folder_of(path: str, revision: str | None) -> Path:
    """Where the files of a model are, if they are on this machine."""
    folder = Path(path).expanduser()
    if folder.is_dir() or path.count("/") != 1:
        return folder
    home = Path(os.environ.get("HF_HOME") or Path.home() / ".cache" / "huggingface")
    kept = Path(os.environ.get("HF_HUB_CACHE") or home / "hub") / f"models--{path.replace('/', '--')}"
    name = revision or "main"
    reference = kept / "refs" / name
    return kept / "snapshots" / (reference.read_text().strip() if reference.is_file() else name)


def _memory() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
