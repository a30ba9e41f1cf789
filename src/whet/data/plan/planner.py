"""The plan: which documents make up which row of which step, computed before training and saved with the run.

It is a pure function of lengths, mixture, batch size, row length and seed; 10 million conversations take 3 s. Because
all is fixed in advance, the number of steps is known, a loader needs no state but the step number, and resuming is a
seek.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from whet.core.checksums import find_damage, hash_files, read_hashed_json, write_hashed_json
from whet.core.errors import WhetError, first_line, os_error
from whet.data.plan.mixture import Mixture
from whet.data.plan.packing import cumulative_offsets, index_dtype, pack_rows, pack_within_steps

if TYPE_CHECKING:
    from numpy.typing import NDArray


_ARRAYS = ("documents", "rows", "steps")


@dataclass(frozen=True, slots=True)
class PlanStats:
    """Totals over a plan, saved as sizes.json."""

    per_epoch: int
    """Conversations in an epoch."""
    longest: int
    """Tokens of the longest document."""
    fullest: int
    """Most documents in a row."""
    tokens: int


@dataclass(frozen=True, slots=True)
class Plan:
    """Row r has documents[rows[r]:rows[r + 1]]; step s has the rows steps[s] to steps[s + 1], most expensive first."""

    documents: NDArray[np.integer]
    rows: NDArray[np.integer]
    steps: NDArray[np.integer]
    stats: PlanStats
    step_offset: int = 0
    """train.step_offset: the methods below take step numbers from here on, instead of from 0."""

    def __len__(self) -> int:
        """The number of steps."""
        return len(self.steps) - 1

    @property
    def last_step(self) -> int:
        """The number of finished steps at the end."""
        return self.step_offset + len(self)

    @property
    def mean_step_tokens(self) -> float:
        """Tokens of a step, without padding, on average."""
        return self.stats.tokens / len(self)

    def row_count(self, step: int) -> int:
        """The number of rows of a step."""
        return int(np.diff(self._row_range(step))[0])

    def row(self, step: int, number: int) -> NDArray[np.integer]:
        """The documents of one row of a step; both from 0."""
        row = self._row_range(step)[0] + number
        return self.documents[self.rows[row] : self.rows[row + 1]]

    def places(self, step: int, number: int) -> NDArray[np.int64]:
        """Where the documents of that row are in `documents_of(step)`."""
        start = self._row_range(step)[0]
        row, first = start + number, int(self.rows[start])
        return np.arange(int(self.rows[row]) - first, int(self.rows[row + 1]) - first)

    def rows_of(self, step: int) -> list[NDArray[np.integer]]:
        """The documents of each row of a step (from 0)."""
        return [self.row(step, number) for number in range(self.row_count(step))]

    def documents_of(self, step: int) -> NDArray[np.integer]:
        start, end = self._row_range(step)
        return self.documents[self.rows[start] : self.rows[end]]

    def _row_range(self, step: int) -> NDArray[np.integer]:
        index = step - self.step_offset
        return self.steps[index : index + 2]

    def unpacked(self, lengths: NDArray[np.integer]) -> Plan:
        """The same steps with one document a row, for models that cannot keep packed documents apart."""
        single = np.arange(len(self.documents) + 1, dtype=self.rows.dtype)
        plan = _build_plan(lengths, self.documents, single, None, self.rows[self.steps], self.stats.per_epoch)
        return replace(plan, step_offset=self.step_offset)

    def save(self, folder: Path) -> None:
        """The three arrays; sizes.json has the totals, the step offset, and the checksums of all."""
        files = [folder / f"{name}.npy" for name in _ARRAYS]
        for name, file in zip(_ARRAYS, files, strict=True):
            np.save(file, getattr(self, name))
        sizes = {**asdict(self.stats), "step_offset": self.step_offset, "checksums": hash_files(folder, files)}
        write_hashed_json(folder / "sizes.json", sizes)

    @classmethod
    def load(cls, folder: Path) -> Plan:
        """Load a saved plan, memory-mapped, if its files are intact; old versions saved no checksums and no offset."""
        remedy = f"The plan is damaged: delete the folder {folder}; --resume then computes it again"
        sizes = read_hashed_json(folder / "sizes.json", remedy)
        damage = find_damage(folder, sizes.pop("checksums", {}))
        if damage:
            raise WhetError(f"{damage[0]}. {remedy}")
        try:
            arrays = [np.load(folder / f"{name}.npy", mmap_mode="r", allow_pickle=False) for name in _ARRAYS]
            if any(array.ndim != 1 or array.dtype.kind not in "iu" for array in arrays):
                raise ValueError("not lists of integers")
            documents, rows, steps = arrays
            offset = sizes.pop("step_offset", 0)
            return cls(documents, rows, steps, PlanStats(**sizes), offset)
        except Exception as error:  # a damaged header can raise almost anything
            raise os_error(error, "opening the plan", folder) or WhetError(
                f"{folder}: {first_line(error)}. {remedy}"
            ) from None


def packing_efficiency(plan: Plan, row_length: int) -> float:
    """The fraction of all row positions that have a token."""
    return plan.stats.tokens / (row_length * (len(plan.rows) - 1))


def typical_length(lengths: NDArray[np.integer]) -> float:
    """The length of the document that an average token is in."""
    sizes = lengths.astype(np.float64)
    return float((sizes**2).sum() / max(1.0, sizes.sum()))


# Load balancing: rows of a step descend in cost, so that the loader can deal them evenly to the ranks.

ATTENTION_CROSSOVER = 12_288
"""The length at which attention costs as much as the matrix products. A layer of width d takes about 24 d² FLOPs a
token in its matrices and 2 d · length in causal attention: equal at 12 d, here for d = 1024."""

_SORTED_ROWS = 1 << 16  # sorted together; few enough for 64-bit keys


def document_cost(lengths: NDArray[np.integer]) -> NDArray[np.int64]:
    """The cost of documents in units of attention between two tokens."""
    wide = lengths.astype(np.int64)
    return wide * (wide + ATTENTION_CROSSOVER)


def order_by_cost(costs: NDArray[np.int64], steps: NDArray[np.integer]) -> NDArray[np.int64]:
    """The order in which the rows of each step descend in cost; equal ones keep their order. Step s has the rows
    steps[s] to steps[s + 1]."""
    order = np.empty(len(costs), dtype=np.int64)
    first = 0
    while first < len(steps) - 1:
        last = max(first + 1, int(np.searchsorted(steps, steps[first] + _SORTED_ROWS, side="right")) - 1)
        begin, end = int(steps[first]), int(steps[last])
        mine = costs[begin:end]
        step = np.repeat(np.arange(last - first), np.diff(steps[first : last + 1]))
        order[begin:end] = begin + np.argsort((step + 1) * (int(mine.max()) + 1) - mine, kind="stable")
        first = last
    return order


def gather_rows(
    documents: NDArray[np.integer], offsets: NDArray[np.integer], chosen: NDArray[np.integer]
) -> tuple[NDArray[np.integer], NDArray[np.integer]]:
    """The documents of the chosen rows, row by row, and the rows' offsets."""
    counts = np.diff(offsets)[chosen]
    rows = np.zeros(len(chosen) + 1, dtype=offsets.dtype)
    np.cumsum(counts, out=rows[1:])
    positions = np.repeat(offsets[:-1][chosen] - rows[:-1], counts)
    positions += np.arange(len(positions), dtype=positions.dtype)
    return documents[positions], rows


@dataclass(frozen=True, slots=True)
class RunLength:
    """The length of a run in one of these units."""

    steps: int | None = None
    epochs: float | None = None
    tokens: int | None = None


def plan_by_conversations(
    lengths: NDArray[np.integer], mixture: Mixture, batch: int, length: RunLength, row_length: int, packing: str,
    bins: int, seed: int,
) -> Plan:  # fmt: skip
    """Draw the conversations of a step, then pack within the step: packing affects speed only."""
    parts, quota = [], _Quota(length, batch)
    for epoch in count():
        drawn = mixture.epoch(seed, epoch)
        parts.append(drawn[: quota.take(lengths[drawn])])
        if quota.reached():
            break
    documents = np.concatenate(parts)
    packed = pack_within_steps(lengths[documents], batch, row_length, packing, bins)
    step = packed.order[packed.offsets[:-1]] // batch
    steps = np.searchsorted(step, np.arange(-(-len(documents) // batch) + 1))
    return _build_plan(lengths, documents[packed.order], packed.offsets, None, steps, len(mixture))


def plan_by_rows(
    lengths: NDArray[np.integer], mixture: Mixture, batch: int, length: RunLength, row_length: int, packing: str,
    bins: int, seed: int,
) -> Plan:  # fmt: skip
    """Pack each epoch for the fullest rows, then draw rows. Epochs have different rows: each is packed in its own
    random order, which changes the places of equally long documents."""
    parts, counts, order, quota = [], [], [], _Quota(length, batch)
    known = 0
    for epoch in count():
        drawn = mixture.epoch(seed, epoch)
        packed = pack_rows(lengths[drawn], row_length, packing, bins)
        rows = np.random.default_rng([seed, epoch, 0, 2]).permutation(len(packed))
        parts.append(drawn[packed.order])
        counts.append(np.diff(packed.offsets))
        filled = np.add.reduceat(lengths[parts[-1]], packed.offsets[:-1], dtype=np.int64)
        order.append(rows[: quota.take(filled[rows])] + known)
        known += len(packed)
        if quota.reached():
            break
    chosen = np.concatenate(order)
    steps = np.append(np.arange(0, len(chosen), batch), len(chosen))
    documents = np.concatenate(parts)
    offsets = cumulative_offsets(np.concatenate(counts).astype(index_dtype(len(documents))))
    return _build_plan(lengths, documents, offsets, chosen, steps, len(mixture))


def plan_single_step(
    lengths: NDArray[np.integer], documents: NDArray[np.integer], row_length: int, packing: str, bins: int,
    rows: int | None = None,
) -> Plan:  # fmt: skip
    """One step with each of these documents once, for evaluation. `rows`: at most this many rows, evenly spaced,
    because rows are packed by length and the first ones have the longest documents."""
    packed = pack_rows(lengths[documents], row_length, packing, bins)
    count = min(len(packed), rows or len(packed))
    chosen = np.arange(count) * len(packed) // count
    return _build_plan(lengths, documents[packed.order], packed.offsets, chosen, np.array([0, count]), len(documents))


class _Quota:
    """How much of each epoch a run takes until its length is reached."""

    def __init__(self, length: RunLength, batch: int) -> None:
        self._left: float = length.tokens or length.epochs or (length.steps or 0) * batch
        self._length, self._began = length, False

    def reached(self) -> bool:
        return self._left <= 0

    def take(self, tokens: NDArray[np.integer]) -> int:
        """How many items of an epoch to take, given the tokens of each; at least one of the first epoch."""
        left, items = self._left, len(tokens)
        if self._length.tokens is not None:  # as many items as reach that number
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
    lengths: NDArray[np.integer], documents: NDArray[np.integer], offsets: NDArray[np.integer],
    chosen: NDArray[np.integer] | None, steps: NDArray[np.integer], per_epoch: int,
) -> Plan:  # fmt: skip
    """The plan of these rows, or of the chosen ones, grouped into steps."""
    costs = np.add.reduceat(document_cost(lengths[documents]), offsets[:-1])
    order = order_by_cost(costs if chosen is None else costs[chosen], steps)
    documents, rows = gather_rows(documents, offsets, order if chosen is None else chosen[order])
    tokens = lengths[documents]
    stats = PlanStats(per_epoch, int(tokens.max()), int(np.diff(rows).max()), int(tokens.sum(dtype=np.int64)))
    return Plan(documents, rows, steps.astype(index_dtype(len(rows))), stats)
