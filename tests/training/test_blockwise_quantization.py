"""Numbers in 8 bits: how far off they may be."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from whet.training.optimizers.state_precision import code_table, dequantize_blockwise, quantize_blockwise

CPU = torch.device("cpu")
FLOATS = st.floats(-1e6, 1e6, width=32, allow_subnormal=False)
SHAPES = st.sampled_from([(1, 1), (3, 5), (2, 256), (2, 300), (2, 3, 513)])


def made(shape: tuple[int, ...], spread: float, seed: int) -> torch.Tensor:
    """Numbers over many powers of ten, some of them zero."""
    draw = torch.Generator().manual_seed(seed)
    values = torch.randn(shape, generator=draw) * 10 ** (spread * torch.randn(shape, generator=draw))
    return values * (torch.rand(shape, generator=draw) > 0.1)


@pytest.mark.parametrize("signed", [True, False])
def test_the_table_has_256_numbers_with_zero_and_one(signed: bool) -> None:
    known = code_table(signed, CPU)
    assert len(known.unique()) == 256
    assert torch.equal(known, known.sort().values)
    assert {0.0, 1.0} <= set(known.tolist())
    assert known[0] == pytest.approx(-1 + 0.9 / 128 if signed else 0)


@given(shape=SHAPES, spread=st.floats(0, 3), seed=st.integers(0, 1000), signed=st.booleans())
def test_the_error_is_half_a_gap_of_the_power_of_ten(
    shape: tuple[int, ...], spread: float, seed: int, signed: bool
) -> None:
    values = made(shape, spread, seed)
    values = values if signed else values.abs()
    codes, scales = quantize_blockwise(values, signed)
    assert (codes.shape, codes.dtype) == (values.shape, torch.uint8)
    found = dequantize_blockwise(codes, scales, signed)
    for row, got in zip(values.flatten(0, -2).tolist(), found.flatten(0, -2).tolist(), strict=True):
        for start in range(0, len(row), 256):
            block, largest = row[start : start + 256], max(map(abs, row[start : start + 256]))
            for value, near in zip(block, got[start : start + 256], strict=True):
                assert abs(value - near) <= allowed(abs(value) / largest if largest else 0, signed) * largest * 1.0001


def allowed(part: float, signed: bool) -> float:
    decade = min(6, max(0, math.floor(-math.log10(part)))) if part > 0 else 6
    count = 2 ** (6 - decade) * (1 if signed else 2)
    below = 0.325e-6 if part < 1e-7 else 0.0  # towards the smallest there is
    return max(0.45 * 10.0**-decade / count, below)


@given(values=st.lists(FLOATS, min_size=1, max_size=40))
def test_the_largest_and_zero_come_back_and_a_square_never_becomes_zero(values: list[float]) -> None:
    exact = torch.tensor([values]).abs()
    found = dequantize_blockwise(*quantize_blockwise(exact, False), False)
    assert torch.equal(found == 0, exact == 0)
    assert found.max() == exact.max()


def test_a_weight_cut_by_rows_is_encoded_as_the_whole() -> None:
    values = made((6, 700), 2.0, 0)
    whole = quantize_blockwise(values, True)
    for rows in (slice(0, 1), slice(1, 4), slice(4, 6)):
        part = quantize_blockwise(values[rows], True)
        assert torch.equal(part[0], whole[0][rows])
        assert torch.equal(part[1], whole[1][rows])
