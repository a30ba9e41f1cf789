"""A process that must not outlive the one that started it."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal

_PR_SET_PDEATHSIG = 1


def end_with_parent() -> None:
    """Have this process asked to stop (SIGTERM) when its parent dies; on Linux."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def is_torchruns() -> bool:
    """Whether torchrun started this process: each in a session of its own, so that a kill of torchrun and its group
    does not reach them, and they would go on with nobody to end them."""
    return "TORCHELASTIC_RUN_ID" in os.environ
