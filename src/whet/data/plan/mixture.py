"""Keeping a part of the training conversations apart, to measure on."""

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


# The mixture: which documents of which sources make an epoch. A pure function of (seed, epoch, counts).
#
# A source walks through passes over its documents, each in a new order, and every epoch takes the next so many of that
# walk: no document comes again before all others of its source were seen, whatever its share of an epoch.

if TYPE_CHECKING:
    from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class Mixture:
    """For each source the numbers of its documents and how many of them an epoch draws."""

    documents: tuple[NDArray[np.integer], ...]
    draws: tuple[int, ...]

    def __len__(self) -> int:
        """Conversations in an epoch."""
        return sum(self.draws)

    def epoch(self, seed: int, epoch: int) -> NDArray[np.integer]:
        """The documents of an epoch, counted from 0, in their order."""
        parts = [
            self.documents[source][place]
            for source in range(len(self.draws))
            for place in _epoch_positions(len(self.documents[source]), self.draws[source], seed, source, epoch)
        ]
        drawn = np.concatenate(parts)
        _shuffle(drawn, seed, epoch + 1)
        return drawn


def single_source_mixture(documents: NDArray[np.integer]) -> Mixture:
    """One source, each document once an epoch."""
    return Mixture((_to_smallest_dtype(documents),), (len(documents),))


def make_mixture(documents: NDArray[np.integer], owners: NDArray[np.integer], sources: Sequence[Source]) -> Mixture:
    """What `data.sources` asks for. `owners`: the source number of each of `documents`, which may be used."""
    members = tuple(_to_smallest_dtype(documents[owners == number]) for number in range(len(sources)))
    counts = [len(own) for own in members]
    weights = [source.weight for source in sources if source.weight is not None]
    if not weights:
        return Mixture(members, draws_by_epochs(counts, [source.epochs or 1.0 for source in sources]))
    for number, source in enumerate(sources):
        if counts[number] == 0:
            raise WhetError(
                f"data.sources.{number}.weight: {source.path} has no conversation to draw its share from; "
                "remove it, or see the ledger for what became of them"
            )
    return Mixture(members, draws_by_weight(counts, weights))


def draws_by_epochs(counts: Sequence[int], epochs: Sequence[float]) -> tuple[int, ...]:
    """Each source so many times; one conversation at least, if it has any."""
    return tuple(max(1, round(count * times)) if count else 0 for count, times in zip(counts, epochs, strict=True))


def draws_by_weight(counts: Sequence[int], weights: Sequence[float]) -> tuple[int, ...]:
    """As many draws as there are documents, shared by weight to the nearest whole; one at least for each source."""
    quotas = sum(counts) * np.array(weights) / sum(weights)
    draws = np.maximum(1, np.floor(quotas)).astype(np.int64)
    while (left := sum(counts) - int(draws.sum())) > 0:
        draws[np.argmax(quotas - draws)] += 1
    for _ in range(-left):
        draws[np.argmin(np.where(draws > 1, quotas - draws, np.inf))] -= 1
    return tuple(draws.tolist())


def _epoch_positions(count: int, draws: int, seed: int, source: int, epoch: int) -> list[NDArray[np.integer] | slice]:
    """Places `epoch * draws` to `(epoch + 1) * draws` of a source's passes.

    A pass that lies in the epoch as a whole needs no order of its own, because the epoch is shuffled.
    """
    places: list[NDArray[np.integer] | slice] = []
    at, end = epoch * draws, (epoch + 1) * draws
    while at < end:
        number, first = divmod(at, count)
        last = min(count, first + end - at)
        if last - first == count:
            places.append(slice(None))
        else:
            order = np.arange(count, dtype=index_dtype(count))
            _shuffle(order, seed, source, number, 1)
            places.append(order[first:last])
        at += last - first
    return places


def _shuffle(numbers: NDArray[np.integer], *key: int) -> None:
    """In place. Keys of different length must not end in 0: trailing zeros make no difference to numpy."""
    np.random.default_rng(key).shuffle(numbers)


def _to_smallest_dtype(documents: NDArray[np.integer]) -> NDArray[np.integer]:
    return documents.astype(index_dtype(int(documents.max(initial=0))), copy=False)
