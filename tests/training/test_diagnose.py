"""Where numbers stop being finite, module by module, and which conversation is to blame."""

from __future__ import annotations

import contextlib
import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from whet.core.distributed import Ranks, derive_seed
from whet.data.batch import BatchShape
from whet.data.loader import ReplayLoader, SavedDocument
from whet.model.loss.loss_model import LossSum
from whet.training.diagnose import Diagnoser, nonfinite_gradients, nonfinite_weights, watch_nonfinite

BAD = 7
"""The token that the plants react to."""


class Plant(torch.autograd.Function):
    """Passes on what it gets, with NaN in it forward or backward."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, back: bool) -> Tensor:
        ctx.back = back
        return value.clone() if back else value * math.nan

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0] * (math.inf if ctx.back else 1), None


class Block(nn.Module):
    def __init__(self, plant: str) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(4), nn.Linear(4, 4), nn.Linear(4, 4)
        self.plant = plant

    def forward(self, hidden_states: Tensor, bad: bool) -> Tensor:
        inner = self.up(self.norm(hidden_states))
        if bad and self.plant:
            inner = Plant.apply(inner, self.plant == "backward")
        return hidden_states + self.down(inner.relu())


class Dropping(nn.Dropout):
    def forward(self, hidden_states: Tensor, bad: bool) -> Tensor:
        return super().forward(hidden_states)


class Model(nn.Module):
    """Like a LossModel: two blocks, of which the second has the plant. `pair`: it reacts to two documents together."""

    def __init__(self, plant: str, pair: bool = False) -> None:
        super().__init__()
        self.language_model = nn.Module()
        self.language_model.embed = nn.Embedding(16, 4)
        self.language_model.blocks = nn.ModuleList([Block(""), Block(plant)])
        self.language_model.head = nn.Linear(4, 16)
        self.pair = pair

    def forward(self, batch: Any, weight: float = 1.0) -> LossSum:
        inner = self.language_model
        bad = BAD in batch.tokens and (len(batch.documents) > 1 or not self.pair)
        hidden = inner.embed(batch.tokens)
        for block in inner.blocks:
            hidden = block(hidden, bad)
        logits = inner.head(hidden[batch.supervised_at])
        targets = batch.labels[batch.supervised_at]
        nll = nn.functional.cross_entropy(logits, targets, reduction="none")
        return LossSum(nll.sum() * weight, nll.detach(), logits.argmax(-1) == targets)


@pytest.fixture
def step() -> ReplayLoader:
    """Three conversations in two micro-batches; the bad token is in the second one."""
    held = [
        SavedDocument(np.array(ids), np.array([0] + [1] * (len(ids) - 1), dtype=np.uint8))
        for ids in ([1, 2, 3], [4, BAD, 5, 6], [8, 9])
    ]
    return ReplayLoader(held, [(0, [0]), (1, [1, 2])], 4, [])


def examine(model: Any, step: ReplayLoader, kind: Any = "nonfinite", most: int | None = None) -> Any:
    ranks = Ranks(0, 1, torch.device("cpu"))
    return Diagnoser(model, ranks, 0, contextlib.nullcontext(), 1.0, most).diagnose(step, 0, kind)


@pytest.mark.parametrize(
    ("plant", "layer"), [("forward", "blocks.1"), ("backward", "blocks.1.up (backward)"), ("weight", "blocks.1.up")]
)
def test_the_conversation_and_the_module_are_found(plant: str, layer: str, step: ReplayLoader) -> None:
    """Forward, the plant stands between two modules of a block; backward, `up` is the next to get a bad gradient."""
    model = Model("" if plant == "weight" else plant)
    if plant == "weight":
        model.language_model.blocks[1].up.weight.data[0, 0] = math.inf
    found = examine(model, step)
    blamed = [(part.documents, part.layer) for part in found.blamed]
    if plant == "weight":
        assert blamed == [((0,), layer), ((1,), layer), ((2,), layer)]
        assert found.nonfinite_weights == ["blocks.1.up.weight"]
    else:
        assert blamed == [((1,), layer)]
        assert found.nonfinite_weights == []
    assert all(parameter.grad is None for parameter in model.parameters())


def test_the_numbers_of_each_are_those_of_a_plain_computation(step: ReplayLoader) -> None:
    model = Model("")
    found = examine(model, step)
    assert found.blamed == []
    assert [(part.tokens, part.supervised) for part in found.conversations] == [(3, 2), (4, 3), (2, 1)]
    for part, ids in zip(found.conversations, ([1, 2, 3], [4, BAD, 5, 6], [8, 9]), strict=True):
        hidden = model.language_model.embed(torch.tensor(ids[:-1]))
        for block in model.language_model.blocks:
            hidden = block(hidden, False)
        loss = nn.functional.cross_entropy(model.language_model.head(hidden), torch.tensor(ids[1:]), reduction="sum")
        assert part.loss == pytest.approx(loss.item() / (len(ids) - 1), rel=1e-5)
        gradients = torch.autograd.grad(loss / 6, list(model.parameters()))  # 6: supervised tokens of the step
        assert part.grad_norm == pytest.approx(nn.utils.get_total_norm(gradients).item(), rel=1e-5)


def test_randomness_is_that_of_the_step(step: ReplayLoader) -> None:
    model: Any = Model("")
    model.language_model.blocks.append(Dropping())
    ((_, _), (row, batch)) = list(step.single_document_batches(0, 2))
    assert row == 1
    found = examine(model, step).conversations[1]
    torch.manual_seed(derive_seed(0, 0, row))
    assert found.loss == pytest.approx(model(batch).nll.mean().item(), rel=1e-6)


def test_a_fault_of_documents_together_blames_the_micro_batch(step: ReplayLoader) -> None:
    found = examine(Model("forward", pair=True), step)
    assert [(part.documents, part.layer) for part in found.blamed] == [((1, 2), "blocks.1")]
    assert all(part.layer is None for part in found.conversations)


def test_a_spike_names_the_highest_and_leaves_the_gradients_of_the_step(step: ReplayLoader) -> None:
    model = Model("")
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 3.0)
    found = examine(model, step, "spike")
    losses = [part.loss for part in found.blamed]
    assert losses == sorted(losses, reverse=True)
    assert len(losses) == 3
    assert all(bool((parameter.grad == 3).all()) for parameter in model.parameters() if parameter.grad is not None)
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_the_work_is_bounded(step: ReplayLoader) -> None:
    assert [part.documents for part in examine(Model(""), step, most=2).conversations] == [(0,), (1,)]


def test_watching_leaves_no_hooks_and_changes_no_number(step: ReplayLoader) -> None:
    model = Model("")
    ((_, batch), *_) = step.micro_batches(0)
    plain = model(batch).objective
    with watch_nonfinite(model) as watch:
        assert torch.equal(model(batch).objective, plain)
    assert (watch.forward, watch.backward) == (None, None)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_modules_that_share_an_input_are_all_named() -> None:
    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.q, self.k = nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2)

        def forward(self, value: Tensor) -> Tensor:
            value = self.first(value)
            return self.q(value) + Plant.apply(self.k(value), True)

    model = nn.Sequential(Shared())
    with watch_nonfinite(model) as watch:
        model(torch.ones(2)).sum().backward()
    assert watch.backward == "0.q or 0.k"
    assert nonfinite_gradients(model) == ["0.first.weight", "0.first.bias", "0.k.weight", "0.k.bias"]
    assert nonfinite_weights(model) == []


def test_a_saved_step_gives_its_batches_again() -> None:
    ids = [np.arange(1, n) for n in (4, 6, 3)]
    held = [SavedDocument(part, np.ones(len(part), dtype=np.uint8)) for part in ids]
    saved = ReplayLoader(held, [(0, [2, 0]), (2, [1])], 5, [BatchShape(8, 3)])
    batches = list(saved.micro_batches(0))
    assert [row for row, _ in batches] == [0, 2]
    assert [batch.documents.tolist() for _, batch in batches] == [[2, 0], [1]]
    assert batches[0][1].tokens.tolist() == [1, 2, 1, 2, 3, 0, 0, 0]
    totals = saved.totals(0)
    assert (totals.conversations, totals.tokens, totals.supervised) == (3, 10, 7)
    assert totals.lengths.tolist() == [2, 3, 5]
    twice = ReplayLoader(held, [(0, [2, 2])], 5, []).totals(0)
    assert (twice.conversations, twice.tokens, twice.supervised) == (2, 4, 2)
    assert [(row, batch.documents.tolist()) for row, batch in saved.single_document_batches(0, None)] == [
        (0, [2]),
        (0, [0]),
        (2, [1]),
    ]
