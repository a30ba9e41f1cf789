"""The guard finds jumps and leaves ordinary noise alone; what it remembers is what metrics.jsonl says."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from whet.training.guard import Guard, Verdict, spike_threshold
from whet.training.step import StepResult

LOSSES = st.lists(st.floats(0, 20), min_size=16, max_size=64)


def result(loss: float, norm: float = 1.0) -> StepResult:
    return StepResult(loss, 0.5, norm, 1.0, False, 0.0)


def line(step: int, loss: float | None, **more: Any) -> dict[str, Any]:
    return {"step": step, "loss": loss, **more}


def guard_after(losses: Any, **policies: Any) -> Guard:
    guard = Guard(**policies)
    for step, loss in enumerate(losses, 1):
        guard.record(line(step, float(loss)))
    return guard


def curves(draw: np.random.Generator, noise: str, steps: int = 200) -> np.ndarray:
    """A falling curve: from `high` to `low` at some speed, with the noise that batches of a kind make."""
    high, low, speed = draw.uniform(2, 11), draw.uniform(0.05, 2), draw.uniform(5, 200)
    base = low + (high - low) * np.exp(-np.arange(steps) / speed)
    size = draw.uniform(0.01, 0.4)
    match noise:
        case "gaussian":
            return np.maximum(base * (1 + size / 2 * draw.normal(size=steps)), 1e-4)
        case "factors":  # one conversation a step, of very different lengths
            return base * np.exp(size * draw.normal(size=steps))
        case "two levels":  # a mixture of an easy and a hard source, one conversation a step
            return base * np.where(draw.random(steps) < 0.2, 4, 1) * np.exp(0.05 * draw.normal(size=steps))
    raise AssertionError(noise)


@pytest.mark.parametrize(("noise", "most"), [("gaussian", 0), ("factors", 0), ("two levels", 5e-4)])
def test_ordinary_curves_raise_no_alarm(noise: str, most: float) -> None:
    draw = np.random.default_rng(0)
    alarms = steps = 0
    for _ in range(40):
        losses = curves(draw, noise)
        for step in range(16, len(losses)):
            steps += 1
            alarms += losses[step] > spike_threshold(losses[max(0, step - 64) : step])
    assert alarms <= most * steps


@pytest.mark.parametrize(("noise", "most"), [("gaussian", 0.8), ("factors", 0.45)])
def test_a_spike_is_found(noise: str, most: float) -> None:
    """To 12 from wherever the curve is after 100 steps; among factors of e^±1.2 a jump is harder to tell from noise."""
    draw = np.random.default_rng(1)
    found = [spike_threshold(curves(draw, noise)[36:100]) < 12.0 for _ in range(200)]
    assert np.mean(found) > most
    steady = 1.0 + 0.05 * draw.normal(size=64)
    assert 1.4 < spike_threshold(steady) < 1.7


@given(LOSSES, st.integers(0, 3))
def test_the_limit_is_above_the_highest_and_scales_with_the_losses(losses: list[float], power: int) -> None:
    limit = spike_threshold(losses)
    assert limit >= 1.1 * max(losses)
    assert limit >= 0.1
    if min(losses) > 0.2:  # where 0.1 does not count
        assert spike_threshold([loss * 2**power for loss in losses]) == pytest.approx(limit * 2**power)


@given(st.lists(st.floats(0, 20), max_size=15))
def test_too_few_losses_raise_no_alarm(losses: list[float]) -> None:
    assert guard_after(losses).judge(result(1e30), 5, False) == Verdict("fine", "take")


@pytest.mark.parametrize("policy", ["stop", "skip", "rollback"])
@pytest.mark.parametrize(("loss", "norm"), [(math.nan, 1.0), (math.inf, 1.0), (1.0, math.inf), (1.0, math.nan)])
def test_a_nonfinite_step_meets_the_policy(policy: Any, loss: float, norm: float) -> None:
    verdict = Guard(on_nonfinite=policy).judge(result(loss, norm), 5, overflow_is_normal=False)
    assert (verdict.kind, verdict.action) == ("nonfinite", policy)
    assert ("gradient" in verdict.reason) == math.isfinite(loss)
    assert "nan" not in verdict.reason
    assert "inf" not in verdict.reason.replace("finite", "")


def test_a_gradient_that_overflows_in_fp16_is_the_scales_fault_but_a_loss_is_not() -> None:
    """The loss is computed before it is scaled."""
    guard = Guard(on_nonfinite="stop")
    assert guard.judge(result(1.0, math.inf), 5, True) == Verdict("overflow", "skip")
    assert guard.judge(result(math.nan, math.nan), 5, True).action == "stop"


def test_overflows_do_not_use_up_the_skips_and_faults_do_in_fp16_too() -> None:
    guard = Guard(on_nonfinite="skip")
    for n in range(1, 30):
        guard.record(line(n, 1.0, skipped="overflow", loss_scale=1024.0))
    assert guard.judge(result(math.nan), 5, True).action == "skip"
    for n in range(1, 11):
        guard.record(line(n, None, skipped="nonfinite", loss_scale=1024.0))
    assert guard.judge(result(math.nan), 5, True).action == "stop"


@pytest.mark.parametrize("policy", ["stop", "skip", "rollback"])
def test_nothing_supervised_has_words_of_its_own_even_in_fp16(policy: Any) -> None:
    for scale_can_shrink in (False, True):
        verdict = Guard(on_nonfinite=policy).judge(result(math.nan, math.nan), 0, scale_can_shrink)
        assert (verdict.kind, verdict.action) == ("empty", policy)
        assert "supervised" in verdict.reason


@pytest.mark.parametrize(("policy", "action"), [("warn", "take"), ("stop", "stop"), ("skip", "skip")])
def test_a_spike_meets_its_own_policy(policy: Any, action: str) -> None:
    guard = guard_after([2.0] * 20, on_spike=policy)
    assert guard.judge(result(2.9), 5, False).kind == "fine"
    verdict = guard.judge(result(9.0), 5, False)
    assert (verdict.kind, verdict.action, verdict.limit) == ("spike", action, pytest.approx(3.0))


def test_rollbacks_are_counted_over_the_run() -> None:
    guard = Guard(on_nonfinite="rollback", excluded=[(3, 4), (3, 8)])
    assert guard.judge(result(math.nan), 5, False).action == "rollback"
    guard.excluded.append((9, 9))
    assert guard.judge(result(math.nan), 5, False).action == "stop"
    assert [step for step in range(1, 12) if guard.excludes(step)] == list(range(3, 10))


@given(
    st.lists(
        st.tuples(st.one_of(st.none(), st.floats(0, 20)), st.booleans()),  # (loss, skipped)
        max_size=120,
    ),
    st.integers(0, 120),
)
def test_a_resumed_guard_judges_like_the_one_that_went_on(steps: list[tuple[float | None, bool]], cut: int) -> None:
    lines = [line(n, loss, **({"skipped": "spike"} if skipped else {})) for n, (loss, skipped) in enumerate(steps, 1)]
    lines.insert(min(cut, len(lines)), {"step": 5, "val_loss": 99.0})
    went_on = Guard("skip", "skip", [(4, 6)])
    for each in lines:
        went_on.record(each)
    resumed = Guard("skip", "skip", [(4, 6)])
    resumed.record(line(1, 1e9))  # of the time before
    resumed.restore(json.loads(json.dumps(went_on.state())))
    assert resumed == went_on
    used = [each for each in lines if "loss" in each and not 4 <= each["step"] <= 6]
    taken = [each["loss"] for each in used if not each.get("skipped") and each["loss"] is not None]
    assert list(resumed._losses) == taken[-64:]
