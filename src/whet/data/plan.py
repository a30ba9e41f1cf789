"""The plan: which documents make which row of which step, decided before the first one.

It is a pure function of lengths, seed and batch, and it is saved, so the number of steps is known, the loader's
whole state is the number of the next step, and resuming is a seek.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from whet.core.errors import WhetError
from whet.data.pack import best_fit

if TYPE_CHECKING:
    from numpy.typing import NDArray


_ARRAYS = ("documents", "rows", "steps")


@dataclass(frozen=True, slots=True)
class Length:
    """How long a run is: one of these."""

    steps: int | None = None
    epochs: float | None = None
    tokens: int | None = None


@dataclass(frozen=True, slots=True)
class Plan:
    """Row r holds documents[rows[r]:rows[r + 1]]; step s holds rows steps[s] to steps[s + 1]."""

    documents: NDArray[np.int64]
    rows: NDArray[np.int64]
    steps: NDArray[np.int64]
    per_epoch: int

    def __len__(self) -> int:
        """The number of steps."""
        return len(self.steps) - 1

    def rows_of(self, step: int) -> list[NDArray[np.int64]]:
        """The documents of each row of a step, counted from 0."""
        first, last = self.steps[step], self.steps[step + 1]
        return [self.documents[self.rows[r] : self.rows[r + 1]] for r in range(first, last)]

    def documents_of(self, step: int) -> NDArray[np.int64]:
        return self.documents[self.rows[self.steps[step]] : self.rows[self.steps[step + 1]]]

    def renumbered(self, numbers: NDArray[np.int64]) -> Plan:
        """The same plan for documents that are called `numbers[0]`, `numbers[1]`, … in the store."""
        return Plan(numbers[self.documents], self.rows, self.steps, self.per_epoch)

    def save(self, folder: Path) -> None:
        for name in _ARRAYS:
            np.save(folder / f"{name}.npy", getattr(self, name))

    @classmethod
    def load(cls, folder: Path, per_epoch: int) -> Plan:
        """A saved plan, memory-mapped: seeking to any step costs nothing."""
        try:
            documents, rows, steps = (np.load(folder / f"{name}.npy", mmap_mode="r") for name in _ARRAYS)
        except (OSError, ValueError, EOFError) as error:
            raise WhetError(
                f"{folder}: the plan is damaged ({error}). Delete the folder and --resume makes it anew"
            ) from None
        return cls(documents, rows, steps, per_epoch)


def plan_by_conversations(
    lengths: NDArray[np.integer], batch: int, length: Length, row_length: int, packing: str, seed: int
) -> Plan:
    """Draw a step's conversations first and pack inside the step: packing changes nothing but speed."""
    drawn = _draw(lengths, batch, length, seed)
    rows: list[NDArray[np.int64]] = []
    steps = [0]
    for start in range(0, len(drawn), batch):
        chosen = drawn[start : start + batch]
        rows.extend(chosen[row] for row in _pack(lengths[chosen], row_length, packing))
        steps.append(len(rows))
    return _assemble(rows, steps, len(lengths))


def plan_by_rows(
    lengths: NDArray[np.integer], batch: int, length: Length, row_length: int, packing: str, seed: int
) -> Plan:
    """Pack the whole epoch first, for the fullest rows, then draw rows."""
    packed = [np.array(row, dtype=np.int64) for row in _pack(lengths, row_length, packing)]
    drawn = _draw(np.array([lengths[row].sum() for row in packed]), batch, length, seed)
    steps = [*range(0, len(drawn), batch), len(drawn)]
    return _assemble([packed[number] for number in drawn], steps, len(lengths))


def plan_whole(lengths: NDArray[np.integer], row_length: int, packing: str) -> Plan:
    """Everything once, in one step: for measuring."""
    rows = [np.array(row, dtype=np.int64) for row in _pack(lengths, row_length, packing)]
    return _assemble(rows, [0, len(rows)], len(lengths))


def efficiency(plan: Plan, lengths: NDArray[np.integer], row_length: int) -> float:
    """The part of all row space that tokens fill."""
    return float(lengths[plan.documents].sum()) / (row_length * (len(plan.rows) - 1))


def split_off(count: int, fraction: float, seed: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Numbers for training and for validation, disjoint, at least one on each side."""
    if count < 2:
        raise WhetError("data.validation.fraction: one conversation cannot be split; add conversations or remove it")
    order = _generator(seed, -1).permutation(count)
    held = min(max(1, round(count * fraction)), count - 1)
    return np.sort(order[held:]), np.sort(order[:held])


def _draw(tokens: NDArray[np.integer], batch: int, length: Length, seed: int) -> NDArray[np.int64]:
    """Numbers of items that have `tokens` tokens each: shuffled epochs, one after another, for a whole run."""
    if length.tokens is None:
        wanted = max(1, length.steps * batch if length.steps is not None else round(len(tokens) * (length.epochs or 0)))
        epochs = range(-(-wanted // len(tokens)))
        return np.concatenate([_shuffled(len(tokens), seed, epoch) for epoch in epochs])[:wanted]
    parts: list[NDArray[np.int64]] = []
    missing = length.tokens
    while missing > 0:  # as many as it takes to reach that many tokens
        numbers = _shuffled(len(tokens), seed, len(parts))
        reached = np.cumsum(tokens[numbers])
        parts.append(numbers[: int(np.searchsorted(reached, missing)) + 1])
        missing -= int(reached[-1])
    return np.concatenate(parts)


def _generator(seed: int, epoch: int) -> np.random.Generator:
    return np.random.default_rng([seed, epoch + 1])


def _shuffled(count: int, seed: int, epoch: int) -> NDArray[np.int64]:
    return _generator(seed, epoch).permutation(count)


def _pack(lengths: NDArray[np.integer], row_length: int, packing: str) -> list[list[int]]:
    return best_fit(lengths, row_length) if packing == "best-fit" else [[number] for number in range(len(lengths))]


def _assemble(rows: list[NDArray[np.int64]], steps: list[int], per_epoch: int) -> Plan:
    edges = np.cumsum([0, *map(len, rows)], dtype=np.int64)
    return Plan(np.concatenate(rows), edges, np.array(steps, dtype=np.int64), per_epoch)
