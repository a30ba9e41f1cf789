"""The Triton kernels of experts against their definition in fp64, in Triton's interpreter where there is no GPU."""

from __future__ import annotations

import sys
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from whet.model.experts import steps as definition
from whet.model.experts.steps import Activation, GatedSilu, SortedRows, sort_by_expert

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SWIGLU, CLAMPED = GatedSilu(False, 1.0, float("inf"), 0.0), GatedSilu(True, 1.702, 0.8, 1.0)
# tokens, choices, experts, hidden, intermediate, rank of up, of down, activation: tiles that are full and not, experts
# without rows, ranks below 16 and above, none
SHAPES = [
    (40, 2, 3, 128, 64, 16, 16, SWIGLU),
    (70, 4, 9, 130, 70, 3, 20, CLAMPED),
    (5, 1, 4, 40, 90, 0, 8, SWIGLU),
    (90, 3, 5, 300, 48, 8, 0, CLAMPED),
]
BOUND = 0.01
"""Of the norm: inputs of products are rounded to 8 bits."""


class Adapter(NamedTuple):
    a: Tensor
    b: Tensor


class Inputs(NamedTuple):
    rows: SortedRows
    choices: int
    x: Tensor
    d_out: Tensor
    weights: Tensor
    up0: Tensor
    d_h: Tensor
    y: Tensor
    xa: Tensor | None
    d_ha: Tensor | None
    up: Adapter | None
    down: Adapter | None


def draw(shape: tuple[Any, ...], dtype: torch.dtype) -> Inputs:
    tokens, choices, experts, hidden, width, up_rank, down_rank, _ = shape
    generator = torch.Generator().manual_seed(0)

    def drawn(*sizes: int) -> Tensor:
        return torch.randn(sizes, generator=generator).to(dtype).to(DEVICE)

    def adapter(rank: int, inputs: int, outputs: int) -> Adapter | None:
        return Adapter(drawn(experts, rank, inputs) / 8, drawn(experts, rank, outputs) / 4) if rank else None

    index = torch.stack([torch.randperm(experts, generator=generator)[:choices] for _ in range(tokens)])
    index[index == 1] = 0  # expert 1 gets no row, 0 some twice
    rows, count = sort_by_expert(index.to(DEVICE), experts), tokens * choices
    return Inputs(
        rows, choices, drawn(tokens, hidden), drawn(tokens, hidden), drawn(tokens, choices).float(),
        drawn(count, 2 * width), drawn(count, width), drawn(count, hidden),
        drawn(count, up_rank) if up_rank else None, drawn(count, down_rank) if down_rank else None,
        adapter(up_rank, hidden, 2 * width), adapter(down_rank, width, hidden),
    )  # fmt: skip


def compute(steps: Any, each: Inputs, gated: GatedSilu) -> list[Tensor | None]:
    """Every function of `steps`, each with the same inputs."""
    activation, rows = Activation(gated, gated), each.rows
    up_a, up_b = each.up or (None, None)
    down_a, down_b = each.down or (None, None)
    gathered = [
        *steps.gather_rows(each.x, rows, each.choices, up_a), *steps.gather_rows(each.d_out, rows, each.choices, down_b)
    ]  # fmt: skip
    weight = each.weights.reshape(-1)[rows.order]
    h, ha = steps.activate(each.up0, each.xa, up_b, down_a, rows, activation)
    found = steps.activate_backward(each.d_h, each.d_ha, weight, each.up0, each.xa, up_b, down_a, rows, activation)
    summed = [steps.sum_over_choices(each.y, weights, rows, each.choices) for weights in (None, each.weights)]
    added = steps.add_low_rank_(each.y.clone(), each.xa, up_a, rows)
    others: list[Tensor | None] = []
    if each.xa is not None and up_a is not None and up_b is not None:
        others = [
            steps.cast_a(up_a.flatten(0, 1), 0.7, len(rows.ends), up_a.dtype),
            steps.low_rank_outer(each.xa, each.x, rows, each.choices, 0.3),
            steps.low_rank_outer(each.xa, each.up0, rows, None, is_b=True),
            steps.cast_b(up_b.permute(2, 1, 0).flatten(1).contiguous(), len(rows.ends), up_b.dtype),
        ]
    return [*gathered, h, ha, *found, *summed, added, *others]


def exact(each: Inputs) -> Inputs:
    def double(value: Any) -> Any:
        if isinstance(value, Adapter):
            return Adapter(value.a.double(), value.b.double())
        return value.double() if isinstance(value, Tensor) else value

    return Inputs(*map(double, each))


def check(shape: tuple[Any, ...], dtype: torch.dtype) -> None:
    from whet.model.experts import kernels

    each = draw(shape, dtype)
    found, expected = compute(kernels, each, shape[-1]), compute(definition, exact(each), shape[-1])
    assert len(found) == len(expected)
    for number, (own, other) in enumerate(zip(found, expected, strict=True)):
        assert (own is None) == (other is None), number
        if own is not None and other is not None:
            assert own.shape == other.shape
            assert not own.isnan().any(), number
            assert (own.double() - other).norm() <= BOUND * other.norm() + 1e-6, number


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [*SHAPES, (4096, 8, 128, 2048, 768, 16, 16, SWIGLU)], ids=str)
def test_kernels_compute_what_is_defined(shape: tuple[Any, ...]) -> None:
    check(shape, torch.bfloat16)


def test_kernels_compute_what_is_defined_in_tritons_interpreter(in_tritons_interpreter: Any) -> None:
    """In fp16, because the interpreter (of Triton 3.6) multiplies the bits of bf16 numbers."""
    assert in_tritons_interpreter(__file__, "check_all()").split() == [str(len(SHAPES))]


def check_all() -> None:
    """Says how many cases were right."""
    sys.stdout.write(f"{len([check(shape, torch.float16) for shape in SHAPES])}\n")
