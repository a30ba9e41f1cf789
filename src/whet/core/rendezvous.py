"""The processes that start a run meet at one address, and say within a minute why they cannot.

torch waits ten minutes for a machine that never comes, forever for a port at which another program listens, and then
raises the name of a C++ function. Here one process hosts a TCPStore, the others write into it that they are there, and
the host lets all begin together. torch's own rendezvous follows in the same store and finds everyone present.
"""

from __future__ import annotations

import contextlib
import datetime
import errno
import json
import socket
import threading
import time
from dataclasses import dataclass, field

import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from whet.core.console import warn
from whet.core.errors import ExitCode, WhetError, first_line
from whet.core.signals import abandon_thread

_HINT_S = 20.0
"""When a process that waits says what for; it repeats that after three, nine, … times as long."""
_UNREACHABLE_S = 45.0
"""For so long an address from which nothing comes back may be that of a machine that starts."""
_ANSWER_S = 10.0
_POLL_S = 0.2
_BEAT_S = 2.0
_GONE_S = 15.0
"""A process that has not written for so long has gone again, such as one that was stopped and started anew."""
_SKEW_S = 5.0
_SHOWN = 8
_NAME, _COUNT, _BEGIN = "whet/name", "whet/count", "whet/begin"


class RendezvousError(WhetError):
    """The processes did not meet; trying again would not help."""

    def __init__(self, message: str, exit_code: ExitCode) -> None:
        super().__init__(message)
        self.exit_code = exit_code


@dataclass
class StartBarrier:
    """Where processes join_rendezvous, as one of them sees it."""

    host: str
    port: int
    name: str
    """Of the run: it distinguishes two runs at one address."""
    count: int
    """How many processes must come."""
    what: str = "machines"
    """Or processes."""
    limit_s: float = 600.0
    began: float = field(default_factory=time.monotonic)
    next_hint: float = _HINT_S

    @property
    def place(self) -> str:
        return f"{self.host}:{self.port}"

    @property
    def everyone(self) -> str:
        return f"{self.count} {self.what}"

    @property
    def hostname(self) -> str:
        return socket.gethostname()

    @property
    def waited_s(self) -> float:
        return time.monotonic() - self.began

    def hint(self, reason: str) -> None:
        """Say what this process waits for, now and then."""
        if self.waited_s > self.next_hint:
            warn(f"{self.hostname} has waited {self.waited_s:.0f} s at the rendezvous: {reason}")
            self.next_hint *= 3

    def error(self, reason: str, exit_code: ExitCode = ExitCode.INPUT) -> RendezvousError:
        return RendezvousError(f"launch.rendezvous: {reason}", exit_code)


def join_rendezvous(barrier: StartBarrier, may_host: bool) -> tuple[TCPStore, bool]:
    """Wait until all are there. Returns the store, and whether this process hosts it: then it must keep the store."""
    store = _host(barrier) if may_host else None
    if store is not None:
        _gather(barrier, store)
        return store, True
    while True:
        store = _connect(barrier)
        # a RuntimeError: the process that hosts the store has ended; it starts again, or another one hosts it
        with contextlib.suppress(dist.DistError, RuntimeError):
            if _join(barrier, store):
                return store, False
        time.sleep(_POLL_S)


def _host(barrier: StartBarrier) -> TCPStore | None:
    """A new store; None if one of this run is there already: another process on this machine hosts it."""
    try:
        store = _store(barrier, is_host=True)
    except (dist.DistError, RuntimeError) as error:
        if "EADDRINUSE" in str(error):
            try:
                _require_run(barrier, _client(barrier))
            except dist.DistError:
                raise _taken(barrier, "another program uses it") from None
            return None
        raise barrier.error(
            f"{barrier.hostname} cannot listen at {barrier.place} ({first_line(error)}). Give another port, or another "
            "machine"
        ) from None
    store.set(_NAME, barrier.name)
    return store


def _gather(barrier: StartBarrier, store: TCPStore) -> None:
    """As the host: wait for the others, and let all begin."""
    beats: dict[int, tuple[bytes, float]] = {}
    while True:
        now = time.monotonic()
        for number in range(1, store.add(_COUNT, 0) + 1):
            if store.check([_beat_key(number)]):
                beat = store.get(_beat_key(number))
                if number not in beats or beats[number][0] != beat:
                    beats[number] = beat, now
        present = {number: json.loads(beat)["host"] for number, (beat, at) in beats.items() if now - at < _GONE_S}
        hosts = [barrier.hostname, *present.values()]
        if len(hosts) >= barrier.count:
            members = list(present)[: barrier.count - 1]
            store.set(_BEGIN, json.dumps({"members": members, "host": barrier.hostname, "time": time.time()}))
            return
        missing = (
            f"{len(hosts)} of {barrier.everyone} have come to {barrier.place} ({_names(hosts)}). Start the same "
            f"command on the others, and make sure that they can reach {barrier.place}"
        )
        barrier.hint(missing)
        if barrier.waited_s > barrier.limit_s:
            raise barrier.error(f"after {barrier.limit_s / 60:g} minutes, {missing}", ExitCode.FAILED)
        time.sleep(_POLL_S + barrier.count / 1000)


def _join(barrier: StartBarrier, store: TCPStore) -> bool:
    """As another process: wait until the host lets all begin; False if they have begun without this one."""
    _require_run(barrier, store)
    number, beat, last_beat = store.add(_COUNT, 1), 0, 0.0
    while not store.check([_BEGIN]):
        if time.monotonic() - last_beat > _BEAT_S:
            beat, last_beat = beat + 1, time.monotonic()
            store.set(_beat_key(number), json.dumps({"host": barrier.hostname, "beat": beat}))
        waiting = f"not all of {barrier.everyone} have come to {barrier.place}"
        barrier.hint(waiting)
        if barrier.waited_s > barrier.limit_s + _GONE_S:  # the host says it first, and whom it misses
            raise barrier.error(f"after {barrier.limit_s / 60:g} minutes, {waiting}", ExitCode.FAILED)
        time.sleep(_POLL_S)
    begin = json.loads(store.get(_BEGIN))
    if number in begin["members"]:
        if message := describe_skew(time.time() - begin["time"], barrier.hostname, begin["host"]):
            warn(message)
        return True
    # an earlier attempt of this run, whose processes are ending, or more machines than the run has
    barrier.hint(f"{barrier.everyone} have already met at {barrier.place}; this machine is not needed")
    if barrier.waited_s > barrier.limit_s:
        raise barrier.error(
            f"{barrier.everyone} have met at {barrier.place} without {barrier.hostname}. Raise launch.nodes on all of "
            "them, or do not start the command here"
        )
    return False


def describe_skew(seconds: float, here: str, there: str) -> str | None:
    """What is wrong with the clock of `here`, if something is. `seconds`: how far it is ahead."""
    if abs(seconds) < _SKEW_S:
        return None
    return (
        f"the clock of {here} is {abs(seconds):.0f} s {'ahead of' if seconds > 0 else 'behind'} that of {there}: times "
        "in their logs cannot be compared, and of two errors the later one may be named as the first. Set the clocks, "
        "with chrony or NTP; the training itself does not depend on them"
    )


def _connect(barrier: StartBarrier) -> TCPStore:
    """Connect as soon as someone listens."""
    while True:
        try:
            with socket.create_connection((barrier.host, barrier.port), timeout=_ANSWER_S / 2):
                pass
            return _client(barrier)
        except OSError as error:
            is_refused = error.errno == errno.ECONNREFUSED
            reason = _no_answer(barrier, error)
        except dist.DistError as error:
            if "refused" not in str(error):
                raise _taken(barrier, "another program listens there") from None
            is_refused, reason = True, f"{barrier.place} stopped listening"
        if barrier.waited_s > (barrier.limit_s if is_refused else _UNREACHABLE_S):
            raise barrier.error(f"{barrier.hostname} gives up after {barrier.waited_s:.0f} s: {reason}")
        barrier.hint(reason)
        time.sleep(_POLL_S)


def _no_answer(barrier: StartBarrier, error: OSError) -> str:
    if error.errno == errno.ECONNREFUSED:
        return (
            f"nothing listens at {barrier.place} yet. Start the same command on {barrier.host}; if that is not one "
            "of the machines of this run, name one of them, with a free port"
        )
    return (
        f"{barrier.place} cannot be reached from {barrier.hostname} ({error.strerror or error}). Is this one of the "
        "machines, is it up, and does its firewall let the port through?"
    )


def _client(barrier: StartBarrier) -> TCPStore:
    """A connection to the store. torch may wait forever for the answer of another program: a thread waits for it."""
    results: list[TCPStore | BaseException] = []

    def connect() -> None:
        try:
            results.append(_store(barrier, is_host=False))
        except BaseException as error:
            results.append(error)

    thread = threading.Thread(target=connect, name="rendezvous", daemon=True)
    thread.start()
    abandon_thread(thread, 2 * _ANSWER_S)
    if not results:
        raise _taken(barrier, "another program listens there")
    if isinstance(results[0], BaseException):
        raise results[0]
    return results[0]


def _require_run(barrier: StartBarrier, store: TCPStore) -> None:
    """Refuse the store of another run or program."""
    try:
        name = store.get(_NAME).decode(errors="replace")
    except dist.DistStoreError:
        raise _taken(barrier, "another program listens there") from None
    if name != barrier.name:
        raise _taken(barrier, f"the run {name!r} uses it")


def _taken(barrier: StartBarrier, reason: str) -> RendezvousError:
    return barrier.error(f"{barrier.place} is taken: {reason}. Give another port, the same on all machines")


def _store(barrier: StartBarrier, is_host: bool) -> TCPStore:
    """`multi_tenant`: torch's own rendezvous, in this process, shares the server."""
    timeout = datetime.timedelta(seconds=_ANSWER_S)
    return TCPStore(
        barrier.host, barrier.port, is_master=is_host, multi_tenant=True, wait_for_workers=False, timeout=timeout
    )


def _beat_key(number: int) -> str:
    return f"whet/here/{number}"


def _names(hosts: list[str]) -> str:
    different = list(dict.fromkeys(hosts))
    more = f" and {len(different) - _SHOWN} more" if len(different) > _SHOWN else ""
    return ", ".join(different[:_SHOWN]) + more
