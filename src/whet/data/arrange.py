"""The order of rows inside a step: the heaviest first, so that ranks can be dealt equal work."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

LINEAR = 12_288
"""The length at which a document's attention costs as much as everything else. A layer of width d takes about 24 d²
operations a token in its matrices and 2 d · length in causal attention: equal at 12 d, here for d = 1024."""

_BLOCK = 1 << 16


def work(lengths: NDArray[np.integer]) -> NDArray[np.int64]:
    """What documents cost a model, in units of attention between two tokens."""
    wide = lengths.astype(np.int64)
    return wide * (wide + LINEAR)


def heaviest_first(works: NDArray[np.int64], steps: NDArray[np.integer]) -> NDArray[np.int64]:
    """The order of rows in which each step's descend in work; equal ones keep theirs. Step s has rows
    steps[s] to steps[s + 1]. Many steps are sorted at a time, few enough that the keys fit 64 bits."""
    order = np.empty(len(works), dtype=np.int64)
    first = 0
    while first < len(steps) - 1:
        last = max(first + 1, int(np.searchsorted(steps, steps[first] + _BLOCK, side="right")) - 1)
        begin, end = int(steps[first]), int(steps[last])
        mine = works[begin:end]
        step = np.repeat(np.arange(last - first), np.diff(steps[first : last + 1]))
        order[begin:end] = begin + np.argsort((step + 1) * (int(mine.max()) + 1) - mine, kind="stable")
        first = last
    return order


def gather_rows(
    documents: NDArray[np.integer], edges: NDArray[np.integer], chosen: NDArray[np.integer]
) -> tuple[NDArray[np.integer], NDArray[np.integer]]:
    """The documents of the chosen rows, one row after another, and their edges."""
    counts = np.diff(edges)[chosen]
    rows = np.zeros(len(chosen) + 1, dtype=edges.dtype)
    np.cumsum(counts, out=rows[1:])
    places = np.repeat(edges[:-1][chosen] - rows[:-1], counts)
    places += np.arange(len(places), dtype=places.dtype)
    return documents[places], rows
