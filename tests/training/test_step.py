"""One step: what it gives when something is wrong, and what its randomness depends on."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from layouts import ALONE, FEW_STEPS, OPTIMIZER, TINY, Layout, make_store, plan_of, run_steps, take
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
from whet.training import step
from whet.training.config import OptimizerConfig
from whet.training.optimizers.factory import build_optimizer, gradient_bytes
from whet.training.overlap import EarlyForwardPasses
from whet.training.step import ForwardPasses, StepResult, train_step

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


class OneLoss(nn.Module):
    """A model whose loss and gradient are given."""

    router_aux_loss = None
    expert_load = None

    def __init__(self, loss: float, gradient: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros((), dtype=torch.float64))
        self.trainable_parameters, self._loss, self._gradient = [self.weight], loss, gradient

    def forward(self, batch: Any, weight: float) -> Any:
        loss = torch.tensor(self._loss, dtype=torch.float64)
        return SimpleNamespace(objective=self.weight * self._gradient, loss=loss, nll=loss[None], hits=torch.zeros(1))


def one_step(loss: float, gradient: float, supervised: int, loss_scale: float, **how: Any) -> tuple[StepResult, float]:
    """The result of a step, and how far SGD moved the weight."""
    model: Any = OneLoss(loss, gradient)
    batch = SimpleNamespace(to=lambda device: batch, place_at=torch.zeros(1, dtype=torch.int64))
    loader: Any = SimpleNamespace(
        totals=lambda step: SimpleNamespace(supervised=supervised, conversations=1),
        micro_batches=lambda step: iter([(0, batch)]),
        micro_batch_count=lambda step: 1,
    )
    forward = ForwardPasses(model, loader, 0, **USUAL | {"loss_scale": loss_scale})
    result = train_step(forward, torch.optim.SGD([model.weight], lr=1.0), ranks=ALONE, **how).wait()
    return result, model.weight.item()


@given(NUMBERS, NUMBERS, st.integers(1, 10**7), st.sampled_from([1.0, 2.0**16]), st.floats(1e-6, 1e6), NUMBERS)
def test_the_weights_change_if_loss_and_norm_are_finite_and_the_loss_is_within_its_limit(
    loss: float, gradient: float, supervised: int, loss_scale: float, clip_norm: float, limit: float
) -> None:
    """torch's square roots on CPUs are not exact, so the factor is compared to 15 digits."""
    limit = math.inf if math.isnan(limit) else limit
    result, moved = one_step(loss, gradient, supervised, loss_scale, clip_norm=clip_norm, spike_limit=limit)
    assert result.updated == (result.finite and result.loss <= limit)
    assert result.finite == (math.isfinite(loss) and math.isfinite(gradient))
    if not result.updated:
        assert moved == 0
        return
    norm = gradient / loss_scale
    assert (result.loss, result.grad_norm) == (loss / supervised, pytest.approx(norm, rel=1e-15, abs=1e-150))
    factor = min(1.0, clip_norm / (norm + 1e-6)) / loss_scale
    assert result.gradient_scale == pytest.approx(factor, rel=1e-14)
    assert moved == pytest.approx(-gradient * factor, rel=1e-14, abs=1e-150)


def test_an_update_that_the_device_did_not_take_is_retracted_when_the_result_is_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    did: list[str] = []
    monkeypatch.setattr(step, "apply_gradients", lambda optimizer, scale, is_sound: did.append("launched"))
    monkeypatch.setattr(step, "retract_step", lambda optimizer: did.append("retracted"))
    one_step(1.0, 1.0, 1, 1.0, clip_norm=1.0)
    assert did == ["launched"]
    one_step(math.nan, 1.0, 1, 1.0, clip_norm=1.0)
    assert did == ["launched", "launched", "retracted"]


def test_a_step_without_supervised_tokens_has_no_loss_and_changes_nothing() -> None:
    result, moved = one_step(0.0, 1.0, supervised=0, loss_scale=1.0, clip_norm=1.0)
    assert all(map(math.isnan, (result.loss, result.accuracy, result.grad_norm, result.gradient_scale)))
    assert (result.updated, moved) == (False, 0)


def test_a_step_whose_first_forward_pass_was_launched_early_is_the_same_step(store: Store) -> None:
    """Two micro-batches a step, with dropout: the first is computed before the host has read the step before."""

    def losses(is_early: bool) -> list[float]:
        model = load_model(TINY, torch.float64)
        attention.install_backend(model, "sdpa")
        root = LossModel(unwrap_peft(add_adapter(model, AdapterConfig(dropout=0.5), seed=0))).train()
        optimizer = build_optimizer(root, OPTIMIZER, 0)
        found = []
        with contextlib.closing(Loader(store, plan_of(store, "none"), 2, 0, 1)) as loader:
            forward = EarlyForwardPasses(root, loader, 0, **USUAL)
            for number in range(4):
                assert forward.has_started is (is_early and number > 0)
                pending = train_step(forward, optimizer, ranks=ALONE, clip_norm=0.1)
                forward = EarlyForwardPasses(root, loader, number + 1, **USUAL)
                if is_early:
                    forward.launch_first()
                result = pending.wait()
                found += [result.loss, result.accuracy, result.grad_norm]
        return found

    assert losses(is_early=True) == losses(is_early=False)


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


def test_a_stop_request_reaches_every_rank(store: Store) -> None:
    plan = plan_of(store, "none")
    model = load_model(TINY, torch.float64)
    attention.install_backend(model, "sdpa")
    root = LossModel(model)
    optimizer, loader = build_optimizer(root, OPTIMIZER, 0), Loader(store, plan, 1, 0, 1)
    for stop in (False, True):
        assert take(root, optimizer, loader, 5, stop_requested=lambda stop=stop: stop).stop_requested is stop


@pytest.mark.parametrize("loss_scale", [1024.0, 3.0])
def test_a_loss_scale_changes_nothing_in_fp64(store: Store, loss_scale: float) -> None:
    layout = Layout("best-fit", 2, steps=FEW_STEPS)
    found, plain = (run_steps(store, layout, loss_scale=scale) for scale in (loss_scale, 1.0))
    assert found.losses == pytest.approx(plain.losses, rel=1e-11)
    assert found.norms == pytest.approx(plain.norms, rel=1e-11)


BATCH = SimpleNamespace(place_at=torch.zeros(1, dtype=torch.int64))


def test_waiting_for_data_is_timed() -> None:
    def slow(step: int) -> Iterator[Any]:
        for number in range(2):
            time.sleep(0.02)
            yield number, SimpleNamespace(to=lambda device: BATCH)

    loader: Any = SimpleNamespace(
        totals=lambda step: SimpleNamespace(supervised=1, conversations=1),
        micro_batches=slow,
        micro_batch_count=lambda step: 2,
    )
    model: Any = OneLoss(1.0, 1.0)
    result = train_step(ForwardPasses(model, loader, 0, **USUAL), None, ranks=ALONE, clip_norm=1.0).wait()
    assert 0.04 <= result.data_s < 1
