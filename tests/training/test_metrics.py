"""The numbers of a step: averages, rates, and what is null."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from whet.data.loader import StepTotals
from whet.model.flops import AttentionCost, StepFlops
from whet.training import metrics
from whet.training.metrics import (
    ExponentialAverage,
    ProgressMeans,
    RunTotals,
    StepSpeed,
    StepTime,
    progress_note,
    step_metrics,
)
from whet.training.step import StepResult


def test_the_first_average_is_the_first_value_and_what_is_not_finite_is_passed_over() -> None:
    average = ExponentialAverage()
    assert math.isnan(average.add(math.nan))
    assert average.add(3.0) == pytest.approx(3.0, rel=1e-12)
    assert average.add(math.inf) == pytest.approx(3.0, rel=1e-12)
    assert average.add(2.0) == pytest.approx((0.9 * 3 + 2) / 1.9, rel=1e-12)


def line(pace: StepSpeed, loss: float = 2.0) -> dict[str, Any]:
    totals = StepTotals(2, 30, 10, np.array([20, 10]))
    seen = RunTotals().add(totals, StepFlops(3, 5, (AttentionCost(8, 1, 2),)))
    return step_metrics(
        1, StepResult(loss, 0.5, 1.0, 1.0, False, 0.1), {"lr": 0.1}, seen, totals, 8, pace, torch.device("cpu")
    )


def test_rates_are_of_this_step_and_null_while_compiling() -> None:
    found = line(StepSpeed(StepTime(2.0, 0.0), 400, 1000.0))
    assert (found["tokens_per_s"], found["supervised_per_s"], found["conversations_per_s"]) == (15, 5, 1)
    assert found["mfu"] == 0.2
    assert found["flops"] == 3 * 30 + 5 * 10 + 3 * (36 + 12 * 8 + 36 + 2 * 8)
    assert line(StepSpeed(StepTime(2.0, 0.0), 400, None))["mfu"] is None
    cold = line(StepSpeed(StepTime(2.0, 0.0, is_steady=False), 400, 1000.0))
    assert {cold[key] for key in ("tokens_per_s", "supervised_per_s", "conversations_per_s", "mfu")} == {None}
    assert cold["step_s"] == 2.0


def test_a_line_says_when_its_step_ended_not_when_it_was_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics.time, "time", lambda: 1000.0)
    assert line(StepSpeed(StepTime(2.0, 0.25), 400, None))["time"] == 999.75


def test_what_is_not_finite_is_nothing() -> None:
    assert line(StepSpeed(StepTime(1.0, 0.0), 1, None), loss=math.nan)["loss"] is None


def test_the_note_says_what_is_known() -> None:
    def note(speed: StepSpeed) -> str:
        return progress_note(ProgressMeans().add(line(speed)))

    assert note(StepSpeed(StepTime(2.0, 0.0), 400, 1000.0)) == "mean loss 2.0000 · 15 tokens/s · mfu 20.0%"
    assert note(StepSpeed(StepTime(2.0, 0.0), 400, None)) == "mean loss 2.0000 · 15 tokens/s"
    assert note(StepSpeed(StepTime(2.0, 0.0, is_steady=False), 400, 1000.0)) == "mean loss 2.0000"


def test_a_short_last_step_does_not_stand_for_the_run() -> None:
    means = ProgressMeans()
    for _ in range(20):
        means.add(line(StepSpeed(StepTime(2.0, 0.0), 400, 1000.0)))
    last = means.add(line(StepSpeed(StepTime(20.0, 0.0), 400, 1000.0), loss=7.0))
    assert last["tokens_per_s"] == pytest.approx(15, rel=0.11)
    assert last["mfu"] == pytest.approx(0.2, rel=0.11)
    assert last["loss"] == 7.0  # the curve shows the losses themselves
