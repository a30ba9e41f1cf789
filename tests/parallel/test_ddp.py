"""Data parallelism: gradients are summed over ranks, never averaged, for all dtypes and sizes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from whet.core.distributed import Ranks
from whet.parallel import ddp
from whet.parallel.ddp import accumulate_in_fp32, all_reduce_gradients, broadcast_weights, trainable_parameters


@dataclass
class IdenticalRanks:
    """A world in which all ranks have the same values; it remembers what was sent."""

    world_size: int
    sent: list[Tensor] = field(default_factory=list)

    def all_reduce_(self, tensor: Tensor) -> Tensor:
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
    assert all(tensor.nbytes <= max(bucket_bytes, 80) for tensor in ranks.sent)
    if bucket_bytes == 2**20:  # one message for each change of type, not one for each weight
        assert [tensor.dtype for tensor in ranks.sent] == [torch.float32, torch.float64, torch.float32]


def test_a_rank_without_a_gradient_contributes_zero() -> None:
    model, ranks = make_model(), IdenticalRanks(2)
    model[0].bias.grad = None
    all_reduce_gradients(trainable_parameters(model), ranks)  # type: ignore[arg-type]
    assert sum(tensor.numel() for tensor in ranks.sent) == sum(
        parameter.numel() for parameter in trainable_parameters(model)
    )
    assert torch.equal(model[0].bias.grad, torch.zeros(4))


def test_an_unused_weight_is_updated_alike_by_one_rank_and_by_many() -> None:
    """To an optimizer with weight decay or momentum, no gradient and a gradient of zero are different."""
    ends = []
    for ranks in (Ranks(0, 1, torch.device("cpu")), IdenticalRanks(3)):
        torch.manual_seed(0)
        model = make_model()
        optimizer = torch.optim.AdamW(trainable_parameters(model), lr=0.1, weight_decay=0.1)
        for touched in (True, False, False):
            if not touched:
                model[0].bias.grad = None
            all_reduce_gradients(trainable_parameters(model), ranks)  # type: ignore[arg-type]
            optimizer.step()
        ends.append(model[0].bias.detach().clone())
    assert torch.allclose(*ends, rtol=0, atol=1e-6)  # AdamW does not see that three ranks have three times as much


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
    all_reduce_gradients(trainable_parameters(model), Ranks(0, 1, torch.device("cpu")))
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
