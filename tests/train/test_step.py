"""One step: what it gives when something is wrong, and what its randomness depends on."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from layouts import OPTIMIZER, TINY, Layout, make_store, plan_of, run_steps, take
from torch import nn

from whet.data.loader import Loader
from whet.data.plan import Plan
from whet.data.store import Store
from whet.model import attention
from whet.model.config import AdapterConfig
from whet.model.load import load_model
from whet.model.lora import add_adapter, language_model
from whet.model.loss import LossModel
from whet.train.config import OptimizerConfig
from whet.train.optim import make_optimizer
from whet.train.step import Timed


@pytest.fixture(scope="module")
def store() -> Store:
    return make_store()


def test_a_loss_that_is_not_finite_leaves_the_weights_alone(store: Store) -> None:
    plan = plan_of(store, "none")
    model = load_model(TINY, torch.float64)
    attention.install(model, "sdpa")
    model.model.norm.weight.data.fill_(float("nan"))
    root = LossModel(model)
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    result = take(root, make_optimizer(root, OPTIMIZER, 0), Loader(store, plan, 1, 0, 1), 0)
    assert result.loss != result.loss
    assert not result.finite
    for name, weight in model.state_dict().items():
        torch.testing.assert_close(weight, before[name], rtol=0, atol=0, equal_nan=True)


def test_dropout_depends_on_seed_and_step_alone(store: Store) -> None:
    plan = plan_of(store, "none")
    same_rows = replace(plan, steps=plan.steps - plan.steps[1])  # in step 1 those of step 0
    model = load_model(TINY, torch.float64)
    attention.install(model, "sdpa")
    root = LossModel(language_model(add_adapter(model, AdapterConfig(dropout=0.5), seed=0))).train()
    for name, parameter in root.named_parameters():
        if "lora_B" in name:
            nn.init.constant_(parameter, 0.02)

    def loss(seed: int, drawn_before: int, plan: Plan = plan, step: int = 0) -> float:
        torch.manual_seed(drawn_before)
        still = make_optimizer(root, OptimizerConfig(lr=1e-300), 0)
        return take(root, still, Loader(store, plan, 2, 0, 1), step, seed=seed).loss

    assert loss(seed=1, drawn_before=5) == loss(seed=1, drawn_before=6)
    assert loss(seed=1, drawn_before=5) != loss(seed=2, drawn_before=5)
    assert loss(seed=1, drawn_before=5) != loss(seed=1, drawn_before=5, plan=same_rows, step=1)


def test_a_request_to_stop_is_told_to_every_rank(store: Store) -> None:
    plan = plan_of(store, "none")
    model = load_model(TINY, torch.float64)
    attention.install(model, "sdpa")
    root = LossModel(model)
    optimizer, loader = make_optimizer(root, OPTIMIZER, 0), Loader(store, plan, 1, 0, 1)
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

    timed = Timed(slow())
    assert list(timed) == [0, 1]
    assert 0.04 <= timed.seconds < 1
