"""What several processes must have in common before the first step, proven instead of assumed.

Checked in seconds: that all see one run folder, and that the stores on their machines hold the same conversations. A
run on two different stores would train without an error, on batches that no plan knows.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from whet.core.errors import WhetError
from whet.core.files import hash_file, hash_json, write_json
from whet.core.ranks import Ranks
from whet.recipe.data import Data

_SEEN_WITHIN_S = 15.0  # network file systems show a new file after some seconds


def digests(data: Data) -> dict[str, str]:
    """A hash of each store's content, by use; empty on all processes of a machine but its first.

    To be called before the processes join: nobody waits for it in a collective.
    """
    if os.environ.get("LOCAL_RANK", "0") != "0":
        return {}
    return {use: _digest(Path(folder)) for use, folder in data.stores().items()}


def _digest(folder: Path) -> str:
    """Of what is small beside the tokens and depends on every one of them."""
    files = ("hashes.npy", "targets.npy", "tokens.idx", "tokenizer.json")
    return hash_json({name: hash_file(folder / name) for name in files if (folder / name).exists()})


def check_together(folder: Path, mine: Mapping[str, str], ranks: Ranks) -> None:
    """Refuse, on every rank, machines that do not share the run's folder or have other data."""
    if ranks.world == 1:
        return
    nonce = _Nonce(folder)
    [name] = ranks.gather([nonce.write()] if ranks.is_first else [])
    try:
        found = {"host": socket.gethostname(), "sees": nonce.sees(name), "stores": dict(mine)}
        everyone: list[dict[str, Any]] = ranks.gather([found])
    finally:
        if ranks.is_first:
            nonce.remove(name)
    apart = _hosts(one for one in everyone if not one["sees"])
    if apart:
        raise WhetError(
            f"run.dir: {folder} is not the same folder on all machines: {', '.join(apart)} cannot see what "
            f"{everyone[0]['host']} writes there. Give a folder on a file system that they share: run.dir=FOLDER"
        )
    for use, digest in everyone[0]["stores"].items():
        others = _hosts(one for one in everyone if one["stores"] and one["stores"].get(use) != digest)
        if others:
            raise WhetError(
                f"the {use} data on {', '.join(others)} is not that of {everyone[0]['host']}: their prepared stores "
                "hold other conversations. Give all machines the same files, or one store on a file system that they "
                "share (data.store, or the environment variable WHET_CACHE)"
            )


class _Nonce:
    """A file with a name that nobody can know who does not see it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def write(self) -> str:
        name = f".shared-{secrets.token_hex(8)}"
        write_json(self._folder / name, {"host": socket.gethostname()})
        return name

    def sees(self, name: str) -> bool:
        until = time.monotonic() + _SEEN_WITHIN_S
        while time.monotonic() < until:
            with contextlib.suppress(OSError):
                # Listing asks a network file system for the folder anew, which a look at one name may not.
                if any(file.name == name for file in self._folder.iterdir()):
                    return True
            time.sleep(0.2)
        return False

    def remove(self, name: str) -> None:
        (self._folder / name).unlink(missing_ok=True)


def _hosts(found: Any) -> Sequence[str]:
    return list(dict.fromkeys(one["host"] for one in found))
