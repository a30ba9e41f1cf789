"""Planning a run: a pure function of lengths, mixture, batch, length and seed. 10 million conversations take 3 s."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import count
from typing import TYPE_CHECKING

import numpy as np

from whet.data.arrange import gather_rows, heaviest_first, work
from whet.data.lockstep import pack_each
from whet.data.mixture import Mixture
from whet.data.pack import edges_of, index_type, pack
from whet.data.plan import Plan, Sizes

if TYPE_CHECKING:
    from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class Length:
    """How long a run is: one of these."""

    steps: int | None = None
    epochs: float | None = None
    tokens: int | None = None


def plan_by_conversations(
    lengths: NDArray[np.integer], mixture: Mixture, batch: int, length: Length, row_length: int, packing: str,
    bins: int, seed: int,
) -> Plan:  # fmt: skip
    """Draw a step's conversations first and pack inside the step: packing changes nothing but speed."""
    parts, quota = [], _Quota(length, batch)
    for epoch in count():
        drawn = mixture.epoch(seed, epoch)
        parts.append(drawn[: quota.take(lengths[drawn])])
        if quota.reached():
            break
    documents = np.concatenate(parts)
    packed = pack_each(lengths[documents], batch, row_length, packing, bins)
    step = packed.order[packed.edges[:-1]] // batch
    steps = np.searchsorted(step, np.arange(-(-len(documents) // batch) + 1))
    return _assemble(lengths, documents[packed.order], packed.edges, None, steps, len(mixture))


def plan_by_rows(
    lengths: NDArray[np.integer], mixture: Mixture, batch: int, length: Length, row_length: int, packing: str,
    bins: int, seed: int,
) -> Plan:  # fmt: skip
    """Pack each epoch first, for the fullest rows, then draw rows. Other epochs have other rows: what is equally
    long changes places, because an epoch is packed in the order that was drawn for it."""
    parts, counts, order, quota = [], [], [], _Quota(length, batch)
    known = 0
    for epoch in count():
        drawn = mixture.epoch(seed, epoch)
        packed = pack(lengths[drawn], row_length, packing, bins)
        rows = np.random.default_rng([seed, epoch, 0, 2]).permutation(len(packed))
        parts.append(drawn[packed.order])
        counts.append(np.diff(packed.edges))
        filled = np.add.reduceat(lengths[parts[-1]], packed.edges[:-1], dtype=np.int64)
        order.append(rows[: quota.take(filled[rows])] + known)
        known += len(packed)
        if quota.reached():
            break
    chosen = np.concatenate(order)
    steps = np.append(np.arange(0, len(chosen), batch), len(chosen))
    documents = np.concatenate(parts)
    edges = edges_of(np.concatenate(counts).astype(index_type(len(documents))))
    return _assemble(lengths, documents, edges, chosen, steps, len(mixture))


def plan_whole(
    lengths: NDArray[np.integer], documents: NDArray[np.integer], row_length: int, packing: str, bins: int,
    rows: int | None = None,
) -> Plan:  # fmt: skip
    """These documents once, in one step: for measuring. `rows`: at most so many rows of them, evenly chosen, because
    rows are packed by length and the first would be the longest documents."""
    packed = pack(lengths[documents], row_length, packing, bins)
    count = min(len(packed), rows or len(packed))
    chosen = np.arange(count) * len(packed) // count
    return _assemble(lengths, documents[packed.order], packed.edges, chosen, np.array([0, count]), len(documents))


class _Quota:
    """How much of each epoch a run takes, until it is as long as it should be."""

    def __init__(self, length: Length, batch: int) -> None:
        self._left: float = length.tokens or length.epochs or (length.steps or 0) * batch
        self._length, self._began = length, False

    def reached(self) -> bool:
        return self._left <= 0

    def take(self, tokens: NDArray[np.integer]) -> int:
        """Of an epoch's items, which have so many tokens each: how many, from the start. At least one of the first."""
        left, items = self._left, len(tokens)
        if self._length.tokens is not None:  # as many as it takes to reach that many
            sums = np.cumsum(tokens, dtype=np.int64)
            self._left -= int(sums[-1])
            taken = min(items, int(np.searchsorted(sums, left)) + 1)
        elif self._length.epochs is not None:
            self._left -= 1
            taken = items if left >= 1 else round(items * left)
        else:
            self._left -= items
            taken = min(items, int(left))
        taken = max(taken, 0 if self._began else 1)
        self._began = True
        return taken


def _assemble(
    lengths: NDArray[np.integer], documents: NDArray[np.integer], edges: NDArray[np.integer],
    chosen: NDArray[np.integer] | None, steps: NDArray[np.integer], per_epoch: int,
) -> Plan:  # fmt: skip
    """The plan of these rows of documents, or of the chosen ones, in steps."""
    works = np.add.reduceat(work(lengths[documents]), edges[:-1])
    order = heaviest_first(works if chosen is None else works[chosen], steps)
    documents, rows = gather_rows(documents, edges, order if chosen is None else chosen[order])
    tokens = lengths[documents]
    sizes = Sizes(per_epoch, int(tokens.max()), int(np.diff(rows).max()), int(tokens.sum(dtype=np.int64)))
    return Plan(documents, rows, steps.astype(index_type(len(rows))), sizes)
