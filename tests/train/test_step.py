"""The step against the plainest loop there is: one conversation at a time, the model's own logits, torch's loss."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from whet.core.ranks import Ranks
from whet.data.config import DataConfig, Source
from whet.data.language import ChatLanguage
from whet.data.loader import Loader
from whet.data.mixture import everything
from whet.data.plan import Plan
from whet.data.planner import Length, plan_by_conversations
from whet.data.prepare import prepare
from whet.data.store import Store
from whet.model import attention
from whet.model.config import AdapterConfig, ModelConfig
from whet.model.load import load_model
from whet.model.lora import add_adapter, language_model
from whet.model.loss import LossModel
from whet.model.precision import HonestDouble
from whet.model.tokenizer import load_tokenizer
from whet.train.config import OptimizerConfig
from whet.train.optim import make_optimizer
from whet.train.step import StepResult, Timed, find_gradients

ALONE = Ranks(0, 1, torch.device("cpu"))
TINY = ModelConfig(path="builtin:tiny")
LANGUAGE = ChatLanguage({"tokenizer": TINY.path, "today": None}, lambda: load_tokenizer(TINY), list, "assistant")
CLIP = 0.5
OPTIMIZER = OptimizerConfig(lr=1e-2, weight_decay=0.1)


@pytest.fixture(scope="module")
def store() -> Store:
    """Thirteen orders."""
    config = DataConfig(sources=[Source(path="builtin:orders", max_samples=13)])
    return prepare(config, config.sources, "train", LANGUAGE).store


def plan_of(store: Store, packing: str) -> Plan:
    """Two passes in batches of five: 26 conversations, so the last of the six steps has one."""
    mixture = everything(np.arange(len(store)))
    return plan_by_conversations(store.lengths, mixture, 5, Length(epochs=2.0), 400, packing, 16, seed=3)


@dataclass(frozen=True, slots=True)
class Trace:
    losses: list[float]
    norms: list[float]
    weights: dict[str, torch.Tensor]


def take(root: LossModel, optimizer: torch.optim.Optimizer, loader: Loader, step: int, **changed: Any) -> StepResult:
    """One step as training takes it."""
    options: dict[str, Any] = {
        "ranks": ALONE, "seed": 0, "clip_norm": CLIP, "arithmetic": HonestDouble(), "loss_scale": 1.0, "stop": False,
    } | changed  # fmt: skip
    result = find_gradients(root, loader, step, **options)
    if result.finite:
        optimizer.step()
    return result


def run_steps(store: Store, plan: Plan, micro_rows: int, **changed: Any) -> Trace:
    model = load_model(TINY, torch.float64)
    attention.install(model, "sdpa")
    root = LossModel(model)
    optimizer = make_optimizer(root, OPTIMIZER, 0)
    loader = Loader(store, plan, micro_rows, 0, 1)
    results = [take(root, optimizer, loader, step, **changed) for step in range(len(plan))]
    return Trace([r.loss for r in results], [r.grad_norm for r in results], model.state_dict())


def run_naively(store: Store, plan: Plan) -> Trace:
    model = load_model(TINY, torch.float64)
    decay = {True: OPTIMIZER.weight_decay, False: 0.0}
    groups = [{"params": [p], "weight_decay": decay[p.ndim > 1]} for p in model.parameters()]
    optimizer = torch.optim.AdamW(groups, lr=OPTIMIZER.lr, betas=OPTIMIZER.betas, eps=OPTIMIZER.eps, foreach=False)
    losses, norms = [], []
    for step in range(len(plan)):
        total, count = torch.zeros((), dtype=torch.float64), 0
        for document in plan.documents_of(step):
            ids = torch.from_numpy(store.ids(int(document)))
            labels = ids.masked_fill(~torch.from_numpy(store.loss(int(document))), -100)
            with HonestDouble():
                logits = model(input_ids=ids[None]).logits[0]
            total = total + F.cross_entropy(logits[:-1], labels[1:], ignore_index=-100, reduction="sum")
            count += int((labels[1:] != -100).sum())
        optimizer.zero_grad()
        (total / count).backward()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), CLIP).item())
        losses.append(total.item() / count)
        optimizer.step()
    return Trace(losses, norms, model.state_dict())


@pytest.fixture(scope="module")
def naive(store: Store) -> Trace:
    return run_naively(store, plan_of(store, "none"))


@pytest.mark.parametrize("micro_rows", [1, 2, 5])
@pytest.mark.parametrize("packing", ["none", "best-fit"])
def test_losses_norms_and_weights_are_those_of_the_naive_loop(
    store: Store, naive: Trace, packing: str, micro_rows: int
) -> None:
    plan = plan_of(store, packing)
    assert [len(plan.documents_of(step)) for step in range(len(plan))] == [5, 5, 5, 5, 5, 1]
    assert (len(plan.rows) - 1 < len(plan.documents)) == (packing == "best-fit")
    found = run_steps(store, plan, micro_rows)
    assert found.losses == pytest.approx(naive.losses, rel=1e-11)
    assert found.norms == pytest.approx(naive.norms, rel=1e-11)
    assert max(naive.norms) > CLIP  # clipping took part
    for name, weight in naive.weights.items():
        torch.testing.assert_close(found.weights[name], weight, rtol=1e-9, atol=1e-9)


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
def test_a_loss_scale_leaves_no_trace(store: Store, naive: Trace, loss_scale: float) -> None:
    found = run_steps(store, plan_of(store, "best-fit"), 2, loss_scale=loss_scale)
    assert found.losses == pytest.approx(naive.losses, rel=1e-11)
    assert found.norms == pytest.approx(naive.norms, rel=1e-11)


def test_waiting_for_data_is_timed() -> None:
    def slow() -> Iterator[int]:
        import time

        for number in range(2):
            time.sleep(0.02)
            yield number

    timed = Timed(slow())
    assert list(timed) == [0, 1]
    assert 0.04 <= timed.seconds < 1
