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

STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
"""Stop requests of other programs: schedulers send SIGTERM, Slurm warns with SIGUSR1. Ctrl-C is SIGINT."""

STOPPED_BEFORE_CHECKPOINT = (
    "stopped before a step was saved. Start it again (whet train: with --resume): it starts over"
)

_Handlers = dict[signal.Signals, object]
_nesting = 0  # how many `raise_on_stop_signals` blocks are active
_received: list[int] = []


class StopRequested(KeyboardInterrupt):
    """Another program requested a stop and will start the run again. Whoever presses Ctrl-C may not."""


@contextlib.contextmanager
def raise_on_stop_signals() -> Iterator[None]:
    """Stop signals raise StopRequested, a KeyboardInterrupt, inside this block. Nested blocks do nothing.

    Only the first raises: later ones find the process exiting already, and torchrun sends SIGTERM to every worker that
    exits after the first. Code that is interrupted in the middle, such as an import, may fail in its own way; that
    counts as the stop that it is.
    """

    def interrupt(number: int, frame: FrameType | None) -> None:
        _received.append(number)
        if number == signal.SIGINT:
            raise KeyboardInterrupt
        _install_handler(STOP_SIGNALS, _ignore_signal)
        raise StopRequested

    global _nesting
    before = {} if _nesting else _install_handler((signal.SIGINT, *STOP_SIGNALS), interrupt)
    _nesting += 1
    try:
        yield
    except Exception as error:
        if before and _received:
            raise (KeyboardInterrupt if _received[-1] == signal.SIGINT else StopRequested) from error
        raise
    finally:
        _nesting -= 1
        _restore_handlers(before)
        if not _nesting:
            _received.clear()


@contextlib.contextmanager
def collect_stop_signals(signals: list[int], on_signal: Callable[[], None]) -> Iterator[None]:
    """Stop signals are appended to `signals` inside this block; a second Ctrl-C interrupts at once.

    A signal received earlier is included: a library that catches every exception may have swallowed what it raised.
    When the block ends with an exception, signals stay ignored, so that nothing disturbs writing down how it ended.
    """

    def note(number: int, frame: FrameType | None) -> None:
        if signals and number == signal.SIGINT:
            raise KeyboardInterrupt
        signals.append(number)
        on_signal()

    signals += _received
    _received.clear()
    before = _install_handler((signal.SIGINT, *STOP_SIGNALS), note)
    try:
        yield
    except BaseException:
        _restore_handlers(before)
        if _nesting:  # `raise_on_stop_signals` restores the handlers
            _install_handler(STOP_SIGNALS, _ignore_signal)
        raise
    _restore_handlers(before)


def _ignore_signal(number: int, frame: FrameType | None) -> None:
    """A function rather than SIG_IGN, which child processes would inherit."""


def _install_handler(
    numbers: tuple[signal.Signals, ...], handler: Callable[[int, FrameType | None], None]
) -> _Handlers:
    return {number: signal.signal(number, handler) for number in numbers}


def _restore_handlers(before: _Handlers) -> None:
    for number, handler in before.items():
        signal.signal(number, handler)  # type: ignore[arg-type]


_PR_SET_PDEATHSIG = 1


def terminate_with_parent() -> None:
    """Have the kernel send this process SIGTERM when its parent dies. Linux only; elsewhere it does nothing."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


_abandoned: list[threading.Thread] = []


def abandon_thread(thread: threading.Thread, timeout_s: float = 0.0) -> None:
    """Wait `timeout_s` for a thread; after that it runs on by itself until it is done or the process exits.

    It is not stopped by an asynchronous exception: one that arrives while the thread starts another is raised in the
    new one, which then never reports that it has started, and the first waits forever.
    """
    thread.join(timeout_s)
    if thread.is_alive():
        _abandoned.append(thread)


def exit_process(code: int) -> None:
    """Exit. With abandoned threads, skip the interpreter's shutdown: a thread that returns from torch's C++ code
    during it would abort the process."""
    if any(thread.is_alive() for thread in _abandoned):
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)
