"""Keeping a part of the training conversations apart, to measure on."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from whet.core.errors import WhetError

if TYPE_CHECKING:
    from numpy.typing import NDArray


def split_off(hashes: NDArray[np.uint64], fraction: float, seed: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Numbers for training and for validation, at least one on each side.

    `hashes` identify contents: copies of a conversation are all on the same side, or the validation would measure
    memory. Whole contents are drawn, as many as come nearest to the fraction of all conversations.
    """
    _, first, content, copies = np.unique(hashes, return_index=True, return_inverse=True, return_counts=True)
    if len(first) < 2:
        raise WhetError("data.validation.fraction: one conversation cannot be split; add conversations or remove it")
    appeared = np.argsort(first)  # by first appearance, not by hash: without copies, contents are conversations
    order = appeared[np.random.default_rng([seed, 0]).permutation(len(first))]
    sums = np.cumsum(copies[order])
    nearest = int(np.argmin(np.abs(sums - round(len(hashes) * fraction)))) + 1
    held = np.zeros(len(first), dtype=np.bool_)
    held[order[: min(nearest, len(first) - 1)]] = True
    return np.flatnonzero(~held[content]), np.flatnonzero(held[content])
