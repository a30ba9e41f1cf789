"""RUN/losses.bin: the loss of every training conversation at every step. Nothing in training depends on it.

16 bytes a conversation and step, in the order of the steps: `step`, counted from 1; `document`, its number in the
training store; `tokens`, how many are supervised; `loss`, their mean −log p before the step changed the weights, NaN
where it is not finite. Rank 0 appends the losses of a step, of all ranks, in one write. A resumed run truncates the
file to its checkpoint's step, so that a step occurs once whatever happened.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, get_args

import numpy as np

from whet.core.console import warn

if TYPE_CHECKING:
    from numpy.typing import NDArray

TRAINING_LOSSES = "losses.bin"
LOSS_RECORD = np.dtype([("step", "<u4"), ("document", "<u4"), ("tokens", "<u4"), ("loss", "<f4")])

LossPattern = Literal["never-learned", "forgotten", "suspicious"]
LOSS_PATTERNS: tuple[LossPattern, ...] = get_args(LossPattern)

_LEARNED, _FORGOTTEN_RATIO, _FORGOTTEN_NATS = 0.9, 1.5, 0.1
_SUSPICIOUS, _LEVEL_WINDOW, _SPREAD_WINDOW, _MIN_SPREAD = 4.0, 32, 512, 0.1


class TrainingLossWriter:
    """Appends to losses.bin."""

    def __init__(self, folder: Path, step: int) -> None:
        """Continue after `step`: later losses are dropped, because the run repeats those steps."""
        self._file = folder / TRAINING_LOSSES
        _truncate(self._file, step)
        self._handle = os.open(self._file, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)

    def write(
        self, step: int, documents: NDArray[np.integer], tokens: NDArray[np.integer], nats: NDArray[np.float64]
    ) -> None:
        """Add a step, counted from 1; `nats`: the sum of −log p over the supervised tokens of each document."""
        records = np.empty(len(documents), dtype=LOSS_RECORD)
        records["step"], records["document"], records["tokens"] = step, documents, tokens
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            losses = (nats / tokens).astype(np.float32)
        records["loss"] = np.where(np.isfinite(losses), losses, np.nan)
        content = memoryview(records.tobytes())
        while content:
            content = content[os.write(self._handle, content) :]

    def close(self) -> None:
        os.close(self._handle)


def read_training_losses(folder: Path) -> NDArray[np.void]:
    """The records of a run, of dtype LOSS_RECORD, sorted by step; empty without the file, which earlier versions did
    not write. An incomplete record at the end, of a run that was killed or writes just now, is ignored."""
    try:
        content = (folder / TRAINING_LOSSES).read_bytes()
    except OSError:
        return np.empty(0, dtype=LOSS_RECORD)
    records = np.frombuffer(content, dtype=LOSS_RECORD, count=len(content) // LOSS_RECORD.itemsize)
    broken = np.flatnonzero(np.diff(records["step"].astype(np.int64)) < 0)
    return records[: broken[0] + 1] if len(broken) else records


def losses_of_step(records: NDArray[np.void], step: int) -> NDArray[np.void]:
    """The records of one step, counted from 1, in the order of the plan."""
    first, last = np.searchsorted(records["step"], [step, step + 1])
    return records[first:last]


def _truncate(file: Path, step: int) -> None:
    """Drop what was written after `step`; a damaged file is set aside."""
    if os.path.lexists(file) and not file.is_file():
        away = file.with_name(f"damaged-{file.name}")
        file.replace(away)
        warn(f"{file}: this is not a file. It is kept as {away.name}, and the run continues with a new file")
    if not file.exists():
        return
    records = read_training_losses(file.parent)
    kept = int(np.searchsorted(records["step"], step, side="right"))
    if file.stat().st_size // LOSS_RECORD.itemsize > len(records):
        warn(f"{file}: damaged; the losses of training conversations after step {_last_step(records[:kept])} are lost")
    os.truncate(file, kept * LOSS_RECORD.itemsize)


def _last_step(records: NDArray[np.void]) -> int:
    return int(records["step"][-1]) if len(records) else 0


@dataclass(frozen=True, slots=True)
class LossHistory:
    """One conversation over the run."""

    document: int
    tokens: int
    """Supervised ones."""
    steps: tuple[int, ...]
    """In which it was seen."""
    losses: tuple[float, ...]
    """Before each of them changed the weights."""
    score: float
    """How far its last loss is above those of other conversations at that time, in standard deviations of log loss."""


class LossHistories:
    """The losses of every conversation over a run, a column for each property: a row is a conversation."""

    def __init__(self, records: NDArray[np.void]) -> None:
        records = records[np.isfinite(records["loss"])]
        order = np.argsort(records["document"], kind="stable")  # by document, then by step
        self._records, self._scores = records[order], _outlier_scores(records)[order]
        documents = self._records["document"]
        starts = np.flatnonzero(np.diff(documents, prepend=np.int64(-1)))
        self._starts = starts
        self.documents: NDArray[np.int64] = documents[starts].astype(np.int64)
        self.visits: NDArray[np.int64] = np.diff(starts, append=len(documents)).astype(np.int64)
        """How many steps have had each conversation."""
        self.tokens: NDArray[np.int64] = self._records["tokens"][starts].astype(np.int64)
        losses, last = self._records["loss"].astype(np.float64), starts + self.visits - 1
        self.first: NDArray[np.float64] = losses[starts]
        self.last: NDArray[np.float64] = losses[last]
        self.lowest: NDArray[np.float64] = np.minimum.reduceat(losses, starts) if len(starts) else losses
        self.score: NDArray[np.float64] = self._scores[last]
        """See LossHistory.score."""

    def __len__(self) -> int:
        """How many conversations were seen."""
        return len(self.documents)

    def rows(self, pattern: LossPattern) -> NDArray[np.int64]:
        """The rows that show a pattern, the worst first.

        never-learned: seen at least twice, and the last loss is above 90 % of the first and above what is usual then.
        forgotten: the last loss is above 1.5 times the lowest, and by 0.1.
        suspicious: the last loss is four standard deviations above others of that time, as wrong labels are.
        """
        if pattern == "never-learned":
            shows, by = (self.visits > 1) & (self.last > _LEARNED * self.first) & (self.score > 0), self.last
        elif pattern == "forgotten":
            limit = np.maximum(_FORGOTTEN_RATIO * self.lowest, self.lowest + _FORGOTTEN_NATS)
            shows, by = self.last > limit, self.last - self.lowest
        else:
            shows, by = self.score > _SUSPICIOUS, self.score
        found = np.flatnonzero(shows)
        return found[np.argsort(-by[found], kind="stable")]

    def history(self, row: int) -> LossHistory:
        """All that is known of one conversation."""
        first = int(self._starts[row])
        records = self._records[first : first + int(self.visits[row])]
        return LossHistory(
            int(self.documents[row]), int(self.tokens[row]), tuple(records["step"].tolist()),
            tuple(records["loss"].tolist()), float(self.score[row]),
        )  # fmt: skip


def _outlier_scores(records: NDArray[np.void]) -> NDArray[np.float64]:
    """How far each log loss is above the median of the 32 around it in time, because the loss falls, in robust standard
    deviations of the 512 around it."""
    logs = np.log(np.maximum(records["loss"].astype(np.float64), 1e-9))
    for window in _windows(logs, _LEVEL_WINDOW):
        window -= np.median(window, axis=1, keepdims=True)
    for window in _windows(logs, _SPREAD_WINDOW):
        window /= np.maximum(1.4826 * np.median(np.abs(window), axis=1, keepdims=True), _MIN_SPREAD)
    return logs


def _windows(values: NDArray[np.float64], size: int) -> list[NDArray[np.float64]]:
    """All values as views with windows as rows: those of `size`, and the last one, which has what is left over too."""
    whole = max(0, len(values) // size - 1) * size
    parts = values[:whole].reshape(-1, size), values[whole:].reshape(1, -1)
    return [part for part in parts if part.size]
