"""Signals and process exit: SIGTERM, SIGUSR1 and Ctrl-C as stop requests, the parent's death, abandoned threads."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType

# Signals. Schedulers ask for an end with SIGTERM, Slurm warns with SIGUSR1: both end work as well as Ctrl-C does.

STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
"""What other programs ask for an end with; Ctrl-C is SIGINT."""

STOPPED_BEFORE_CHECKPOINT = (
    "asked to stop before a step was saved; start it again (whet train: with --resume), and it begins anew"
)

_Handlers = dict[signal.Signals, object]
_nesting = 0  # how many `terminate_like_ctrl_c` there are around
_received: list[int] = []


class StopRequested(KeyboardInterrupt):
    """Another program asked for an end; it will start the run again. Whoever presses Ctrl-C may not."""


@contextlib.contextmanager
def raise_on_stop_signals() -> Iterator[None]:
    """SIGTERM and SIGUSR1 raise AskedToStop in here, a KeyboardInterrupt. Once: what follows finds the process on its
    way out, and torchrun sends a SIGTERM to whoever ends later than the first. Inside another it does nothing."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        _install_handler(STOP_SIGNALS, _ignore_signal)
        _received.append(number)
        raise StopRequested

    global _nesting
    before = {} if _nesting else _install_handler(STOP_SIGNALS, interrupt)
    _nesting += 1
    try:
        yield
    finally:
        _nesting -= 1
        _restore_handlers(before)
        if not _nesting:
            _received.clear()


@contextlib.contextmanager
def collect_stop_signals(signals: list[int], tell: Callable[[], None]) -> Iterator[None]:
    """All signals to end are appended to `signals` in here; a second Ctrl-C interrupts at once. One that came before
    is among them: what it raised may have been lost in a library that catches everything.

    Whoever leaves by an error is ending: it is not disturbed any more while it writes down how.
    """

    def note(number: int, frame: FrameType | None) -> None:
        if signals and number == signal.SIGINT:
            raise KeyboardInterrupt
        signals.append(number)
        tell()

    signals += _received
    before = _install_handler((signal.SIGINT, *STOP_SIGNALS), note)
    try:
        yield
    except BaseException:
        _restore_handlers(before)
        if _nesting:  # which puts things back
            _install_handler(STOP_SIGNALS, _ignore_signal)
        raise
    _restore_handlers(before)


def _ignore_signal(number: int, frame: FrameType | None) -> None:
    """A function and not SIG_IGN, which processes that are started from here would inherit."""


def _install_handler(
    numbers: tuple[signal.Signals, ...], handler: Callable[[int, FrameType | None], None]
) -> _Handlers:
    return {number: signal.signal(number, handler) for number in numbers}


def _restore_handlers(before: _Handlers) -> None:
    for number, handler in before.items():
        signal.signal(number, handler)  # type: ignore[arg-type]


# A process that must not outlive the one that started it.

_PR_SET_PDEATHSIG = 1


def terminate_with_parent() -> None:
    """Have this process asked to stop (SIGTERM) when its parent dies; on Linux."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def started_by_torchrun() -> bool:
    """Whether torchrun started this process: each in a session of its own, so that a kill of torchrun and its group
    does not reach them, and they would go on with nobody to end them."""
    return "TORCHELASTIC_RUN_ID" in os.environ


# Threads that nobody waits for any more.

_abandoned: list[threading.Thread] = []


def abandon_thread(thread: threading.Thread, patience_s: float = 0.0) -> None:
    """Let it finish for so long; then it goes on alone, until it is done or the process ends.

    It is not ended by an exception from outside: one that comes while a thread starts another is raised in that one,
    which then never says that it has started, and the first waits for it for ever.
    """
    thread.join(patience_s)
    if thread.is_alive():
        _abandoned.append(thread)


def exit_process(code: int) -> None:
    """Exit, also where threads were given up: one that comes back from torch's C++ code while the interpreter ends
    itself would abort the process."""
    if any(thread.is_alive() for thread in _abandoned):
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)
