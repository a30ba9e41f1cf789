"""The mixture: which documents of which sources make an epoch. A pure function of (seed, epoch, counts).

A source walks through passes over its documents, each in a new order, and every epoch takes the next so many of that
walk: no document comes again before all others of its source were seen, whatever its share of an epoch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from whet.core.errors import WhetError
from whet.data.config import Source
from whet.data.pack import index_type

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
            for place in _walk(len(self.documents[source]), self.draws[source], seed, source, epoch)
        ]
        drawn = np.concatenate(parts)
        _shuffle(drawn, seed, epoch + 1)
        return drawn


def everything(documents: NDArray[np.integer]) -> Mixture:
    """One source, each document once an epoch."""
    return Mixture((_small(documents),), (len(documents),))


def mix(documents: NDArray[np.integer], owners: NDArray[np.integer], sources: Sequence[Source]) -> Mixture:
    """What `data.sources` asks for. `owners`: the source number of each of `documents`, which may be used."""
    members = tuple(_small(documents[owners == number]) for number in range(len(sources)))
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


def _walk(count: int, draws: int, seed: int, source: int, epoch: int) -> list[NDArray[np.integer] | slice]:
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
            order = np.arange(count, dtype=index_type(count))
            _shuffle(order, seed, source, number, 1)
            places.append(order[first:last])
        at += last - first
    return places


def _shuffle(numbers: NDArray[np.integer], *key: int) -> None:
    """In place. Keys of different length must not end in 0: trailing zeros make no difference to numpy."""
    np.random.default_rng(key).shuffle(numbers)


def _small(documents: NDArray[np.integer]) -> NDArray[np.integer]:
    return documents.astype(index_type(int(documents.max(initial=0))), copy=False)
