"""Meeting the other processes without a collective: for as long as it takes, and before there is a process group.

A collective has a deadline, and whoever waits in one cannot be told why. So where one process may work for hours while
the others wait (preparing data on its machine, exporting the model), they wait here instead, and the watchdog sees to
it that nobody waits for the dead.
"""

from __future__ import annotations

import datetime
import os
import time
from collections.abc import Callable

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from whet.core.whereabouts import HERE

_POLL_S = 0.1
_SLOWEST_POLL_S = 1.0
_TELL_AFTER_S = 10.0


def launcher_has_store() -> bool:
    """Whether torchrun keeps a store that is there before any process group and outlives every process of the run."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def connect(timeout_s: float = 60.0) -> TCPStore:
    """A connection of one's own to the store that the processes meet at: a thread that waits holds up no other."""
    return TCPStore(
        os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False, wait_for_workers=False,
        timeout=datetime.timedelta(seconds=timeout_s),
    )  # fmt: skip


def wait_for_all(
    name: str, rank: int, world: int, tell: Callable[[int], None] = lambda missing: None, patience_s: float = 60.0
) -> None:
    """Until every rank has come to the meeting of this name, however long it takes. `tell` is called once, with how
    many are missing, when it takes longer than a moment. `patience_s`: with a store that does not answer."""
    store, began, pause, told = connect(patience_s), time.monotonic(), _POLL_S, False
    missing = [f"whet/{name}/{other}" for other in range(world)]
    HERE.meets()
    store.set(missing[rank], "here")
    while missing := [key for key in missing if not store.check([key])]:
        if not told and time.monotonic() - began > _TELL_AFTER_S:
            told = True
            tell(len(missing))
        time.sleep(pause)
        pause = min(_SLOWEST_POLL_S, 1.5 * pause)
    HERE.met()
