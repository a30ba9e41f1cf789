"""One step: what it gives when something is wrong, and what its randomness depends on."""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from layouts import ALONE, OPTIMIZER, TINY, Layout, make_store, plan_of, run_steps, take
from torch import nn

from whet.data.loader import Loader
from whet.data.plan.planner import Plan
from whet.data.prepare.store import Store
from whet.model import attention
from whet.model.config import AdapterConfig
from whet.model.load.pretrained import load_model
from whet.model.lora.peft_adapters import add_adapter, unwrap_peft
from whet.model.loss.loss_model import LossModel
from whet.model.modules import KeepFloat64
from whet.training.config import OptimizerConfig
from whet.training.micro_batches import ForwardPasses, OverlappedForward, TimedIterator
from whet.training.optimizers.factory import build_optimizer, gradient_bytes, optimizer_step
from whet.training.step import StepResult, _decide_on_device, compute_gradients

USUAL: dict[str, Any] = {"device": ALONE.device, "seed": 0, "autocast": KeepFloat64(), "loss_scale": 1.0}


@pytest.fixture(scope="module")
def store() -> Store:
    return make_store()


def test_a_loss_that_is_not_finite_leaves_the_weights_alone(store: Store) -> None:
    plan = plan_of(store, "none")
    model = load_model(TINY, torch.float64)
    attention.install_backend(model, "sdpa")
    model.model.norm.weight.data.fill_(float("nan"))
    root = LossModel(model)
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    result = take(root, build_optimizer(root, OPTIMIZER, 0), Loader(store, plan, 1, 0, 1), 0)
    assert result.loss != result.loss
    assert not result.finite
    for name, weight in model.state_dict().items():
        torch.testing.assert_close(weight, before[name], rtol=0, atol=0, equal_nan=True)


NUMBERS = st.floats(0, 1e12) | st.sampled_from([math.nan, math.inf, 0.0])


@given(NUMBERS, NUMBERS, st.integers(1, 10**7), st.sampled_from([1.0, 2.0**16]), st.floats(1e-6, 1e6), NUMBERS)
def test_the_device_decides_as_the_host_does(
    loss: float, squares: float, supervised: int, loss_scale: float, clip_norm: float, limit: float
) -> None:
    """The guard's judgement of the same numbers, and the same factor: torch's square roots on CPUs are not exact."""
    limit = math.inf if math.isnan(limit) else limit
    sums = torch.tensor([loss, 0, 0, squares, 0], dtype=torch.float64)
    factor, fine = (float(each) for each in _decide_on_device(sums, supervised, loss_scale, clip_norm, limit))
    norm = math.sqrt(squares) / loss_scale
    result = StepResult(loss / supervised, 0.0, norm, min(1.0, clip_norm / (norm + 1e-6)) / loss_scale, False, 0.0)
    assert (fine == 1) == (result.finite and result.loss <= limit)
    assert fine in (0, 1)
    if fine:
        assert factor == pytest.approx(result.factor, rel=1e-15)


@pytest.mark.parametrize("broken", [False, True])
def test_a_move_is_asked_for_before_the_result_is_known(store: Store, broken: bool) -> None:
    model = load_model(TINY, torch.float64)
    attention.install_backend(model, "sdpa")
    if broken:
        model.model.norm.weight.data.fill_(math.nan)
    asked: list[tuple[float, float]] = []
    passes = ForwardPasses(LossModel(model), Loader(store, plan_of(store, "none"), 1, 0, 1), 0, **USUAL)
    result = compute_gradients(
        passes, ranks=ALONE, clip_norm=0.1, stop=False,
        move=lambda factor, fine: asked.append((float(factor), float(fine))),
    )  # fmt: skip
    assert len(asked) == 1
    assert asked[0][1] == (0 if broken else 1)
    if not broken:
        assert asked[0][0] == pytest.approx(result.factor, rel=1e-15)
        assert result.factor < 1


def test_a_step_that_began_early_is_the_same_step(store: Store) -> None:
    """Two micro-batches a step, with dropout: the first is computed before the host has looked at the step before."""

    def losses(begins: bool) -> list[float]:
        model = load_model(TINY, torch.float64)
        attention.install_backend(model, "sdpa")
        root = LossModel(unwrap_peft(add_adapter(model, AdapterConfig(dropout=0.5), seed=0))).train()
        optimizer = build_optimizer(root, OPTIMIZER, 0)
        with contextlib.closing(Loader(store, plan_of(store, "none"), 2, 0, 1)) as loader:
            ahead, found = OverlappedForward(lambda step: ForwardPasses(root, loader, step, **USUAL), possible=True), []
            for step in range(4):
                passes = ahead.take(step)
                assert passes.has_begun is (begins and step > 0)
                result = compute_gradients(
                    passes, ranks=ALONE, clip_norm=0.1, stop=False,
                    move=lambda factor, fine: optimizer_step(optimizer, float(factor)),
                    meanwhile=functools.partial(ahead.begin, step + 1) if begins else None,
                )  # fmt: skip
                found += [result.loss, result.accuracy, result.grad_norm]
        return found

    assert losses(begins=True) == losses(begins=False)


def test_without_memory_for_it_a_step_begins_in_its_turn(store: Store) -> None:
    tried: list[int] = []

    class Hungry(ForwardPasses):
        def begin(self) -> None:
            tried.append(self.step)
            raise torch.OutOfMemoryError("no")

    root: Any = nn.Linear(1, 1)
    with contextlib.closing(Loader(store, plan_of(store, "none"), 2, 0, 1)) as loader:
        ahead = OverlappedForward(lambda step: Hungry(root, loader, step, **USUAL), possible=True)
        for step in range(3):
            passes = ahead.take(step)
            assert (passes.step, passes.has_begun) == (step, False)
            ahead.begin(step + 1)
    assert tried == [1]  # it is not tried again


def test_gradients_are_counted_in_the_type_they_are_summed_in() -> None:
    model = nn.Linear(3, 5).bfloat16()
    optimizer = torch.optim.SGD(model.parameters())
    assert gradient_bytes(optimizer) == 2 * 20
    model.weight.grad_dtype = torch.float32
    assert gradient_bytes(optimizer) == 4 * 15 + 2 * 5


def test_dropout_depends_on_seed_and_step_alone(store: Store) -> None:
    plan = plan_of(store, "none")
    same_rows = replace(plan, steps=plan.steps - plan.steps[1])  # in step 1 those of step 0
    model = load_model(TINY, torch.float64)
    attention.install_backend(model, "sdpa")
    root = LossModel(unwrap_peft(add_adapter(model, AdapterConfig(dropout=0.5), seed=0))).train()
    for name, parameter in root.named_parameters():
        if "lora_B" in name:
            nn.init.constant_(parameter, 0.02)

    def loss(seed: int, drawn_before: int, plan: Plan = plan, step: int = 0) -> float:
        torch.manual_seed(drawn_before)
        still = build_optimizer(root, OptimizerConfig(lr=1e-300), 0)
        return take(root, still, Loader(store, plan, 2, 0, 1), step, seed=seed).loss

    assert loss(seed=1, drawn_before=5) == loss(seed=1, drawn_before=6)
    assert loss(seed=1, drawn_before=5) != loss(seed=2, drawn_before=5)
    assert loss(seed=1, drawn_before=5) != loss(seed=1, drawn_before=5, plan=same_rows, step=1)


def test_a_request_to_stop_is_told_to_every_rank(store: Store) -> None:
    plan = plan_of(store, "none")
    model = load_model(TINY, torch.float64)
    attention.install_backend(model, "sdpa")
    root = LossModel(model)
    optimizer, loader = build_optimizer(root, OPTIMIZER, 0), Loader(store, plan, 1, 0, 1)
    for stop in (False, True):
        assert take(root, optimizer, loader, 5, stop=stop).stop is stop


@pytest.mark.parametrize("loss_scale", [1024.0, 3.0])
def test_a_loss_scale_leaves_no_trace(store: Store, loss_scale: float) -> None:
    found, plain = (run_steps(store, Layout("best-fit", 2), loss_scale=scale) for scale in (loss_scale, 1.0))
    assert found.losses == pytest.approx(plain.losses, rel=1e-11)
    assert found.norms == pytest.approx(plain.norms, rel=1e-11)


def test_waiting_for_data_is_timed() -> None:
    def slow() -> Iterator[int]:
        import time

        for number in range(2):
            time.sleep(0.02)
            yield number

    timed = TimedIterator(slow())
    assert list(timed) == [0, 1]
    assert 0.04 <= timed.seconds < 1
