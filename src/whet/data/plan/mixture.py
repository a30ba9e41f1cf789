"""The mixture: which documents of which sources make up an epoch; and the split into training and validation.

Both are pure functions of (seed, epoch, counts). Each source goes through passes over its documents, each pass in a new
order, and an epoch takes the next documents of that sequence: no document is repeated before all others of its source
were used, whatever the source's share of an epoch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from whet.core.errors import WhetError
from whet.data.config import Source
from whet.data.plan.packing import index_dtype

if TYPE_CHECKING:
    from numpy.typing import NDArray


def train_validation_split(
    hashes: NDArray[np.uint64], fraction: float, seed: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Document numbers for training and for validation, at least one each.

    `hashes` identify duplicates, which all go to the same side: validation would measure memorization otherwise. Groups
    of duplicates are drawn until their number is nearest to the fraction of all conversations.
    """
    _, first, content, copies = np.unique(hashes, return_index=True, return_inverse=True, return_counts=True)
    if len(first) < 2:
        what = "a single conversation" if len(hashes) < 2 else f"{len(hashes):,} conversations that are all the same"
        raise WhetError(
            f"data.validation.fraction: {what} cannot be split; add different conversations or remove the key"
        )
    appeared = np.argsort(first)  # in order of appearance, so that the draw does not depend on the hashes
    order = appeared[np.random.default_rng([seed, 0]).permutation(len(first))]
    sums = np.cumsum(copies[order])
    nearest = int(np.argmin(np.abs(sums - round(len(hashes) * fraction)))) + 1
    held = np.zeros(len(first), dtype=np.bool_)
    held[order[: min(nearest, len(first) - 1)]] = True
    return np.flatnonzero(~held[content]), np.flatnonzero(held[content])


@dataclass(frozen=True, slots=True)
class Mixture:
    """For each source its documents and how many of them an epoch draws."""

    documents: tuple[NDArray[np.integer], ...]
    draws: tuple[int, ...]

    def __len__(self) -> int:
        """Conversations in an epoch."""
        return sum(self.draws)

    def epoch(self, seed: int, epoch: int) -> NDArray[np.integer]:
        """The documents of an epoch (from 0), in random order."""
        parts = [
            self.documents[source][position]
            for source in range(len(self.draws))
            for position in _epoch_positions(len(self.documents[source]), self.draws[source], seed, source, epoch)
        ]
        drawn = np.concatenate(parts)
        _shuffle(drawn, seed, epoch + 1)
        return drawn


def single_source_mixture(documents: NDArray[np.integer]) -> Mixture:
    """A mixture of one source that draws each document once an epoch."""
    return Mixture((_to_smallest_dtype(documents),), (len(documents),))


def make_mixture(documents: NDArray[np.integer], owners: NDArray[np.integer], sources: Sequence[Source]) -> Mixture:
    """The mixture that `data.sources` describes. `owners`: the source number of each of `documents`."""
    members = tuple(_to_smallest_dtype(documents[owners == number]) for number in range(len(sources)))
    counts = [len(own) for own in members]
    weights = [source.weight for source in sources if source.weight is not None]
    if not weights:
        return Mixture(members, draws_by_epochs(counts, [source.epochs or 1.0 for source in sources]))
    for number, source in enumerate(sources):
        if counts[number] == 0:
            raise WhetError(
                f"data.sources.{number}.weight: {source.path} has no conversations to draw from; remove the "
                "source, or see the ledger for why its conversations were dropped"
            )
    return Mixture(members, draws_by_weight(counts, weights))


def draws_by_epochs(counts: Sequence[int], epochs: Sequence[float]) -> tuple[int, ...]:
    """Each source `epochs` times; at least one document, if it has any."""
    return tuple(max(1, round(count * times)) if count else 0 for count, times in zip(counts, epochs, strict=True))


def draws_by_weight(counts: Sequence[int], weights: Sequence[float]) -> tuple[int, ...]:
    """As many draws as there are documents, divided by weight and rounded; at least one for each source."""
    quotas = sum(counts) * np.array(weights) / sum(weights)
    draws = np.maximum(1, np.floor(quotas)).astype(np.int64)
    while (left := sum(counts) - int(draws.sum())) > 0:
        draws[np.argmax(quotas - draws)] += 1
    for _ in range(-left):
        draws[np.argmin(np.where(draws > 1, quotas - draws, np.inf))] -= 1
    return tuple(draws.tolist())


def _epoch_positions(count: int, draws: int, seed: int, source: int, epoch: int) -> list[NDArray[np.integer] | slice]:
    """Positions `epoch * draws` to `(epoch + 1) * draws` in the sequence of a source's passes.

    A pass that lies completely in the epoch needs no order, because the epoch is shuffled.
    """
    positions: list[NDArray[np.integer] | slice] = []
    at, end = epoch * draws, (epoch + 1) * draws
    while at < end:
        number, first = divmod(at, count)
        last = min(count, first + end - at)
        if last - first == count:
            positions.append(slice(None))
        else:
            order = np.arange(count, dtype=index_dtype(count))
            _shuffle(order, seed, source, number, 1)
            positions.append(order[first:last])
        at += last - first
    return positions


def _shuffle(numbers: NDArray[np.integer], *key: int) -> None:
    """Shuffle in place. Keys of different lengths must not end in 0: numpy ignores trailing zeros."""
    np.random.default_rng(key).shuffle(numbers)


def _to_smallest_dtype(documents: NDArray[np.integer]) -> NDArray[np.integer]:
    return documents.astype(index_dtype(int(documents.max(initial=0))), copy=False)
