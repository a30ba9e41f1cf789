"""How a process of a run ends badly: watched while it works, and never without a word."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from whet.core.console import show_error
from whet.core.errors import FAILED, RunFailedError, StoppedError, WhetError
from whet.core.last_words import first_in_run, leave_in_run, leave_to_launcher
from whet.core.meeting import launcher_has_store
from whet.core.ranks import lost_peer
from whet.core.run import note_failure
from whet.core.watchdog import Watchdog
from whet.core.whereabouts import HERE


class Watch:
    """The watchdog of this process, if there are others to wait for."""

    def __init__(self, folder: Path, rank: int, world: int, patience_s: float) -> None:
        self._folder, self._rank, self._world, self._patience_s = folder, rank, world, patience_s
        self._watchdog: Watchdog | None = None
        if launcher_has_store():
            self.begin()

    def begin(self) -> None:
        """As soon as there is a store to meet at: torchrun's at once, else that of the process group."""
        if self._world > 1 and self._watchdog is None:
            self._watchdog = Watchdog(self._rank, self._world, self._patience_s, self._hung)

    def close(self) -> None:
        if self._watchdog is not None:
            self._watchdog.close()

    def _hung(self, words: str) -> None:
        leave_in_run(self._folder, self._rank, words, FAILED)
        leave_to_launcher(words)
        note_failure(self._folder, words, FAILED, HERE.step - 1)
        show_error(f"error: {words}")


@contextlib.contextmanager
def heard(folder: Path, rank: int, world: int) -> Iterator[None]:
    """An error in here is written to the run's folder before the other processes can notice it. One that is only the
    loss of another process is replaced by what that one died of."""
    began = time.time()
    (folder / "logs" / f"rank-{rank}.json").unlink(missing_ok=True)
    try:
        yield
    except (StoppedError, KeyboardInterrupt):
        raise
    except BaseException as error:
        if world > 1 and lost_peer(error):
            raise RunFailedError(_loss(folder, began, error)) from None
        if world > 1:
            code = error.exit_code if isinstance(error, WhetError) else FAILED
            leave_in_run(folder, rank, _words(error), code)
        raise


def _loss(folder: Path, began: float, error: BaseException) -> str:
    first: dict[str, Any] | None = first_in_run(folder, began)
    end = "Start it again to continue from its last checkpoint (whet train: with --resume)"
    if first is None:
        return f"another process of this run is gone: {_words(error)}. {end}"
    return f"rank {first['rank']} on {first['host']} failed in step {first['step']}: {first['message']}. {end}"


def _words(error: BaseException) -> str:
    text = str(error).strip()
    return text if isinstance(error, WhetError) else f"{type(error).__name__}: {text.splitlines()[0] if text else ''}"
