"""The Data tab: the documents of a store with their masks, a search in their text, histograms, near-duplicates."""

from __future__ import annotations

import time
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from whet.dash.conversations import RunStore, describe_document
from whet.dash.runs_folder import RunsFolder
from whet.data.prepare.store import Store

PAGE = 20
_BINS = 40
_SEARCH_S = 2.0
_MAX_PAIRS = 100


def browse(folders: RunsFolder, run: Path, use: str, start: int, query: str) -> dict[str, Any]:
    """A page of documents from `start` on; with a query, of those whose text contains it. A long search ends after two
    seconds, and `next` says where to go on."""
    data = RunStore(folders, run, use)
    total, found, at = len(data.store), list[int](), start
    if query:
        found, at = _search(data, query.casefold(), start)
    else:
        found = list(range(start, min(start + PAGE, total)))
        at = start + len(found)
    return {
        "documents": [describe_document(data, document) for document in found], "total": total,
        "next": at if at < total else None,
    }  # fmt: skip


def _search(data: RunStore, query: str, start: int) -> tuple[list[int], int]:
    end, found = time.monotonic() + _SEARCH_S, list[int]()
    for document in range(start, len(data.store)):
        if query in data.decoder.text(data.store.ids(document).tolist()).casefold():
            found.append(document)
        if len(found) == PAGE or time.monotonic() > end:
            return found, document + 1
    return found, len(data.store)


def histograms(folders: RunsFolder, run: Path, use: str) -> dict[str, Any]:
    """How long documents are, and how much of each is supervised."""
    store = RunStore(folders, run, use).store
    lengths = np.asarray(store.lengths, dtype=np.float64)
    shares = np.asarray(store.targets, dtype=np.float64) / np.maximum(1, lengths)
    return {
        "documents": len(store), "tokens": int(lengths.sum()), "supervised": int(np.sum(store.targets)),
        "lengths": _histogram(lengths, None), "shares": _histogram(shares, (0.0, 1.0)),
    }  # fmt: skip


def _histogram(values: NDArray[np.float64], limits: tuple[float, float] | None) -> dict[str, Any]:
    if not len(values):
        return {"edges": [], "counts": [], "median": None}
    counts, edges = np.histogram(values, min(_BINS, max(5, len(values))), limits)
    return {"edges": edges.tolist(), "counts": counts.tolist(), "median": float(np.median(values)),
            "longest": float(values.max())}  # fmt: skip


def near_duplicates(folders: RunsFolder, run: Path, use: str) -> dict[str, Any]:
    """Pairs of documents that are nearly the same, the most similar first, with their texts."""
    data = RunStore(folders, run, use)
    pairs, compared = _find(data.store.folder)
    return {
        "compared": compared, "total": len(data.store), "found": len(pairs),
        "pairs": [
            {"similarity": pair.similarity, "documents": [describe_document(data, each) for each in pair[:2]]}
            for pair in pairs[:_MAX_PAIRS]
        ],
    }  # fmt: skip


@lru_cache(maxsize=4)
def _find(folder: Path) -> tuple[list[NearDuplicates], int]:
    return find_near_duplicates(Store(folder))


# Conversations that are nearly the same: MinHash over shingles of tokens.
#
# The fraction of shingles (runs of five tokens) that two documents share is estimated by how many of their smallest
# hashes agree. Documents that agree in a whole band of hashes are compared exactly, so that what is found is above the
# threshold; at a similarity of 0.8, a pair is missed in one of 5000 cases.

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
