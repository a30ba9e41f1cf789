"""Signals and process exit: stop requests (SIGTERM, SIGUSR1, SIGHUP, Ctrl-C), the parent's death, abandoned
threads; and other processes of this machine. No torch."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import queue
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType

from whet.core.errors import StoppedError, WhetError

STOPPED_BEFORE_CHECKPOINT = (
    "stopped before a step was saved. `whet runs resume`, or `whet train` with --resume, starts it over"
)

_Handlers = dict[signal.Signals, object]
_REPEAT_S = 5.0  # for so long after an interrupt, another Ctrl-C does not disturb the exit
_nesting = 0  # how many `raise_on_stop_signals` blocks are active
_received: list[int] = []
_exiting_since: float | None = None  # when a signal or an error began the exit
_ends_process = False


class StopRequested(KeyboardInterrupt):
    """Another program requested a stop and will start the run again. Whoever presses Ctrl-C may not."""


def stop_signals() -> list[signal.Signals]:
    """Ctrl-C (SIGINT); SIGTERM of schedulers; SIGUSR1, Slurm's warning; SIGHUP of a closed terminal. One that this
    process was started to ignore, as nohup does with SIGHUP, stays ignored."""
    every = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
    return [number for number in every if signal.getsignal(number) is not signal.SIG_IGN]


@contextlib.contextmanager
def raise_on_stop_signals() -> Iterator[None]:
    """Stop signals raise StopRequested inside this block, Ctrl-C a KeyboardInterrupt. Nested blocks do nothing.

    Only the first raises: later ones find the process exiting already, and torchrun sends SIGTERM to every worker that
    exits after the first. A Ctrl-C some seconds later raises again, in case a library swallowed the first. Code that is
    interrupted in the middle, such as an import, may fail in its own way; that counts as the stop that it is.
    """

    def interrupt(number: int, frame: FrameType | None) -> None:
        if _exiting_since is None:
            _received.append(number)
        _raise_once(number)

    global _nesting, _exiting_since
    before: _Handlers = {}
    if not _nesting:
        _exiting_since = None
        before = _install_handler(interrupt)
    _nesting += 1
    try:
        yield
    except Exception as error:
        if before and _received and not isinstance(error, StoppedError):
            raise (KeyboardInterrupt if _received[-1] == signal.SIGINT else StopRequested) from error
        raise
    finally:
        _nesting -= 1
        if not _nesting and not (_ends_process and _exiting_since is not None):
            _restore_handlers(before)
            _received.clear()
            _exiting_since = None


@contextlib.contextmanager
def collect_stop_signals(signals: list[int], announce: Callable[[], None]) -> Iterator[None]:
    """Stop signals are appended to `signals` inside this block; a second Ctrl-C interrupts at once.

    A signal received earlier is included: a library that catches every exception may have swallowed what it raised.
    When the block ends with an exception, signals stay ignored, so that nothing disturbs writing down how it ended.
    The first signal has `announce` called in a thread: a handler that prints raises "reentrant call" if it interrupts a
    write to the same stream.
    """
    announcements: queue.SimpleQueue[bool] = queue.SimpleQueue()  # a handler may call its `put`, but take no lock

    def note(number: int, frame: FrameType | None) -> None:
        if signals and number == signal.SIGINT:
            _raise_once(number)
        elif _exiting_since is None:
            if not signals:
                announcements.put(True)
            signals.append(number)

    def announce_first() -> None:
        if announcements.get():
            announce()

    global _exiting_since
    _exiting_since = None
    signals += _received
    _received.clear()
    announcer = threading.Thread(target=announce_first, name="announce a stop", daemon=True)
    announcer.start()
    before = _install_handler(note)
    try:
        yield
    except BaseException:
        ignore_stop_signals()
        raise
    finally:
        _restore_handlers(before)
        announcements.put(False)
        announcer.join()


def ignore_stop_signals() -> None:
    """From here to the end of `raise_on_stop_signals`: the process is exiting and writes down how the run ended."""
    global _exiting_since
    if _nesting:  # otherwise nobody would take it back
        _exiting_since = time.monotonic()


def _raise_once(number: int) -> None:
    global _exiting_since
    now = time.monotonic()
    if _exiting_since is None or (number == signal.SIGINT and now - _exiting_since > _REPEAT_S):
        _exiting_since = now
        raise KeyboardInterrupt if number == signal.SIGINT else StopRequested


def _install_handler(handler: Callable[[int, FrameType | None], None]) -> _Handlers:
    if threading.current_thread() is not threading.main_thread():
        raise WhetError(
            "training reacts to stop signals, which Python delivers to its main thread alone. Call it there, or start "
            "`whet train` as a process"
        )
    return {number: signal.signal(number, handler) for number in stop_signals()}


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


def keep_exit_undisturbed() -> None:
    """For the entry point of a process: once a run has been stopped or has failed, signals stay ignored to the end, so
    that the exit code is the one in status.json."""
    global _ends_process
    _ends_process = True


def exit_is_undisturbed() -> bool:
    """Whether `keep_exit_undisturbed` was called."""
    return _ends_process


def exit_process(code: int) -> None:
    """Exit, undisturbed by stop signals. With abandoned threads, skip the interpreter's shutdown: a thread that returns
    from torch's C++ code during it would abort the process."""
    for number in stop_signals():
        signal.signal(number, signal.SIG_IGN)
    if any(thread.is_alive() for thread in _abandoned):
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


# Other processes of this machine, read from /proc: who they are, what they hold open, their children.


@functools.cache
def machine_id() -> str:
    """Equal for two processes that see each other's process ids: the same boot of a machine, and the same PID namespace
    (a container has its own). Host names do not tell: clones and containers share them."""
    boot, namespace = "", ""
    with contextlib.suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        namespace = str(Path("/proc/self/ns/pid").readlink())
    return f"{boot} {namespace}"


def holds_open(pid: int, path: Path) -> bool:
    """Whether a process of this machine lives and has the file open. Of another user's process only the first is known;
    an id that was given to a new process since then does not have the file open."""
    try:
        wanted = path.stat()
        handles = list(Path(f"/proc/{pid}/fd").iterdir())
    except PermissionError:
        return is_alive(pid)
    except OSError:
        return False
    for handle in handles:
        with contextlib.suppress(OSError):
            if os.path.samestat(handle.stat(), wanted):
                return True
    return False


def is_alive(pid: int) -> bool:
    """Whether there is such a process, and it has not ended: one that its parent has not waited for yet has."""
    return identify_process(pid) is not None


def identify_process(pid: int) -> str | None:
    """Its id and the time at which it began: an id is given again, both together are not. None if it has ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
        return None if fields[0] in ("Z", "X") else f"{pid}:{fields[19]}"
    except (OSError, IndexError):
        return None


def child_pids(pid: int) -> list[int]:
    """The direct children of a process."""
    found: list[int] = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            found += map(int, task.read_text().split())
    return found


def process_tree(pid: int) -> list[int]:
    """A process and all that it started, parents first."""
    return [pid, *(each for child in child_pids(pid) for each in process_tree(child))]


def ignores_signal(pid: int, number: signal.Signals) -> bool:
    """Whether a process ignores a signal, as what a shell starts in the background does with Ctrl-C's."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        text = Path(f"/proc/{pid}/status").read_text(errors="replace")
        return bool(int(text.partition("SigIgn:")[2].split()[0], 16) >> (number - 1) & 1)
    return False
