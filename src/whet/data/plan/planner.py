"""The plan: which documents make which row of which step, computed before training and saved with the run."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from whet.core.errors import WhetError
from whet.core.files import read_json, write_json
from whet.data.plan.mixture import Mixture
from whet.data.plan.packing import cumulative_offsets, index_dtype, pack_rows, pack_within_steps

# The plan: which documents make which row of which step, decided before the first one.
#
# It is made once (`planner.py`) and saved, so the number of steps is known, the
# loader's whole state is the number of the next step, and resuming is a seek.

if TYPE_CHECKING:
    from numpy.typing import NDArray


_ARRAYS = ("documents", "rows", "steps")


@dataclass(frozen=True, slots=True)
class PlanStats:
    """What is known of all documents of a plan, so that nobody has to look at all of them again."""

    per_epoch: int
    """Conversations in an epoch."""
    longest: int
    """Tokens of the longest document."""
    fullest: int
    """Most documents in a row."""
    tokens: int


@dataclass(frozen=True, slots=True)
class Plan:
    """Row r holds documents[rows[r]:rows[r + 1]]; step s holds rows steps[s] to steps[s + 1], the heaviest first."""

    documents: NDArray[np.integer]
    rows: NDArray[np.integer]
    steps: NDArray[np.integer]
    stats: PlanStats

    def __len__(self) -> int:
        """The number of steps."""
        return len(self.steps) - 1

    def row_count(self, step: int) -> int:
        """How many rows a step has."""
        return int(self.steps[step + 1] - self.steps[step])

    def row(self, step: int, number: int) -> NDArray[np.integer]:
        """The documents of one row of a step; both are counted from 0."""
        row = self.steps[step] + number
        return self.documents[self.rows[row] : self.rows[row + 1]]

    def rows_of(self, step: int) -> list[NDArray[np.integer]]:
        """The documents of each row of a step, counted from 0."""
        return [self.row(step, number) for number in range(self.row_count(step))]

    def documents_of(self, step: int) -> NDArray[np.integer]:
        return self.documents[self.rows[self.steps[step]] : self.rows[self.steps[step + 1]]]

    def save(self, folder: Path) -> None:
        for name in _ARRAYS:
            np.save(folder / f"{name}.npy", getattr(self, name))
        write_json(folder / "sizes.json", asdict(self.stats))

    @classmethod
    def load(cls, folder: Path) -> Plan:
        """A saved plan, memory-mapped: seeking to any step costs nothing."""
        try:
            documents, rows, steps = (np.load(folder / f"{name}.npy", mmap_mode="r") for name in _ARRAYS)
            sizes = PlanStats(**read_json(folder / "sizes.json"))
        except (OSError, ValueError, EOFError, TypeError, WhetError) as error:
            raise WhetError(
                f"{folder}: the plan is damaged ({error}). Delete the folder and --resume makes it anew"
            ) from None
        return cls(documents, rows, steps, sizes)


def packing_efficiency(plan: Plan, row_length: int) -> float:
    """The part of all row space that tokens fill."""
    return plan.stats.tokens / (row_length * (len(plan.rows) - 1))


# The order of rows inside a step: the heaviest first, so that ranks can be dealt equal work.

if TYPE_CHECKING:
    from numpy.typing import NDArray

ATTENTION_CROSSOVER = 12_288
"""The length at which a document's attention costs as much as everything else. A layer of width d takes about 24 d²
operations a token in its matrices and 2 d · length in causal attention: equal at 12 d, here for d = 1024."""

_SORTED_ROWS = 1 << 16


def document_cost(lengths: NDArray[np.integer]) -> NDArray[np.int64]:
    """What documents cost a model, in units of attention between two tokens."""
    wide = lengths.astype(np.int64)
    return wide * (wide + ATTENTION_CROSSOVER)


def order_by_cost(works: NDArray[np.int64], steps: NDArray[np.integer]) -> NDArray[np.int64]:
    """The order of rows in which each step's descend in work; equal ones keep theirs. Step s has rows
    steps[s] to steps[s + 1]. Many steps are sorted at a time, few enough that the keys fit 64 bits."""
    order = np.empty(len(works), dtype=np.int64)
    first = 0
    while first < len(steps) - 1:
        last = max(first + 1, int(np.searchsorted(steps, steps[first] + _SORTED_ROWS, side="right")) - 1)
        begin, end = int(steps[first]), int(steps[last])
        mine = works[begin:end]
        step = np.repeat(np.arange(last - first), np.diff(steps[first : last + 1]))
        order[begin:end] = begin + np.argsort((step + 1) * (int(mine.max()) + 1) - mine, kind="stable")
        first = last
    return order


def gather_rows(
    documents: NDArray[np.integer], edges: NDArray[np.integer], chosen: NDArray[np.integer]
) -> tuple[NDArray[np.integer], NDArray[np.integer]]:
    """The documents of the chosen rows, one row after another, and their edges."""
    counts = np.diff(edges)[chosen]
    rows = np.zeros(len(chosen) + 1, dtype=edges.dtype)
    np.cumsum(counts, out=rows[1:])
    places = np.repeat(edges[:-1][chosen] - rows[:-1], counts)
    places += np.arange(len(places), dtype=places.dtype)
    return documents[places], rows


# Planning a run: a pure function of lengths, mixture, batch, length and seed. 10 million conversations take 3 s.

if TYPE_CHECKING:
    from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class RunLength:
    """How long a run is: one of these."""

    steps: int | None = None
    epochs: float | None = None
    tokens: int | None = None


def plan_by_conversations(
    lengths: NDArray[np.integer], mixture: Mixture, batch: int, length: RunLength, row_length: int, packing: str,
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
    packed = pack_within_steps(lengths[documents], batch, row_length, packing, bins)
    step = packed.order[packed.edges[:-1]] // batch
    steps = np.searchsorted(step, np.arange(-(-len(documents) // batch) + 1))
    return _build_plan(lengths, documents[packed.order], packed.edges, None, steps, len(mixture))


def plan_by_rows(
    lengths: NDArray[np.integer], mixture: Mixture, batch: int, length: RunLength, row_length: int, packing: str,
    bins: int, seed: int,
) -> Plan:  # fmt: skip
    """Pack each epoch first, for the fullest rows, then draw rows. Other epochs have other rows: what is equally
    long changes places, because an epoch is packed in the order that was drawn for it."""
    parts, counts, order, quota = [], [], [], _Quota(length, batch)
    known = 0
    for epoch in count():
        drawn = mixture.epoch(seed, epoch)
        packed = pack_rows(lengths[drawn], row_length, packing, bins)
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
    edges = cumulative_offsets(np.concatenate(counts).astype(index_dtype(len(documents))))
    return _build_plan(lengths, documents, edges, chosen, steps, len(mixture))


def plan_single_step(
    lengths: NDArray[np.integer], documents: NDArray[np.integer], row_length: int, packing: str, bins: int,
    rows: int | None = None,
) -> Plan:  # fmt: skip
    """These documents once, in one step: for measuring. `rows`: at most so many rows of them, evenly chosen, because
    rows are packed by length and the first would be the longest documents."""
    packed = pack_rows(lengths[documents], row_length, packing, bins)
    count = min(len(packed), rows or len(packed))
    chosen = np.arange(count) * len(packed) // count
    return _build_plan(lengths, documents[packed.order], packed.edges, chosen, np.array([0, count]), len(documents))


class _Quota:
    """How much of each epoch a run takes, until it is as long as it should be."""

    def __init__(self, length: RunLength, batch: int) -> None:
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


def _build_plan(
    lengths: NDArray[np.integer], documents: NDArray[np.integer], edges: NDArray[np.integer],
    chosen: NDArray[np.integer] | None, steps: NDArray[np.integer], per_epoch: int,
) -> Plan:  # fmt: skip
    """The plan of these rows of documents, or of the chosen ones, in steps."""
    works = np.add.reduceat(document_cost(lengths[documents]), edges[:-1])
    order = order_by_cost(works if chosen is None else works[chosen], steps)
    documents, rows = gather_rows(documents, edges, order if chosen is None else chosen[order])
    tokens = lengths[documents]
    sizes = PlanStats(per_epoch, int(tokens.max()), int(np.diff(rows).max()), int(tokens.sum(dtype=np.int64)))
    return Plan(documents, rows, steps.astype(index_dtype(len(rows))), sizes)
