"""`whet` in a process that is killed, as by kill -9, in the n-th call of a function: python dying.py CALL N train …

CALL is `load` (reading a checkpoint: hashes and tensors) or a function of `os` by which files come and go.
"""

from __future__ import annotations

import itertools
import os
import signal
import sys
from typing import Any


def deadly(function: Any, counter: Any, number: int) -> Any:
    def call(*args: Any, **kwargs: Any) -> Any:
        if next(counter) == number:
            os.kill(os.getpid(), signal.SIGKILL)
        return function(*args, **kwargs)

    return call


def main() -> None:
    name, number = sys.argv[1], int(sys.argv[2])
    sys.argv = ["whet", *sys.argv[3:]]
    counter = itertools.count(1)
    if name == "load":
        from whet.checkpoint import dcp_storage
        from whet.core import checksums

        dcp_storage.dcp_load = deadly(dcp_storage.dcp_load, counter, number)
        checksums.hash_block = deadly(checksums.hash_block, counter, number)
    else:
        setattr(os, name, deadly(getattr(os, name), counter, number))
    from whet.cli.app import main as whet

    whet()


main()
