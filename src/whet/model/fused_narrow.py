"""Several small matrices multiplied by a number each and rounded to 16 bits by one Triton kernel.

The device takes longer to begin with one of them than to do all.
"""

from __future__ import annotations

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 1024
_MOST = 6


@triton.jit
def _one(at, factor, to_at, count, program, block: tl.constexpr):  # type: ignore[no-untyped-def]
    place = program * block + tl.arange(0, block)
    known = place < count
    number = tl.load(at + place, mask=known, other=0.0).to(tl.float32) * factor
    tl.store(to_at + place, number.to(to_at.dtype.element_ty), mask=known)


@triton.jit
def _all(  # type: ignore[no-untyped-def]
    at_0, at_1, at_2, at_3, at_4, at_5, factor_0, factor_1, factor_2, factor_3, factor_4, factor_5,
    to_0, to_1, to_2, to_3, to_4, to_5, count_0, count_1, count_2, count_3, count_4, count_5, block: tl.constexpr,
):  # fmt: skip
    """A row of programs for each matrix; those of shorter ones find nothing to do."""
    program, which = tl.program_id(0), tl.program_id(1)
    if which == 0:
        _one(at_0, factor_0, to_0, count_0, program, block)
    elif which == 1:
        _one(at_1, factor_1, to_1, count_1, program, block)
    elif which == 2:
        _one(at_2, factor_2, to_2, count_2, program, block)
    elif which == 3:
        _one(at_3, factor_3, to_3, count_3, program, block)
    elif which == 4:
        _one(at_4, factor_4, to_4, count_4, program, block)
    else:
        _one(at_5, factor_5, to_5, count_5, program, block)


def narrow(jobs: Sequence[tuple[Tensor, float, Tensor]]) -> None:
    """Of each: a matrix, its factor, and where to; targets are contiguous and of the same size."""
    for start in range(0, len(jobs), _MOST):
        some = jobs[start : start + _MOST]
        given, factors, targets = zip(*(some[min(number, len(some) - 1)] for number in range(_MOST)), strict=True)
        matrices, counts = [matrix.contiguous() for matrix in given], [matrix.numel() for matrix in given]
        _all[(triton.cdiv(max(counts), _BLOCK), len(some))](
            *matrices, *map(float, factors), *targets, *counts, block=_BLOCK, num_warps=4
        )
