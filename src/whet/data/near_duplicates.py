"""Conversations that are nearly the same: MinHash over shingles of tokens. numpy alone.

The fraction of shingles (runs of five tokens) that two documents share is estimated by how many of their smallest
hashes agree. Documents that agree in a whole band of hashes are compared exactly, so that what is found is above the
threshold; at a similarity of 0.8, a pair is missed in one of 5000 cases.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

_SHINGLE = 5
_BANDS, _ROWS = 16, 4
_MAX_BUCKET = 200
"""Of a bucket with more documents, such as a thousand copies, each is compared with the first alone."""


class DocumentIds(Protocol):
    """Documents by number."""

    def __len__(self) -> int: ...

    def ids(self, document: int) -> NDArray[np.int64]: ...


class NearDuplicates(NamedTuple):
    """Two documents and the fraction of their shingles that both have; 1: the same tokens in the same places."""

    first: int
    second: int
    similarity: float


def find_near_duplicates(
    documents: DocumentIds, threshold: float = 0.8, seconds: float = 10.0
) -> tuple[list[NearDuplicates], int]:
    """Pairs of documents above a similarity, the most similar first, and how many documents were compared within the
    time."""
    signatures, count = _signatures(documents, time.monotonic() + seconds / 2)
    found: dict[tuple[int, int], float] = {}
    end = time.monotonic() + seconds / 2
    for band in range(_BANDS):
        keys = np.ascontiguousarray(signatures[:, band * _ROWS : (band + 1) * _ROWS]).view([("", np.uint64)] * _ROWS)
        _, bucket_of = np.unique(keys.ravel(), return_inverse=True)
        order = np.argsort(bucket_of, kind="stable")
        for bucket in np.split(order, np.flatnonzero(np.diff(bucket_of[order])) + 1):
            if len(bucket) > 1 and time.monotonic() < end:
                _compare(documents, sorted(bucket.tolist()), threshold, found)
    pairs = [NearDuplicates(a, b, similarity) for (a, b), similarity in found.items() if similarity >= threshold]
    return sorted(pairs, key=lambda pair: (-pair.similarity, pair.first, pair.second)), count


def _signatures(documents: DocumentIds, end: float) -> tuple[NDArray[np.uint64], int]:
    """The smallest hash of each document's shingles under several hash functions."""
    draw = np.random.default_rng(0)
    factors = draw.integers(1, 2**63, size=_BANDS * _ROWS, dtype=np.uint64) * np.uint64(2) + np.uint64(1)
    rows = []
    for document in range(len(documents)):
        if document % 256 == 0 and time.monotonic() > end:
            break
        hashes = shingle_hashes(documents.ids(document))
        with np.errstate(over="ignore"):
            mixed = hashes[:, None] * factors
        rows.append((mixed ^ (mixed >> np.uint64(29))).min(axis=0))
    return np.array(rows, dtype=np.uint64).reshape(len(rows), _BANDS * _ROWS), len(rows)


def shingle_hashes(ids: NDArray[np.int64]) -> NDArray[np.uint64]:
    """A hash of each run of five tokens; of a shorter document, one of all."""
    tokens = np.asarray(ids, dtype=np.uint64) + np.uint64(1)
    width = min(_SHINGLE, max(1, len(tokens)))
    if not len(tokens):
        return np.zeros(1, dtype=np.uint64)
    windows = np.lib.stride_tricks.sliding_window_view(tokens, width)
    hashes = np.zeros(len(windows), dtype=np.uint64)
    with np.errstate(over="ignore"):
        for column in range(width):
            hashes = (hashes ^ windows[:, column]) * np.uint64(0x9E3779B97F4A7C15)
            hashes ^= hashes >> np.uint64(32)
    return np.unique(hashes)


def _compare(documents: DocumentIds, bucket: list[int], threshold: float, found: dict[tuple[int, int], float]) -> None:
    sets = {each: shingle_hashes(documents.ids(each)) for each in bucket[:_MAX_BUCKET]}
    pairs: Iterable[tuple[int, int]] = (
        ((a, b) for i, a in enumerate(bucket) for b in bucket[i + 1 :])
        if len(bucket) <= _MAX_BUCKET
        else ((bucket[0], b) for b in bucket[1:])
    )
    for a, b in pairs:
        if (a, b) in found:
            continue
        one, other = sets[a], sets[b] if b in sets else shingle_hashes(documents.ids(b))
        shared = len(np.intersect1d(one, other, assume_unique=True))
        found[a, b] = shared / (len(one) + len(other) - shared)
