"""Ending a thread that nobody waits for any more."""

from __future__ import annotations

import ctypes
import threading

_AFTER_S = 5.0


class GivenUpError(BaseException):
    """Raised in a thread that was given up; no `except Exception` on its way keeps it."""


def give_up(thread: threading.Thread, patience_s: float = 0.0) -> None:
    """Let it finish for so long, then end it. One that is inside a long system call ends after it, and does not hold
    the process open.

    Not left to the interpreter's end: a thread that comes back from torch's C++ code then aborts the process.
    """
    thread.join(patience_s)
    if thread.is_alive():
        ident = ctypes.c_ulong(thread.ident or 0)
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ident, ctypes.py_object(GivenUpError))
        thread.join(_AFTER_S)
