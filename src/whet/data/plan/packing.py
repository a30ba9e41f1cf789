"""Packing: which documents share a row, over a whole epoch or within each step. Pure functions of lengths."""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

# Packing: which documents share a row. Pure functions of lengths.
#
# Every document is in exactly one row, whole; a document as long as the row fits.

if TYPE_CHECKING:
    from numpy.typing import NDArray

_K_BIN_BLOCK = 1 << 16
_ROW_BITS = 32  # bits of a row's number beside its room


@dataclass(frozen=True, slots=True)
class Packing:
    """Row r holds the documents order[edges[r]:edges[r + 1]]."""

    order: NDArray[np.integer]
    edges: NDArray[np.integer]

    def __len__(self) -> int:
        """The number of rows."""
        return len(self.edges) - 1


def pack_rows(lengths: NDArray[np.integer], capacity: int, packing: str, bins: int) -> Packing:
    """By the name that `data.packing` has."""
    if packing == "none":
        return one_per_row(lengths, capacity)
    return k_bin(lengths, capacity, bins) if packing == "k-bin" else best_fit(lengths, capacity)


def one_per_row(lengths: NDArray[np.integer], capacity: int) -> Packing:
    """Each document has a row of its own."""
    check_lengths(lengths, capacity)
    edges = np.arange(len(lengths) + 1, dtype=index_dtype(len(lengths)))
    return Packing(edges[:-1], edges)


def best_fit(lengths: NDArray[np.integer], capacity: int) -> Packing:
    """Each row takes the longest document that still fits, again and again; equal lengths keep their order.

    If that makes rows fewer, each is closed by the two documents that fill it best instead: 339 rows of 4096 for GSM8K
    instead of 340, which is the least possible.

    The sizes in a row stay the same from row to row until one of them runs short, so a pattern is found once and
    repeated: the work is that of the different lengths, and 10 million documents take a second.
    """
    check_lengths(lengths, capacity)
    narrow = lengths.astype(np.uint16) if capacity < 1 << 16 else lengths  # 16 bits are sorted by radix
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
"""(size, how many) of a row."""


def _patterns(counts: NDArray[np.integer], capacity: int, closing: bool) -> list[tuple[RowPattern, int]]:
    """The patterns of all rows, each with the number of rows that have it. `counts` of each size."""
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
    """The next row, from the longest that fits downwards. `sizes` ascend."""
    pattern, room, below = [], capacity, len(sizes)
    while (below := bisect_right(sizes, room, hi=below)) > 0:
        below -= 1
        size = sizes[below]
        many = min(left[size], room // size)
        pattern.append((size, many))
        room -= many * size
    return pattern


def _best_closing_pair(sizes: list[int], left: list[int], capacity: int) -> RowPattern:
    """The next row, from the longest downwards while more than two fit, then by the two that leave the least room."""
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
    """The two documents, or the one, that fill the most of `room`; of equal ones the most uneven."""
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
    """In the given order, each document goes where the least room remains, among at most `bins` open rows.

    If it fits none and no more may be opened, the fullest is closed first. Of equally full rows the oldest serves.
    After `every` documents all rows are closed. The rows come in the order in which they were opened.
    """
    check_lengths(lengths, capacity)
    row_of = np.empty(len(lengths), dtype=index_dtype(len(lengths)))
    rows, span, chunk = 0, every or max(1, len(lengths)), _K_BIN_BLOCK
    for start in range(0, len(lengths), span):
        rooms: list[int] = []  # room << _ROW | number of the row, ascending
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
    """Where consecutive groups of these sizes begin, and where the last one ends."""
    edges = np.zeros(len(counts) + 1, dtype=counts.dtype)
    np.cumsum(counts, out=edges[1:])
    return edges


def index_dtype(count: int) -> type[np.signedinteger]:
    """Half the memory for numbers up to `count`, where they fit."""
    return np.int32 if count < 2**31 else np.int64


def check_lengths(lengths: NDArray[np.integer], capacity: int) -> None:
    """Lengths that can be packed."""
    if len(lengths) and lengths.max() > capacity:
        raise ValueError(f"a document of {lengths.max()} tokens does not fit a row of {capacity}")
    if len(lengths) and lengths.min() < 1:
        raise ValueError("a document without tokens cannot be packed")


# Packing inside steps: each step's documents by themselves, all steps at once.
#
# A loop over steps in Python takes minutes for 10 million conversations; here the n-th longest document of every step
# is placed at the same time, and the same 10 million take seconds.

if TYPE_CHECKING:
    from numpy.typing import NDArray

_BATCHED_DOCUMENTS = 1 << 17  # documents at a time: the matrices stay in the cache


def pack_within_steps(lengths: NDArray[np.integer], batch: int, capacity: int, packing: str, bins: int) -> Packing:
    """Pack each `batch` consecutive documents by themselves; the rows of a step follow each other."""
    if packing == "none":
        return one_per_row(lengths, capacity)
    return (
        k_bin(lengths, capacity, bins, batch) if packing == "k-bin" else best_fit_within_steps(lengths, batch, capacity)
    )


def best_fit_within_steps(lengths: NDArray[np.integer], batch: int, capacity: int) -> Packing:
    """For each step the rows that `best_fit` gives, which are those of First-Fit-Decreasing."""
    check_lengths(lengths, capacity)
    order = np.empty(len(lengths), dtype=index_dtype(len(lengths)))
    counts = [np.empty(0, dtype=order.dtype)]
    block = max(1, _BATCHED_DOCUMENTS // batch) * batch
    for start in range(0, len(lengths), block):
        sizes = lengths[start : start + block]
        documents = len(sizes)
        missing = -documents % batch
        if missing:  # the last step: empty documents, which come last, take no room and are removed again
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
