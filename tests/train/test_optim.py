"""Which weights are pulled towards zero."""

from __future__ import annotations

import torch
from torch import nn

from whet.train.config import OptimizerConfig
from whet.train.optim import make_optimizer, set_rates


def test_decay_pulls_matrices_and_spares_vectors() -> None:
    model = nn.Sequential(nn.Embedding(3, 4), nn.Linear(4, 5), nn.LayerNorm(5))
    optimizer = make_optimizer(model, OptimizerConfig(lr=0.5, weight_decay=0.1, betas=(0.8, 0.9), eps=1e-6))
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    for name, parameter in model.named_parameters():
        pulled = 1 - 0.5 * 0.1 if parameter.ndim == 2 else 1
        torch.testing.assert_close(parameter.detach(), before[name] * pulled)
    assert {(group["betas"], group["eps"]) for group in optimizer.param_groups} == {((0.8, 0.9), 1e-6)}


def test_frozen_weights_are_left_out_and_an_empty_group_too() -> None:
    model = nn.Linear(2, 3)
    model.bias.requires_grad_(False)
    optimizer = make_optimizer(model, OptimizerConfig())
    assert [[*group["params"]] for group in optimizer.param_groups] == [[model.weight]]


def test_the_rate_is_set_for_every_group() -> None:
    optimizer = make_optimizer(nn.Linear(2, 3), OptimizerConfig(lr=1.0))
    assert set_rates(optimizer, 0.25) == {"lr": 0.25}
    assert [group["lr"] for group in optimizer.param_groups] == [0.25, 0.25]
