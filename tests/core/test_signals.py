"""Signals that ask for an end."""

from __future__ import annotations

import contextlib
import io
import os
import signal
import subprocess
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from whet.core import console
from whet.core import signals as signals_module
from whet.core.errors import StoppedError
from whet.core.signals import StopRequested, collect_stop_signals, raise_on_stop_signals


def send(number: signal.Signals) -> None:
    os.kill(os.getpid(), number)


@pytest.mark.usefixtures("default_hangup")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP])
def test_stop_signals_raise_like_ctrl_c_and_only_once(number: signal.Signals) -> None:
    before = signal.getsignal(number)
    with raise_on_stop_signals():
        with pytest.raises(KeyboardInterrupt):
            send(number)
        send(number)  # torchrun asks again whoever takes longer than the first
    assert signal.getsignal(number) is before


@pytest.mark.usefixtures("default_hangup")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP, signal.SIGINT])
def test_signals_are_collected_and_a_second_ctrl_c_interrupts(number: signal.Signals) -> None:
    signals: list[int] = []
    told: list[int] = []
    with raise_on_stop_signals(), collect_stop_signals(signals, lambda: told.append(1)):
        send(number)
        send(signal.SIGTERM)
        assert signals == [number, signal.SIGTERM]
        with pytest.raises(KeyboardInterrupt):
            send(signal.SIGINT)
    assert len(told) == 1


def test_a_signal_may_interrupt_a_write_to_the_stream_that_announces_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A handler that wrote to run.log while the run does would raise "reentrant call inside BufferedWriter"."""

    class Interrupted(io.FileIO):
        def write(self, data: Any) -> int:
            if threading.current_thread() is threading.main_thread():
                send(signal.SIGTERM)
            return super().write(data)

    signals: list[int] = []
    stream = io.TextIOWrapper(io.BufferedWriter(Interrupted(tmp_path / "run.log", "w")), line_buffering=True)
    monkeypatch.setattr(console, "_log", console.SafeConsole(file=stream))
    with collect_stop_signals(signals, lambda: console.info("stopping")):
        for step in range(20):
            console.info(f"step {step}")
    assert len(signals) >= 20
    lines = [line.split(maxsplit=2)[2] for line in (tmp_path / "run.log").read_text().splitlines()]
    assert sorted(lines) == sorted(["stopping", *(f"step {step}" for step in range(20))])


def test_signals_are_ignored_while_an_error_is_written_down() -> None:
    with raise_on_stop_signals():
        with pytest.raises(StoppedError), collect_stop_signals([], lambda: None):
            raise StoppedError("stopped")
        send(signal.SIGTERM)  # would raise
    with pytest.raises(KeyboardInterrupt), raise_on_stop_signals():
        send(signal.SIGTERM)


def test_handlers_are_restored_without_an_outer_block() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(StoppedError), collect_stop_signals([], lambda: None):
        raise StoppedError("stopped")
    assert signal.getsignal(signal.SIGTERM) is before


def test_signals_raise_again_after_a_normal_end() -> None:
    with raise_on_stop_signals():
        with collect_stop_signals([], lambda: None):
            pass
        with pytest.raises(KeyboardInterrupt):
            send(signal.SIGTERM)


def test_a_signal_whose_exception_was_swallowed_is_collected() -> None:
    signals: list[int] = []
    with raise_on_stop_signals():
        with contextlib.suppress(BaseException):  # as some libraries do
            send(signal.SIGTERM)
        with collect_stop_signals(signals, lambda: None):
            pass
    assert signals == [signal.SIGTERM]
    later: list[int] = []
    with raise_on_stop_signals(), collect_stop_signals(later, lambda: None):
        pass
    assert later == []


def test_a_stop_request_is_distinguished_from_ctrl_c() -> None:
    with pytest.raises(StopRequested), raise_on_stop_signals(), raise_on_stop_signals():
        send(signal.SIGUSR1)
    with pytest.raises(KeyboardInterrupt) as raised, raise_on_stop_signals():
        send(signal.SIGINT)
    assert raised.type is KeyboardInterrupt


def test_a_nested_block_ignores_signals_while_the_outer_one_ends() -> None:
    with raise_on_stop_signals():
        with pytest.raises(StoppedError), raise_on_stop_signals(), collect_stop_signals([], lambda: None):
            raise StoppedError("stopped")
        send(signal.SIGTERM)  # would raise


@pytest.mark.parametrize(("number", "raised"), [(signal.SIGTERM, StopRequested), (signal.SIGINT, KeyboardInterrupt)])
def test_what_fails_because_it_was_interrupted_counts_as_the_stop(
    number: signal.Signals, raised: type[BaseException]
) -> None:
    """As an import of numpy does: it swallows the interrupt and fails with a RecursionError."""
    with pytest.raises(KeyboardInterrupt) as caught, raise_on_stop_signals(), raise_on_stop_signals():  # noqa: PT012
        with contextlib.suppress(BaseException):
            send(number)
        raise RecursionError
    assert type(caught.value) is raised


def test_a_failure_after_the_run_took_over_the_stop_keeps_its_name() -> None:
    with pytest.raises(ValueError, match="its own"), raise_on_stop_signals():  # noqa: PT012
        with contextlib.suppress(KeyboardInterrupt):
            send(signal.SIGTERM)
        with collect_stop_signals([], lambda: None):
            raise ValueError("its own")


@pytest.mark.parametrize("first", [signal.SIGINT, signal.SIGTERM])
def test_nothing_disturbs_an_exit_that_has_begun(first: signal.Signals) -> None:
    with raise_on_stop_signals():
        with pytest.raises(KeyboardInterrupt):
            send(first)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1) * 5:
            send(number)


def test_a_ctrl_c_that_was_swallowed_can_be_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(signals_module, "_REPEAT_S", 0.0)
    with raise_on_stop_signals():
        for _ in range(2):
            with pytest.raises(KeyboardInterrupt):
                send(signal.SIGINT)
        send(signal.SIGTERM)


def test_under_nohup_a_hangup_stays_ignored() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with raise_on_stop_signals(), collect_stop_signals([], lambda: None):
            assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_process_gets_sigterm_when_its_parent_is_killed(real_python: str, tmp_path: Path) -> None:
    ready, ended = tmp_path / "ready", tmp_path / "ended"
    child = (
        "import signal, sys, time; from pathlib import Path; from whet.core.signals import terminate_with_parent\n"
        "def stop(number, frame): Path(sys.argv[2]).write_text(str(number)); sys.exit()\n"
        "signal.signal(signal.SIGTERM, stop); terminate_with_parent(); Path(sys.argv[1]).touch(); time.sleep(60)"
    )
    parent = "import subprocess, sys; subprocess.run([sys.executable, '-c', *sys.argv[1:]])"
    process = subprocess.Popen([real_python, "-c", parent, child, str(ready), str(ended)])
    wait_for(ready)
    process.kill()
    process.wait()
    wait_for(ended)
    assert ended.read_text() == str(int(signal.SIGTERM))


def wait_for(file: Path) -> None:
    until = time.monotonic() + 30
    while not file.exists() or (file.name == "ended" and not file.read_text()):
        assert time.monotonic() < until
        time.sleep(0.01)
