"""The Data tab: the documents of a store with their masks, a search in their text, histograms, near-duplicates."""

from __future__ import annotations

import time
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from whet.dash.conversations import RunData, describe_document
from whet.dash.runs_folder import RunsFolder
from whet.data.near_duplicates import NearDuplicates, find_near_duplicates
from whet.data.prepare.store import Store

PAGE = 20
_BINS = 40
_SEARCH_S = 2.0
_MAX_PAIRS = 100


def browse(folders: RunsFolder, run: Path, use: str, start: int, query: str) -> dict[str, Any]:
    """A page of documents from `start` on; with a query, of those whose text contains it. A long search ends after two
    seconds, and `next` says where to go on."""
    data = RunData(folders, run, use)
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


def _search(data: RunData, query: str, start: int) -> tuple[list[int], int]:
    end, found = time.monotonic() + _SEARCH_S, list[int]()
    for document in range(start, len(data.store)):
        if query in data.decoder.text(data.store.ids(document).tolist()).casefold():
            found.append(document)
        if len(found) == PAGE or time.monotonic() > end:
            return found, document + 1
    return found, len(data.store)


def histograms(folders: RunsFolder, run: Path, use: str) -> dict[str, Any]:
    """How long documents are, and how much of each is supervised."""
    store = RunData(folders, run, use).store
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
    data = RunData(folders, run, use)
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
