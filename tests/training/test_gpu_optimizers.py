"""Optimizers on the device: as on the CPU, as torch's, and without waiting for it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from whet.core.distributed import Ranks
from whet.training.config import OptimizerConfig
from whet.training.optimizers.factory import (
    apply_gradients,
    build_optimizer,
    decides_on_device,
    optimizer_step,
    retract_step,
)
from whet.training.optimizers.state_precision import (
    RoundingGenerators,
    dequantize_blockwise,
    quantize_blockwise,
    stochastic_round,
)
from whet.training.step import squared_gradient_norm

pytestmark = pytest.mark.gpu
NAMES = ["adamw", "adamw16bit", "adamw8bit", "muon"]


def network(dtype: torch.dtype, device: str) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(96, 300), nn.Linear(300, 64)).to(device, dtype)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
    set_gradients(model, number)
    optimizer.step()


def set_gradients(model: nn.Module, number: int) -> None:
    draw = torch.Generator().manual_seed(number)
    for weight in model.parameters():
        weight.grad = torch.randn(weight.shape, generator=draw).to(weight)


@pytest.fixture
def no_waiting() -> Iterator[None]:
    before = torch.cuda.get_sync_debug_mode()
    yield
    torch.cuda.set_sync_debug_mode(before)


@pytest.mark.parametrize(
    ("name", "bound"), [("adamw", 1e-5), ("adamw16bit", 0.05), ("adamw8bit", 0.01), ("muon", 0.03)]
)
def test_updates_are_those_of_the_cpu(name: Any, bound: float) -> None:
    start, ends = network(torch.float32, "cpu"), []
    for device in ("cpu", "cuda"):
        model = network(torch.float32, device)
        optimizer = build_optimizer(model, OptimizerConfig(name=name, lr=1e-2), 0)
        for number in range(5):
            step(model, optimizer, number)
        ends.append([weight.detach().cpu() for weight in model.parameters()])
    for begin, one, other in zip(start.parameters(), *ends, strict=True):
        assert ((one - other).norm() / (one - begin).norm()).item() < bound


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", NAMES)
def test_a_step_never_waits_for_the_device(name: Any, dtype: torch.dtype, no_waiting: None) -> None:
    model = network(dtype, "cuda")
    optimizer = build_optimizer(model, OptimizerConfig(name=name), 0)
    step(model, optimizer, 0)
    torch.cuda.set_sync_debug_mode("error")
    optimizer.step()


@pytest.mark.parametrize("name", NAMES)
def test_a_repetition_is_exact(name: Any) -> None:
    ends = []
    for _ in range(2):
        model = network(torch.bfloat16, "cuda")
        optimizer = build_optimizer(model, OptimizerConfig(name=name, lr=1e-3), 3)
        for number in range(3):
            step(model, optimizer, number)
        ends.append([weight.detach().clone() for weight in model.parameters()])
    for one, other in zip(*ends, strict=True):
        assert torch.equal(one, other)


EARLY = [(name, dtype) for name in ("adamw", "adamw16bit") for dtype in (torch.float32, torch.bfloat16)]


@pytest.mark.parametrize(("name", "dtype"), EARLY, ids=str)
@pytest.mark.parametrize("factor", [1.0, 0.3], ids=["whole", "clipped"])
def test_an_update_decided_on_the_device_is_the_same(
    name: Any, dtype: torch.dtype, factor: float, no_waiting: None
) -> None:
    ends = []
    for early in (False, True):
        model = network(dtype, "cuda")
        optimizer = build_optimizer(model, OptimizerConfig(name=name, lr=1e-2), 0)
        for number in range(4):
            set_gradients(model, number)
            if not early:
                if number != 2:
                    optimizer_step(optimizer, factor)
                continue
            numbers = torch.tensor([math.nan if number == 2 else factor, number != 2], dtype=torch.float64).cuda()
            assert decides_on_device(optimizer)
            torch.cuda.set_sync_debug_mode("error")
            apply_gradients(optimizer, numbers[0], numbers[1])
            torch.cuda.set_sync_debug_mode("default")
            if number == 2:
                retract_step(optimizer)
        states = [value for state in optimizer.state.values() for value in state.values()]
        ends.append([value.detach().cpu() for value in (*model.parameters(), *states)])
    assert len(ends[0]) == 16
    for one, other in zip(*ends, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("name", ["adamw8bit", "muon"])
def test_these_optimizers_need_the_numbers_on_the_host(name: Any) -> None:
    assert not decides_on_device(build_optimizer(network(torch.bfloat16, "cuda"), OptimizerConfig(name=name), 0))
    assert not decides_on_device(build_optimizer(network(torch.float32, "cpu"), OptimizerConfig(), 0))


@pytest.mark.parametrize("name", ["adamw8bit", "muon"])
def test_an_update_that_waits_for_the_host_is_the_same(name: Any) -> None:
    ends = []
    for on_device in (False, True):
        model = network(torch.bfloat16, "cuda")
        optimizer = build_optimizer(model, OptimizerConfig(name=name, lr=1e-2), 0)
        for number in range(3):
            set_gradients(model, number)
            if on_device:
                numbers = torch.tensor([0.3, number != 1], dtype=torch.float64).cuda()
                apply_gradients(optimizer, numbers[0], numbers[1])
            elif number != 1:
                optimizer_step(optimizer, 0.3)
        ends.append([weight.detach().cpu() for weight in model.parameters()])
    for one, other in zip(*ends, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_the_gradient_norm_is_summed_in_fp32(dtype: torch.dtype) -> None:
    parameters = [nn.Parameter(torch.zeros(size, device="cuda", dtype=dtype)) for size in (1, 16385, 3_000_000, 0, 77)]
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter)
    ranks = Ranks(0, 1, torch.device("cuda", 0))
    wanted = sum(parameter.grad.double().square().sum() for parameter in parameters)
    torch.testing.assert_close(squared_gradient_norm(parameters, ranks), wanted, rtol=1e-5, atol=0)
    parameters[2].grad[2_999_999] = math.nan
    assert squared_gradient_norm(parameters, ranks).isnan()


def test_muon_is_torchs_muon() -> None:
    """Both iterate in bf16 here, and round it in other places."""
    mine, theirs, start = (nn.Parameter(network(torch.float32, "cuda")[0].weight.detach().clone()) for _ in range(3))
    model = nn.ParameterList([mine])
    config = OptimizerConfig(name="muon", lr=1e-2, weight_decay=0.1, momentum=0.9, momentum_warmup=0)
    ours = build_optimizer(model, config, 0)
    reference = torch.optim.Muon([theirs], lr=1e-2, weight_decay=0.1, momentum=0.9, adjust_lr_fn="match_rms_adamw")
    for number in range(5):
        step(model, ours, number)
        step(nn.ParameterList([theirs]), reference, number)
    assert ((mine - theirs).norm() / (theirs - start).norm()).item() < 0.03


def test_eight_bits_are_the_same_on_both_devices() -> None:
    values = torch.randn(64, 700) * 10 ** torch.randn(64, 700)
    here, there = quantize_blockwise(values, True), quantize_blockwise(values.cuda(), True)
    assert (here[0] != there[0].cpu()).sum() <= 2, "a division may round otherwise, exactly between two codes"
    torch.testing.assert_close(
        dequantize_blockwise(*there, True).cpu(), dequantize_blockwise(*here, True), rtol=0.2, atol=0
    )


def test_stochastic_rounding_is_unbiased() -> None:
    many = torch.full((400_000,), 1.0 + 2**-9, device="cuda")
    found = stochastic_round(many, RoundingGenerators(0).generator(1, 0, many.device)).double()
    assert found.mean().item() == pytest.approx(1.0 + 2**-9, abs=4 * 2**-7 / 2 / 400_000**0.5)
