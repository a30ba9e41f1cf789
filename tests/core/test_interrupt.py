"""Signals that ask for an end."""

from __future__ import annotations

import contextlib
import os
import signal

import pytest

from whet.core.errors import StoppedError
from whet.core.interrupt import AskedToStop, noted, terminate_like_ctrl_c


def send(number: signal.Signals) -> None:
    os.kill(os.getpid(), number)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_schedulers_signals_end_like_ctrl_c_and_only_once(number: signal.Signals) -> None:
    before = signal.getsignal(number)
    with terminate_like_ctrl_c():
        with pytest.raises(KeyboardInterrupt):
            send(number)
        send(number)  # torchrun asks again whoever takes longer than the first
    assert signal.getsignal(number) is before


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGINT])
def test_signals_are_noted_and_a_second_ctrl_c_interrupts(number: signal.Signals) -> None:
    signals: list[int] = []
    told: list[int] = []
    with terminate_like_ctrl_c(), noted(signals, lambda: told.append(1)):
        send(number)
        send(signal.SIGTERM)
        assert signals == [number, signal.SIGTERM]
        assert len(told) == 2
        with pytest.raises(KeyboardInterrupt):
            send(signal.SIGINT)


def test_who_is_stopping_is_not_disturbed_while_it_writes_down_how() -> None:
    with terminate_like_ctrl_c():
        with pytest.raises(StoppedError), noted([], lambda: None):
            raise StoppedError("stopped")
        send(signal.SIGTERM)  # would raise
    with pytest.raises(KeyboardInterrupt), terminate_like_ctrl_c():
        send(signal.SIGTERM)


def test_nothing_is_left_behind_without_the_frame_around() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(StoppedError), noted([], lambda: None):
        raise StoppedError("stopped")
    assert signal.getsignal(signal.SIGTERM) is before


def test_after_a_good_end_signals_interrupt_again() -> None:
    with terminate_like_ctrl_c():
        with noted([], lambda: None):
            pass
        with pytest.raises(KeyboardInterrupt):
            send(signal.SIGTERM)


def test_a_signal_whose_exception_was_lost_is_noted_all_the_same() -> None:
    signals: list[int] = []
    with terminate_like_ctrl_c():
        with contextlib.suppress(BaseException):  # as some libraries do
            send(signal.SIGTERM)
        with noted(signals, lambda: None):
            pass
    assert signals == [signal.SIGTERM]
    later: list[int] = []
    with terminate_like_ctrl_c(), noted(later, lambda: None):
        pass
    assert later == []


def test_what_programs_ask_for_is_told_from_ctrl_c() -> None:
    with pytest.raises(AskedToStop), terminate_like_ctrl_c(), terminate_like_ctrl_c():
        send(signal.SIGUSR1)
    with pytest.raises(KeyboardInterrupt) as raised, terminate_like_ctrl_c():
        send(signal.SIGINT)
    assert raised.type is KeyboardInterrupt


def test_inside_another_one_that_is_ending_nothing_is_disturbed() -> None:
    with terminate_like_ctrl_c():
        with pytest.raises(StoppedError), terminate_like_ctrl_c(), noted([], lambda: None):
            raise StoppedError("stopped")
        send(signal.SIGTERM)  # would raise
