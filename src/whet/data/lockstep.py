"""Packing inside steps: each step's documents by themselves, all steps at once.

A loop over steps in Python takes minutes for 10 million conversations; here the n-th longest document of every step
is placed at the same time, and the same 10 million take seconds.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from whet.data.pack import Packing, check, edges_of, index_type, k_bin, none

if TYPE_CHECKING:
    from numpy.typing import NDArray

_BLOCK = 1 << 17  # documents at a time: the matrices stay in the cache


def pack_each(lengths: NDArray[np.integer], batch: int, capacity: int, packing: str, bins: int) -> Packing:
    """Pack each `batch` consecutive documents by themselves; the rows of a step follow each other."""
    if packing == "none":
        return none(lengths, capacity)
    return k_bin(lengths, capacity, bins, batch) if packing == "k-bin" else best_fit_each(lengths, batch, capacity)


def best_fit_each(lengths: NDArray[np.integer], batch: int, capacity: int) -> Packing:
    """For each step the rows that `best_fit` gives, which are those of First-Fit-Decreasing."""
    check(lengths, capacity)
    order = np.empty(len(lengths), dtype=index_type(len(lengths)))
    counts = [np.empty(0, dtype=order.dtype)]
    block = max(1, _BLOCK // batch) * batch
    for start in range(0, len(lengths), block):
        sizes = lengths[start : start + block]
        documents = len(sizes)
        missing = -documents % batch
        if missing:  # the last step: empty documents, which come last, take no room and are removed again
            sizes = np.concatenate([sizes, np.zeros(missing, sizes.dtype)])
        placed, row = _first_fit_decreasing(sizes.reshape(-1, batch), capacity)
        real = placed < documents
        placed, row = placed[real], row[real]
        order[start : start + documents] = placed + start
        begins = np.flatnonzero(np.diff(row, prepend=-1, append=-1))
        counts.append(np.diff(begins).astype(order.dtype))
    return Packing(order, edges_of(np.concatenate(counts)))


def _first_fit_decreasing(sizes: NDArray[np.integer], capacity: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """`sizes` [steps, batch] → the flat numbers of the documents, row by row, and the row of each."""
    steps, batch = sizes.shape
    bits = (batch - 1).bit_length()
    mask = (1 << bits) - 1
    keys = (capacity - sizes.astype(np.int64)) << bits | np.arange(batch)  # all different: any sort is stable
    keys.sort(axis=1)
    ordered = np.ascontiguousarray((capacity - (keys >> bits)).T)  # [batch, steps], longest first
    rooms = np.full((steps, batch), capacity, dtype=np.int64)
    flat, base = rooms.reshape(-1), np.arange(steps) * batch
    row = np.empty((batch, steps), dtype=np.int64)
    used = 1  # columns that can matter: one more than any step has begun
    for size, chosen in zip(ordered, row, strict=True):
        np.argmax(rooms[:, :used] >= size[:, None], axis=1, out=chosen)
        flat[base + chosen] -= size
        used = min(batch, max(used, int(chosen.max()) + 2))
    places = row.T << bits | np.arange(batch)
    places.sort(axis=1)
    numbers = np.take_along_axis(keys & mask, places & mask, axis=1) + base[:, None]
    return numbers.reshape(-1), ((places >> bits) + base[:, None]).reshape(-1)
