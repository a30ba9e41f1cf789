"""The plan: which documents make which row of which step, decided before the first one.

It is made once (`planner.py`) and saved, so the number of steps is known, the
loader's whole state is the number of the next step, and resuming is a seek.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from whet.core.errors import WhetError
from whet.core.files import read_json, write_json

if TYPE_CHECKING:
    from numpy.typing import NDArray


_ARRAYS = ("documents", "rows", "steps")


@dataclass(frozen=True, slots=True)
class Sizes:
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
    sizes: Sizes

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
        write_json(folder / "sizes.json", asdict(self.sizes))

    @classmethod
    def load(cls, folder: Path) -> Plan:
        """A saved plan, memory-mapped: seeking to any step costs nothing."""
        try:
            documents, rows, steps = (np.load(folder / f"{name}.npy", mmap_mode="r") for name in _ARRAYS)
            sizes = Sizes(**read_json(folder / "sizes.json"))
        except (OSError, ValueError, EOFError, TypeError, WhetError) as error:
            raise WhetError(
                f"{folder}: the plan is damaged ({error}). Delete the folder and --resume makes it anew"
            ) from None
        return cls(documents, rows, steps, sizes)


def efficiency(plan: Plan, row_length: int) -> float:
    """The part of all row space that tokens fill."""
    return plan.sizes.tokens / (row_length * (len(plan.rows) - 1))
