"""Signals that ask for an end."""

from __future__ import annotations

import os
import signal

import pytest

from whet.core.errors import StoppedError
from whet.core.interrupt import noted, terminate_like_ctrl_c


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
