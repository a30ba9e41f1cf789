"""The losses of each training conversation over a run, with the place in the data that it comes from. No torch."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from whet.core.errors import WhetError
from whet.data.prepare.store import Store
from whet.evaluation.training_losses import (
    LOSS_PATTERNS,
    TRAINING_LOSSES,
    LossHistories,
    LossPattern,
    read_training_losses,
)
from whet.run.data import read_ledger


@dataclass(frozen=True, slots=True)
class ConversationLoss:
    """A conversation of the training data and its losses over the run."""

    document: int
    """Its number in the training store."""
    source: str
    line: int
    tokens: int
    """Supervised ones."""
    steps: tuple[int, ...]
    """In which it was seen."""
    losses: tuple[float, ...]
    """Before each of them changed the weights."""
    score: float
    """How far its last loss is above those of other conversations at that time, in standard deviations of log loss."""


@dataclass(frozen=True, slots=True)
class ConversationHistories:
    """All conversations of a run: columns in `histories`, places from `store`."""

    histories: LossHistories
    store: Store
    total: int
    """Conversations of the training data, seen or not."""

    @classmethod
    def read(cls, run: Path) -> ConversationHistories:
        """Of a run, finished or not; a WhetError if it recorded no losses, as runs of earlier versions."""
        if not (run / TRAINING_LOSSES).is_file():
            raise WhetError(
                f"{run}: it has no {TRAINING_LOSSES}, which runs write from their first step on; earlier versions of "
                "whet did not. Train it again to see the losses of its conversations"
            )
        ledger = read_ledger(run / "ledger.json")
        store = Store(Path(ledger["stores"]["train"]))
        is_split = ledger["stores"].get("validation") == ledger["stores"]["train"]
        held_out = int(ledger.get("held_out", 0)) if is_split else 0
        histories = LossHistories(read_training_losses(run))
        if len(histories) and (highest := int(histories.documents.max())) >= len(store):
            raise WhetError(
                f"{run / TRAINING_LOSSES}: damaged: it names conversation {highest:,}, and the data has "
                f"{len(store):,}. Nothing else of the run depends on it"
            )
        return cls(histories, store, len(store) - held_out)

    def conversation(self, row: int) -> ConversationLoss:
        """One row of `histories`, with its place."""
        history = self.histories.history(row)
        origin = self.store.origin(history.document)
        return ConversationLoss(
            history.document, origin.source, origin.line, history.tokens, history.steps, history.losses, history.score
        )

    def showing(self, pattern: LossPattern, limit: int) -> list[ConversationLoss]:
        """The conversations that show a pattern, the worst first."""
        return [self.conversation(int(row)) for row in self.histories.rows(pattern)[:limit]]

    def as_dict(self, limit: int) -> dict[str, Any]:
        """For --json: how many were seen, and the worst `limit` of each pattern."""
        return {
            "conversations": self.total,
            "seen": len(self.histories),
            **{
                pattern: {
                    "count": len(self.histories.rows(pattern)),
                    "conversations": [asdict(each) for each in self.showing(pattern, limit)],
                }
                for pattern in LOSS_PATTERNS
            },
        }
