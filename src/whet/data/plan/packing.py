"""Packing: which documents share a row, over a whole epoch or within each step. Pure functions of lengths.

Every document is in exactly one row and is never cut.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

_K_BIN_BLOCK = 1 << 16  # documents
_ROW_BITS = 32  # low bits of a sort key, for the row's number; its free space is above


@dataclass(frozen=True, slots=True)
class Packing:
    """Row r has the documents order[offsets[r]:offsets[r + 1]]."""

    order: NDArray[np.integer]
    offsets: NDArray[np.integer]

    def __len__(self) -> int:
        """The number of rows."""
        return len(self.offsets) - 1


def pack_rows(lengths: NDArray[np.integer], capacity: int, packing: str, bins: int) -> Packing:
    """Pack with the algorithm named by `data.packing`."""
    if packing == "none":
        return one_per_row(lengths, capacity)
    return k_bin(lengths, capacity, bins) if packing == "k-bin" else best_fit(lengths, capacity)


def one_per_row(lengths: NDArray[np.integer], capacity: int) -> Packing:
    """One document per row."""
    check_lengths(lengths, capacity)
    offsets = np.arange(len(lengths) + 1, dtype=index_dtype(len(lengths)))
    return Packing(offsets[:-1], offsets)


def best_fit(lengths: NDArray[np.integer], capacity: int) -> Packing:
    """Fill each row with the longest document that still fits; equal lengths keep their order.

    Where it gives fewer rows, close each row with the pair of documents that fills it best: 339 rows of 4096 for GSM8K
    instead of 340, which is optimal.

    The lengths in a row stay the same from row to row until one of them runs out, so a pattern is computed once and
    repeated. The work grows with the number of different lengths: 10 million documents take a second.
    """
    check_lengths(lengths, capacity)
    narrow = lengths.astype(np.uint16) if capacity < 1 << 16 else lengths  # 16 bits use radix sort
    by_size = np.argsort(narrow, kind="stable").astype(index_dtype(len(lengths)))
    counts = np.bincount(lengths, minlength=1)
    plain, closed = (_patterns(counts, capacity, closing) for closing in (False, True))
    patterns = min(plain, closed, key=lambda found: sum(repeated for _, repeated in found))
    following = (np.cumsum(counts) - counts).tolist()
    order = np.empty_like(by_size)
    filled = 0
    for pattern, repeated in patterns:
        width = sum(many for _, many in pattern)
        rows = order[filled : filled + repeated * width].reshape(repeated, width)
        filled += repeated * width
        column = 0
        for size, many in pattern:
            start, used = following[size], repeated * many
            rows[:, column : column + many] = by_size[start : start + used].reshape(repeated, many)
            following[size] += used
            column += many
    widths = np.array([sum(many for _, many in pattern) for pattern, _ in patterns], order.dtype)
    return Packing(order, cumulative_offsets(np.repeat(widths, [repeated for _, repeated in patterns])))


RowPattern = list[tuple[int, int]]
"""(length, count) of the documents of a row."""


def _patterns(counts: NDArray[np.integer], capacity: int, closing: bool) -> list[tuple[RowPattern, int]]:
    """The patterns of all rows, each with its number of rows. `counts[n]`: documents of length n."""
    left = counts.tolist()
    sizes: list[int] = np.flatnonzero(counts).tolist()
    found = []
    while sizes:
        pattern = _best_closing_pair(sizes, left, capacity) if closing else _longest_that_fit(sizes, left, capacity)
        repeated = min(left[size] // many for size, many in pattern)
        for size, many in pattern:
            left[size] -= repeated * many
            if left[size] == 0:
                del sizes[bisect_left(sizes, size)]
        found.append((pattern, repeated))
    return found


def _longest_that_fit(sizes: list[int], left: list[int], capacity: int) -> RowPattern:
    """The next row: repeatedly the longest document that fits. `sizes` ascend."""
    pattern, room, below = [], capacity, len(sizes)
    while (below := bisect_right(sizes, room, hi=below)) > 0:
        below -= 1
        size = sizes[below]
        many = min(left[size], room // size)
        pattern.append((size, many))
        room -= many * size
    return pattern


def _best_closing_pair(sizes: list[int], left: list[int], capacity: int) -> RowPattern:
    """The next row: the longest documents while more than two fit, then the pair that leaves the least space."""
    pattern: dict[int, int] = {}
    room, below = capacity, len(sizes)
    while below and room > 2 * sizes[below - 1]:
        below -= 1
        size = sizes[below]
        many = min(left[size], -(-room // size) - 2)
        pattern[size] = many
        room -= many * size
        if many < left[size]:
            below += 1
    while (end := _best_pair(sizes, left, pattern, room)) is not None:
        for size in end:
            pattern[size] = pattern.get(size, 0) + 1
            room -= size
    return sorted(pattern.items(), reverse=True)


def _best_pair(sizes: list[int], left: list[int], used: dict[int, int], room: int) -> tuple[int, ...] | None:
    """The one or two documents that fill the most of `room`; of equal pairs the most uneven."""
    low, high = 0, bisect_right(sizes, room) - 1
    while high >= 0 and left[sizes[high]] == used.get(sizes[high], 0):
        high -= 1
    if high < 0:
        return None
    best: tuple[int, ...] = (sizes[high],)
    filled = sizes[high]
    while low <= high:
        small, large = sizes[low], sizes[high]
        if left[large] == used.get(large, 0) or small + large > room:
            high -= 1
        else:
            free = left[small] - used.get(small, 0)
            if free > (small == large) and small + large > filled:
                best, filled = (small, large), small + large
                if filled == room:
                    break
            low += 1
    return best


def k_bin(lengths: NDArray[np.integer], capacity: int, bins: int, every: int | None = None) -> Packing:
    """Online best fit: in the given order, each document goes to the fullest of at most `bins` open rows that has room.

    If none has room and `bins` are open, the fullest is closed. Of equally full rows the oldest is used. After `every`
    documents all rows are closed. Rows are in the order in which they were opened.
    """
    check_lengths(lengths, capacity)
    row_of = np.empty(len(lengths), dtype=index_dtype(len(lengths)))
    rows, span, chunk = 0, every or max(1, len(lengths)), _K_BIN_BLOCK
    for start in range(0, len(lengths), span):
        rooms: list[int] = []  # free space << _ROW_BITS | row number, ascending
        for first in range(start, min(start + span, len(lengths)), chunk):
            chosen = []
            for length in lengths[first : min(first + chunk, start + span)].tolist():
                size = length << _ROW_BITS
                at = bisect_left(rooms, size)
                if at < len(rooms):
                    row = rooms.pop(at) - size
                else:
                    if len(rooms) == bins:
                        del rooms[0]
                    row = ((capacity << _ROW_BITS) | rows) - size
                    rows += 1
                insort(rooms, row)
                chosen.append(row & ((1 << _ROW_BITS) - 1))
            row_of[first : first + len(chosen)] = chosen
    order = np.argsort(row_of, kind="stable").astype(row_of.dtype)
    return Packing(order, cumulative_offsets(np.bincount(row_of, minlength=rows).astype(row_of.dtype)))


def cumulative_offsets(counts: NDArray[np.integer]) -> NDArray[np.integer]:
    """Where consecutive groups of these sizes start, and where the last one ends: [0, c₀, c₀ + c₁, …]."""
    offsets = np.zeros(len(counts) + 1, dtype=counts.dtype)
    np.cumsum(counts, out=offsets[1:])
    return offsets


def index_dtype(count: int) -> type[np.signedinteger]:
    """int32 for numbers up to `count` where they fit, to save memory; else int64."""
    return np.int32 if count < 2**31 else np.int64


def check_lengths(lengths: NDArray[np.integer], capacity: int) -> None:
    """Raise a ValueError if a document cannot be packed."""
    if len(lengths) and lengths.max() > capacity:
        raise ValueError(f"a document of {lengths.max()} tokens does not fit a row of {capacity}")
    if len(lengths) and lengths.min() < 1:
        raise ValueError("a document without tokens cannot be packed")


# Packing within steps. All steps are packed at once: the n-th longest documents of all steps are placed together. 10
# million conversations take seconds; a Python loop over the steps would take minutes.

_BATCHED_DOCUMENTS = 1 << 17  # so that the matrices stay in the CPU cache


def pack_within_steps(lengths: NDArray[np.integer], batch: int, capacity: int, packing: str, bins: int) -> Packing:
    """Pack each `batch` consecutive documents, a step, separately. The rows of a step are consecutive."""
    if packing == "none":
        return one_per_row(lengths, capacity)
    return (
        k_bin(lengths, capacity, bins, batch) if packing == "k-bin" else best_fit_within_steps(lengths, batch, capacity)
    )


def best_fit_within_steps(lengths: NDArray[np.integer], batch: int, capacity: int) -> Packing:
    """For each step the rows of `best_fit`, computed as first-fit decreasing."""
    check_lengths(lengths, capacity)
    order = np.empty(len(lengths), dtype=index_dtype(len(lengths)))
    counts = [np.empty(0, dtype=order.dtype)]
    block = max(1, _BATCHED_DOCUMENTS // batch) * batch
    for start in range(0, len(lengths), block):
        sizes = lengths[start : start + block]
        documents = len(sizes)
        missing = -documents % batch
        if missing:  # pad the last step with empty documents, which come last and are removed again
            sizes = np.concatenate([sizes, np.zeros(missing, sizes.dtype)])
        placed, row = _batched_first_fit_decreasing(sizes.reshape(-1, batch), capacity)
        real = placed < documents
        placed, row = placed[real], row[real]
        order[start : start + documents] = placed + start
        begins = np.flatnonzero(np.diff(row, prepend=-1, append=-1))
        counts.append(np.diff(begins).astype(order.dtype))
    return Packing(order, cumulative_offsets(np.concatenate(counts)))


def _batched_first_fit_decreasing(
    sizes: NDArray[np.integer], capacity: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """`sizes` [steps, batch] → document numbers, row by row, and the row of each."""
    steps, batch = sizes.shape
    bits = (batch - 1).bit_length()
    mask = (1 << bits) - 1
    keys = (capacity - sizes.astype(np.int64)) << bits | np.arange(batch)  # unique: any sort is stable
    keys.sort(axis=1)
    ordered = np.ascontiguousarray((capacity - (keys >> bits)).T)  # [batch, steps], longest first
    rooms = np.full((steps, batch), capacity, dtype=np.int64)
    flat, base = rooms.reshape(-1), np.arange(steps) * batch
    row = np.empty((batch, steps), dtype=np.int64)
    used = 1  # rows to search: one more than any step has opened
    for size, chosen in zip(ordered, row, strict=True):
        np.argmax(rooms[:, :used] >= size[:, None], axis=1, out=chosen)
        flat[base + chosen] -= size
        used = min(batch, max(used, int(chosen.max()) + 2))
    keys_by_row = row.T << bits | np.arange(batch)
    keys_by_row.sort(axis=1)
    numbers = np.take_along_axis(keys & mask, keys_by_row & mask, axis=1) + base[:, None]
    return numbers.reshape(-1), ((keys_by_row >> bits) + base[:, None]).reshape(-1)
