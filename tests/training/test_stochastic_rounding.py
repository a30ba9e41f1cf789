"""Stochastic rounding: right on average, still where nothing has to be rounded."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from whet.training.optimizers.adamw import AdamW
from whet.training.optimizers.state_precision import RoundingGenerators, stochastic_round

CPU = torch.device("cpu")


def chance(step: int = 1) -> torch.Generator:
    return RoundingGenerators(0).generator(step, 0, CPU)


@given(bits=st.lists(st.integers(0, 2**16 - 1), min_size=1, max_size=50))
def test_a_bf16_value_is_never_rounded_away(bits: list[int]) -> None:
    """All bit patterns: zeros, infinities, subnormal numbers and the NaNs too."""
    exact = torch.tensor(bits, dtype=torch.int32).sub(2**15).to(torch.int16).view(torch.bfloat16)
    torch.testing.assert_close(stochastic_round(exact.float(), chance()), exact, rtol=0, atol=0, equal_nan=True)


@given(
    values=st.lists(st.floats(width=32, min_value=-(2.0**100), max_value=2.0**100), min_size=1), step=st.integers(1, 9)
)
def test_it_rounds_to_a_neighbour(values: list[float], step: int) -> None:
    """bf16 is the upper half of fp32, so cutting off gives the neighbour towards zero, one more the other."""
    exact = torch.tensor(values)
    inner = (exact.view(torch.int32) >> 16).to(torch.int16)
    found = stochastic_round(exact, chance(step)).view(torch.int16)
    assert torch.all((found == inner) | (found == inner + 1))


def test_the_mean_is_the_number() -> None:
    for value in (1.0 + 2**-9, -3.00001, 1e-20, 7.77e5):
        many = torch.full((400_000,), value)
        found = stochastic_round(many, chance()).double()
        gap = found.max() - found.min()
        assert 0 < gap <= abs(value) * 2**-7
        assert abs(found.mean() - many[0].double()) < 4 * gap / 2 / 400_000**0.5


def test_a_nan_with_any_payload_stays_a_nan() -> None:
    bits = torch.tensor([0x7F800001, 0x7FFFFFFF, 0x7FC00000, -1, -0x7FFFFF], dtype=torch.int32)
    for step in range(20):
        assert stochastic_round(bits.view(torch.float32), chance(step)).isnan().all()


def test_chance_depends_on_seed_step_and_weight_and_on_nothing_else() -> None:
    values = torch.rand(1000)

    def rounded(seed: int, step: int, number: int) -> torch.Tensor:
        return stochastic_round(values, RoundingGenerators(seed).generator(step, number, CPU))

    assert torch.equal(rounded(1, 2, 3), rounded(1, 2, 3))
    for other in ((0, 2, 3), (1, 3, 3), (1, 2, 4)):
        assert not torch.equal(rounded(1, 2, 3), rounded(*other))


@pytest.mark.parametrize("bits", [32, 16, 8])
def test_bf16_weights_learn_at_a_rate_at_which_nearest_rounding_stands_still(bits: int) -> None:
    """100 steps of 1e-3 from 1.0, where bf16 has a gap of 4e-3 below and 8e-3 above."""
    weight = nn.Parameter(torch.ones(64, 64, dtype=torch.bfloat16))
    still = nn.Parameter(weight.detach().clone())
    groups = [{"name": "matrices", "params": [weight]}]
    ours = AdamW(groups, lr=1e-3, betas=(0.9, 0.95), eps=1e-8, seed=0, bits=bits)
    plain = torch.optim.AdamW([still], lr=1e-3, betas=(0.9, 0.95), weight_decay=0.0)
    for _ in range(100):
        for each, optimizer in ((weight, ours), (still, plain)):
            each.grad = torch.ones_like(each)
            optimizer.step()
    assert torch.equal(still, torch.ones_like(still))
    assert weight.float().mean().item() == pytest.approx(0.9, abs=1e-3)
