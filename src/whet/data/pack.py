"""Packing: which documents share a row. A pure function of lengths."""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray


def best_fit(lengths: NDArray[np.integer], capacity: int) -> list[list[int]]:
    """Rows of document numbers: each row takes the longest document that still fits, again and again.

    Every document is in exactly one row, whole; a document as long as the row fits.
    """
    waiting: dict[int, list[int]] = defaultdict(list)
    for number in range(len(lengths) - 1, -1, -1):  # popped from the end: equal lengths keep their order
        waiting[int(lengths[number])].append(number)
    sizes = sorted(waiting)
    if sizes and sizes[-1] > capacity:
        raise ValueError(f"a document of {sizes[-1]} tokens does not fit a row of {capacity}")
    rows: list[list[int]] = []
    while sizes:
        row, room = [], capacity
        while (fitting := bisect_right(sizes, room)) > 0:
            size = sizes[fitting - 1]
            row.append(waiting[size].pop())
            room -= size
            if not waiting[size]:
                del sizes[fitting - 1]
        rows.append(row)
    return rows
