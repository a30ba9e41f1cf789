"""Sorting of tokens by expert, and matrix products of each expert's rows with its own matrix.

Every token goes to K experts, so there are S = T · K rows. Sorted by expert, the rows of each are contiguous, and one
grouped product multiplies all of them. The definition is a loop over the experts; on CUDA bf16 products are torch's
grouped matrix products, which do not read the numbers of rows on the host.

Shape letters: T tokens, K experts of a token, S sorted rows, G experts (groups), I and O features, R rank.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from whet.compat.torch_private import grouped_mm


class SortedRows(NamedTuple):
    """The rows of a batch in the order of their experts; rows of an expert are in the order of tokens."""

    order: Tensor
    """[S] int32: which of the T · K choices, token by token, each sorted row is."""
    inverse: Tensor
    """[S] int32: the sorted row of each choice."""
    ends: Tensor
    """[G] int32: where the rows of each expert end."""


def sort_by_expert(index: Tensor, experts: int) -> SortedRows:
    """`index` [T, K] holds the experts of each token. Does not synchronise with the device."""
    flat = index.reshape(-1).to(torch.int16)  # a radix sort takes a pass for each byte
    by_expert, order = torch.sort(flat, stable=True)
    inverse = torch.empty_like(order, dtype=torch.int32)
    inverse[order] = torch.arange(len(flat), device=flat.device, dtype=torch.int32)
    each = torch.arange(experts, device=flat.device, dtype=flat.dtype)
    ends = torch.searchsorted(by_expert, each, right=True, out_int32=True)
    return SortedRows(order.int(), inverse, ends)


def grouped_product(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """x [S, I] · weight [G, I, O], each row with the matrix of its expert → [S, O]."""
    if _has_grouped_kernel(x):
        return grouped_mm(x, weight, ends)
    y = x.new_empty(len(x), weight.shape[2])
    for expert, rows in _rows_of_experts(ends):
        torch.mm(x[rows], weight[expert], out=y[rows])
    return y


def grouped_outer(left: Tensor, right: Tensor, ends: Tensor) -> Tensor:
    """The sum over each expert's rows of left [S, I] ⊗ right [S, O] → [G, I, O], zero for an expert without rows."""
    if _has_grouped_kernel(left):
        return grouped_mm(left.T, right, ends)
    y = left.new_zeros(len(ends), left.shape[1], right.shape[1])
    for expert, rows in _rows_of_experts(ends):
        torch.mm(left[rows].T, right[rows], out=y[expert])
    return y


def _has_grouped_kernel(x: Tensor) -> bool:
    return x.is_cuda and x.dtype == torch.bfloat16


def _rows_of_experts(ends: Tensor) -> Iterator[tuple[int, slice]]:
    """Experts that have rows. Waits for the device."""
    start = 0
    for expert, end in enumerate(ends.tolist()):
        if end > start:
            yield expert, slice(start, end)
        start = end
