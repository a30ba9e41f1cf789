"""Muon against torch's own, whose iterations are in bf16 unless that is taken out; nanochat's against a reference."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from whet.training.config import OptimizerConfig
from whet.training.optimizers.factory import build_optimizer, set_learning_rates
from whet.training.optimizers.muon import Muon, newton_schulz, polar_express

SHAPES = [(6, 10), (10, 6), (8, 8), (2, 40)]


def muon(weights: list[nn.Parameter], name: str = "matrices", decay: float = 0.1, **changed: Any) -> Muon:
    groups = [{"name": name, "params": weights, "weight_decay": decay, "highest": 0.02}]
    options: dict[str, Any] = {"momentum": 0.9, "momentum_start": 0.9, "momentum_warmup": 0} | changed
    return Muon(groups, lr=0.02, betas=(0.9, 0.95), eps=1e-8, seed=0, **options)


def weights(dtype: torch.dtype) -> list[nn.Parameter]:
    torch.manual_seed(0)
    return [nn.Parameter(torch.randn(shape, dtype=dtype)) for shape in SHAPES]


def step(weights: list[nn.Parameter], optimizer: torch.optim.Optimizer, steps: int) -> None:
    """The gradients of step n are the same for everyone."""
    for number in range(steps):
        draw = torch.Generator().manual_seed(number)
        for weight in weights:
            weight.grad = torch.randn(weight.shape, generator=draw).to(weight.dtype)
        optimizer.step()


def both(dtype: torch.dtype) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    mine, theirs = weights(dtype), weights(dtype)
    step(mine, muon(mine), 6)
    reference = torch.optim.Muon(
        theirs, lr=0.02, weight_decay=0.1, momentum=0.9, nesterov=True, adjust_lr_fn="match_rms_adamw"
    )
    step(theirs, reference, 6)
    return mine, theirs


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-10), (torch.float32, 1e-4)])
def test_it_is_torchs_muon_without_bf16(dtype: torch.dtype, tolerance: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Tensor, "bfloat16", Tensor.clone)  # the one place where torch's leaves the type
    for one, other in zip(*both(dtype), strict=True):
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)


def test_it_is_torchs_muon_within_the_noise_of_bf16() -> None:
    start = weights(torch.float32)
    for begin, one, other in zip(start, *both(torch.float32), strict=True):
        assert ((one - other).norm() / (other - begin).norm()).item() < 0.02


@pytest.mark.parametrize("shape", [(20, 50), (50, 20), (3, 16, 24)])
def test_singular_values_end_around_one_and_directions_stay(shape: tuple[int, ...]) -> None:
    torch.manual_seed(1)
    matrix = torch.randn(shape, dtype=torch.float64)
    found = newton_schulz(matrix)
    left, _, right = torch.linalg.svd(matrix, full_matrices=False)
    inside = left.mT @ found @ right.mT
    values = inside.diagonal(dim1=-2, dim2=-1)
    assert values.min() > 0.65
    assert values.max() < 1.25
    torch.testing.assert_close(inside, torch.diag_embed(values), rtol=0, atol=1e-9)


def test_stacked_experts_are_matrices_of_their_own() -> None:
    torch.manual_seed(2)
    start = torch.randn(4, 6, 10, dtype=torch.float64)
    stacked, single = nn.Parameter(start.clone()), [nn.Parameter(each.clone()) for each in start]
    step([stacked], muon([stacked]), 1)
    optimizer = muon(single)
    for weight, gradient in zip(single, stacked.grad if stacked.grad is not None else [], strict=True):
        weight.grad = gradient
    optimizer.step()
    torch.testing.assert_close(stacked.detach(), torch.stack([weight.detach() for weight in single]))


@pytest.mark.parametrize(("name", "shape"), [("embedding", (9, 7)), ("scalars", (9,)), ("matrices", (9, 1, 4))])
def test_all_other_weights_are_updated_by_adamw(name: str, shape: tuple[int, ...]) -> None:
    torch.manual_seed(3)
    mine = nn.Parameter(torch.randn(shape, dtype=torch.float64))
    theirs = nn.Parameter(mine.detach().clone())
    step([mine], muon([mine], name), 5)
    step([theirs], torch.optim.AdamW([theirs], lr=0.02, betas=(0.9, 0.95), weight_decay=0.1), 5)
    torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-12)


def test_momentum_warms_up_linearly_and_is_reported() -> None:
    model = nn.Linear(4, 4, bias=False)
    config = OptimizerConfig(name="muon", momentum=0.9, momentum_start=0.5, momentum_warmup=4)
    optimizer = build_optimizer(model, config, 0)
    told = []
    for _ in range(6):
        told.append(set_learning_rates(optimizer, 1.0)["momentum"])
        step([model.weight], optimizer, 1)
    assert told == pytest.approx([0.5, 0.6, 0.7, 0.8, 0.9, 0.9])


def test_the_reported_momentum_is_the_one_used() -> None:
    changing, fixed = (nn.Parameter(torch.eye(4)) for _ in range(2))
    one = muon([changing], momentum=0.9, momentum_start=0.3, momentum_warmup=2)
    other = muon([fixed], momentum=0.3)
    step([changing], one, 1)
    step([fixed], other, 1)
    assert torch.equal(one.state[changing]["momentum"], other.state[fixed]["momentum"])
    step([changing], one, 1)
    expected = other.state[fixed]["momentum"].lerp(fixed.grad if fixed.grad is not None else fixed, 1 - 0.6)
    torch.testing.assert_close(one.state[changing]["momentum"], expected)


def test_a_gradient_of_zero_moves_nothing() -> None:
    """As that of an adapter's first matrix in the first step."""
    weight = nn.Parameter(torch.randn(4, 6))
    before = weight.detach().clone()
    weight.grad = torch.zeros_like(weight)
    muon([weight], decay=0.0).step()
    assert torch.equal(weight, before)


def test_it_learns() -> None:
    torch.manual_seed(4)
    model = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 4))
    teacher = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 4))
    optimizer = build_optimizer(model, OptimizerConfig(name="muon", lr=5e-3), 0)
    losses = []
    for number in range(150):
        set_learning_rates(optimizer, 1 - number / 150)
        inputs = torch.randn(32, 16)
        optimizer.zero_grad()
        loss = (model(inputs) - teacher(inputs).detach()).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert sum(losses[-10:]) < sum(losses[:10]) / 10


# nanochat's flavour.

NANOCHAT_SHAPES = [(6, 10), (10, 6), (8, 8), (2, 40), (1, 32)]
COEFFICIENTS = [  # arXiv:2505.16932, five iterations
    (8.156554524902461, -22.48329292557795, 15.878769915207462),
    (4.042929935166739, -2.808917465908714, 0.5000178451051316),
    (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
    (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
    (2.3465413258596377, -1.7097828382687081, 0.42323551169305323),
]


def nanochat_reference(start: Tensor, gradients: list[Tensor], rate: float, decay: float) -> Tensor:
    """One matrix, step by step, by singular values: an odd polynomial acts on each of them alone."""
    weight, mean, rows, columns = start.clone(), torch.zeros_like(start), *start.shape
    tall = rows >= columns
    second = torch.zeros(rows if tall else columns, dtype=start.dtype)
    for number, gradient in enumerate(gradients):
        momentum = 0.85 + (0.95 - 0.85) * min(number / 300, 1)
        mean = momentum * mean + (1 - momentum) * gradient
        left, values, right = torch.linalg.svd((1 - momentum) * gradient + momentum * mean, full_matrices=False)
        values = values / (1.02 * values.square().sum().sqrt() + 1e-6)
        for a, b, c in COEFFICIENTS:
            values = a * values + b * values**3 + c * values**5
        update = left @ torch.diag(values) @ right
        square = update.square().mean(1 if tall else 0)
        second = 0.95 * second + 0.05 * square
        evened = update / second.clamp(min=1e-10).sqrt().unsqueeze(1 if tall else 0)
        update = evened * update.norm() / evened.norm()
        step_size = rate * max(1, rows / columns) ** 0.5
        shrinking = (update * weight >= 0).to(weight.dtype)
        weight = weight - step_size * update - step_size * decay * shrinking * weight
    return weight


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-10), (torch.float32, 1e-4)])
def test_nanochats_flavour_is_the_reference(dtype: torch.dtype, tolerance: float) -> None:
    torch.manual_seed(0)
    mine = [nn.Parameter(torch.randn(shape, dtype=dtype)) for shape in NANOCHAT_SHAPES]
    starts = [weight.detach().double().clone() for weight in mine]
    step(mine, muon(mine, flavour="nanochat", momentum=0.95, momentum_start=0.85, momentum_warmup=300), 6)
    gradients: list[list[Tensor]] = [[] for _ in mine]
    for number in range(6):
        draw = torch.Generator().manual_seed(number)
        for each, weight in zip(gradients, mine, strict=True):
            each.append(torch.randn(weight.shape, generator=draw).double())
    for weight, start, each in zip(mine, starts, gradients, strict=True):
        expected = nanochat_reference(start, each, 0.02, 0.1)
        assert ((weight.double() - expected).norm() / (expected - start).norm()).item() < tolerance


def test_polar_express_reaches_smaller_singular_values() -> None:
    torch.manual_seed(1)
    left, right = (torch.linalg.qr(torch.randn(3, 20, 20, dtype=torch.float64))[0] for _ in range(2))
    matrix = left @ torch.diag(torch.logspace(-3, 0, 20, dtype=torch.float64)) @ right
    for found, least in ((polar_express(matrix), 0.6), (newton_schulz(matrix), 0.3)):
        values = torch.linalg.svdvals(found)
        assert least < values.min() < least + 0.1
        assert values.max() < 1.25


def test_nanochats_rates_and_decay_by_group() -> None:
    """Those of embeddings and head are for a width of 768; the scalars of layers have their own."""

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.wte, self.head, self.inner = nn.Embedding(9, 192), nn.Linear(192, 9, bias=False), nn.Linear(192, 4)
            self.values = nn.Embedding(9, 16)
            self.resid_lambdas, self.x0_lambdas = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))

        def get_input_embeddings(self) -> nn.Module:
            return self.wte

        def get_output_embeddings(self) -> nn.Module:
            return self.head

    config = OptimizerConfig(
        name="muon", flavour="nanochat", embedding_lr=0.3, head_lr=0.004, matrix_lr=0.02, scalar_lr=0.5,
        weight_decay=0.2, betas=(0.8, 0.95), eps=1e-10,
    )  # fmt: skip
    groups = {group["name"]: group for group in build_optimizer(Scaled(), config, 0).param_groups}
    assert {name: (len(each["params"]), each["highest"], each["weight_decay"]) for name, each in groups.items()} == {
        "embedding": (2, pytest.approx(0.6), 0.0), "head": (1, pytest.approx(0.008), 0.0), "matrices": (1, 0.02, 0.2),
        "scalars": (1, 0.5, 0.0), "resid_lambdas": (1, 0.005, 0.0), "x0_lambdas": (1, 0.5, 0.0),
    }  # fmt: skip
    assert {name: group["betas"] for name, group in groups.items() if group["betas"] != (0.8, 0.95)} == {
        "x0_lambdas": (0.96, 0.95)
    }
