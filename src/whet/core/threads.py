"""Threads that nobody waits for any more."""

from __future__ import annotations

import os
import sys
import threading

_given_up: list[threading.Thread] = []


def give_up(thread: threading.Thread, patience_s: float = 0.0) -> None:
    """Let it finish for so long; then it goes on alone, until it is done or the process ends.

    It is not ended by an exception from outside: one that comes while a thread starts another is raised in that one,
    which then never says that it has started, and the first waits for it for ever.
    """
    thread.join(patience_s)
    if thread.is_alive():
        _given_up.append(thread)


def end_process(code: int) -> None:
    """Exit, also where threads were given up: one that comes back from torch's C++ code while the interpreter ends
    itself would abort the process."""
    if any(thread.is_alive() for thread in _given_up):
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)
