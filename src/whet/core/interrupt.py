"""Signals. Schedulers ask for an end with SIGTERM, Slurm warns with SIGUSR1: both end work as well as Ctrl-C does."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable, Iterator
from types import FrameType

ASKING = (signal.SIGTERM, signal.SIGUSR1)
"""What other programs ask for an end with; Ctrl-C is SIGINT."""

STOPPED_EARLY = "asked to stop before a step was saved; start it again (whet train: with --resume), and it begins anew"

_Handlers = dict[signal.Signals, object]
_around = 0  # how many `terminate_like_ctrl_c` there are around
_asked: list[int] = []


class AskedToStop(KeyboardInterrupt):
    """Another program asked for an end; it will start the run again. Whoever presses Ctrl-C may not."""


@contextlib.contextmanager
def terminate_like_ctrl_c() -> Iterator[None]:
    """SIGTERM and SIGUSR1 raise AskedToStop in here, a KeyboardInterrupt. Once: what follows finds the process on its
    way out, and torchrun sends a SIGTERM to whoever ends later than the first. Inside another it does nothing."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        _set(ASKING, _ignore)
        _asked.append(number)
        raise AskedToStop

    global _around
    before = {} if _around else _set(ASKING, interrupt)
    _around += 1
    try:
        yield
    finally:
        _around -= 1
        _restore(before)
        if not _around:
            _asked.clear()


@contextlib.contextmanager
def noted(signals: list[int], tell: Callable[[], None]) -> Iterator[None]:
    """All signals to end are appended to `signals` in here; a second Ctrl-C interrupts at once. One that came before
    is among them: what it raised may have been lost in a library that catches everything.

    Whoever leaves by an error is ending: it is not disturbed any more while it writes down how.
    """

    def note(number: int, frame: FrameType | None) -> None:
        if signals and number == signal.SIGINT:
            raise KeyboardInterrupt
        signals.append(number)
        tell()

    signals += _asked
    before = _set((signal.SIGINT, *ASKING), note)
    try:
        yield
    except BaseException:
        _restore(before)
        if _around:  # which puts things back
            _set(ASKING, _ignore)
        raise
    _restore(before)


def _ignore(number: int, frame: FrameType | None) -> None:
    """A function and not SIG_IGN, which processes that are started from here would inherit."""


def _set(numbers: tuple[signal.Signals, ...], handler: Callable[[int, FrameType | None], None]) -> _Handlers:
    return {number: signal.signal(number, handler) for number in numbers}


def _restore(before: _Handlers) -> None:
    for number, handler in before.items():
        signal.signal(number, handler)  # type: ignore[arg-type]
