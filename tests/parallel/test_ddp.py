"""Data parallelism: gradients are summed over ranks, never averaged, for all dtypes and sizes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from whet.checkpoint.load import optimizer_tensors
from whet.core.distributed import Ranks
from whet.parallel import ddp
from whet.parallel.ddp import accumulate_in_fp32, all_reduce_gradients, broadcast_weights, trainable_parameters
from whet.training.config import OptimizerConfig
from whet.training.optimizers.factory import build_optimizer, optimizer_step


@dataclass
class IdenticalRanks:
    """A world in which all ranks have the same values; it remembers what was sent."""

    world_size: int
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    users: Tensor | None = None
    """How many ranks have each gradient, if not all are like this one."""
    sent: list[Tensor] = field(default_factory=list)

    def all_reduce_(self, tensor: Tensor) -> Tensor:
        if not self.sent:  # the first message: which parameters have a gradient
            self.sent.append(tensor.clone())
            return tensor.mul_(self.world_size) if self.users is None else tensor.copy_(self.users)
        self.sent.append(tensor.clone())
        return tensor.mul_(self.world_size)

    def broadcast_(self, tensor: Tensor) -> None:
        self.sent.append(tensor)


def make_model() -> nn.Sequential:
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 5).double(), nn.Linear(5, 2).double(), nn.Linear(2, 2))
    model[1].weight.requires_grad_(False)
    for number, parameter in enumerate(trainable_parameters(model), 1):
        parameter.grad = torch.full_like(parameter, number)
    return model


@pytest.mark.parametrize("bucket_bytes", [1, 100, 2**20])
def test_each_gradient_becomes_the_sum_over_the_ranks(bucket_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ddp, "_BUCKET_BYTES", bucket_bytes)
    model, ranks = make_model(), IdenticalRanks(3)
    all_reduce_gradients(trainable_parameters(model), ranks)  # type: ignore[arg-type]
    for number, parameter in enumerate(trainable_parameters(model), 1):
        assert parameter.grad is not None
        assert torch.equal(parameter.grad, torch.full_like(parameter, 3 * number))
    assert model[1].weight.grad is None
    assert all(tensor.nbytes <= max(bucket_bytes, 80) for tensor in ranks.sent[1:])
    if bucket_bytes == 2**20:  # one message for each change of type, not one for each weight
        assert [tensor.dtype for tensor in ranks.sent[1:]] == [torch.float32, torch.float64, torch.float32]


def test_a_rank_without_a_gradient_contributes_zero_if_another_has_one() -> None:
    model = make_model()
    parameters = trainable_parameters(model)
    model[0].bias.grad = model[3].bias.grad = None
    users = torch.tensor([2.0, 1, 2, 2, 2, 2, 0])
    ranks = IdenticalRanks(2, users=users)
    all_reduce_gradients(parameters, ranks)  # type: ignore[arg-type]
    assert sum(tensor.numel() for tensor in ranks.sent[1:]) == sum(parameter.numel() for parameter in parameters)
    assert torch.equal(model[0].bias.grad, torch.zeros(4))
    assert model[3].bias.grad is None


@pytest.mark.parametrize("name", ["adamw", "adamw16bit", "adamw8bit", "muon"])
@pytest.mark.parametrize("many", [False, True], ids=["one rank", "many ranks"])
def test_a_weight_without_a_gradient_is_left_alone(name: Any, many: bool) -> None:
    """As torch's optimizers do: neither decayed, nor moved by momentum, nor counted; and saved all the same."""
    torch.manual_seed(0)
    model = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)])  # used, at times, never
    optimizer = build_optimizer(model, OptimizerConfig(name=name, lr=0.1, weight_decay=0.1), seed=0)
    for group in optimizer.param_groups:
        group["lr"] = group["highest"]
    before = [[weight.detach().clone() for weight in layer.parameters()] for layer in model]
    for used in ([0, 1], [0]):
        for number, layer in enumerate(model):
            for weight in layer.parameters():
                weight.grad = torch.ones_like(weight) if number in used else None
        held = [weight.detach().clone() for weight in model[1].parameters()]
        ranks: Any = IdenticalRanks(3) if many else Ranks(0, 1, torch.device("cpu"))
        all_reduce_gradients(trainable_parameters(model), ranks)
        optimizer_step(optimizer, 0.5)
    assert all(map(torch.equal, held, model[1].parameters()))
    assert all(map(torch.equal, before[2], model[2].parameters()))
    assert not any(map(torch.equal, before[0], model[0].parameters()))
    saved = optimizer_tensors(model, optimizer)
    steps = [int(saved[f"optimizer.{number}.{key}.step"]) for number in range(3) for key in ("weight", "bias")]
    assert steps == [2, 2, 1, 1, 0, 0]
    assert all(map(torch.equal, before[2], model[2].parameters()))


def test_gradients_of_bf16_weights_accumulate_in_fp32() -> None:
    torch.manual_seed(0)
    model = nn.Linear(8, 4, bias=False).bfloat16()
    accumulate_in_fp32(model)
    inputs = torch.randn(300, 1, 8).bfloat16()
    exact = torch.zeros(4, 8, dtype=torch.float64)
    for one in inputs:
        model(one).float().sum().backward()
        exact += one.double().expand(4, -1)
    assert model.weight.grad is not None
    assert model.weight.grad.dtype == torch.float32
    assert (model.weight.grad - exact).norm() <= 1e-3 * exact.norm()
    model.weight.grad = None
    all_reduce_gradients(trainable_parameters(model), IdenticalRanks(2, users=torch.ones(1)))  # type: ignore[arg-type]
    assert model.weight.grad.dtype == torch.float32


def test_one_rank_sends_nothing_and_keeps_its_gradients() -> None:
    model = make_model()
    before = [parameter.grad for parameter in trainable_parameters(model)]
    all_reduce_gradients(trainable_parameters(model), Ranks(0, 1, torch.device("cpu")))
    assert all(a is b for a, b in zip(before, (p.grad for p in trainable_parameters(model)), strict=True))


def test_trainable_weights_are_broadcast_from_rank_0() -> None:
    model, ranks = make_model(), IdenticalRanks(2)
    broadcast_weights(model, ranks)  # type: ignore[arg-type]
    sent: list[Any] = [id(tensor) for tensor in ranks.sent]
    assert sent == [id(parameter) for parameter in trainable_parameters(model)]
