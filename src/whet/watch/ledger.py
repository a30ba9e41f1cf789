"""What became of every conversation, as `ledger.json` tells it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from whet.watch.readable import measured


@dataclass(frozen=True, slots=True)
class Source:
    """One source of conversations: how many went in, how many were kept, and why the others were not."""

    name: str
    use: str
    given: float | None
    kept: float | None
    dropped: float | None
    truncated: float | None
    split: float | None
    duplicates: float | None
    kept_with: dict[str, float | None]
    """What is to be known about conversations that were kept."""
    reasons: dict[str, float | None]
    first: dict[str, list[str]]
    tokens: float | None
    supervised_tokens: float | None
    eos_supervised: float | None

    @classmethod
    def read(cls, record: dict[str, Any]) -> Source:
        """A source from its entry in `ledger.json`."""
        conversations = record.get("conversations") or {}
        return cls(
            name=str(record.get("source", "")),
            use=str(record.get("use", "")),
            given=measured(conversations.get("in")),
            kept=measured(conversations.get("kept")),
            dropped=measured(conversations.get("dropped")),
            truncated=measured(conversations.get("truncated")),
            split=measured(conversations.get("split")),
            duplicates=measured(record.get("duplicates")),
            kept_with={str(note): measured(n) for note, n in (record.get("notes") or {}).items()},
            reasons={str(reason): measured(n) for reason, n in (record.get("reasons") or {}).items()},
            first={
                str(reason): [str(place) for place in places] for reason, places in (record.get("first") or {}).items()
            },
            tokens=measured(record.get("tokens")),
            supervised_tokens=measured(record.get("supervised_tokens")),
            eos_supervised=measured(record.get("eos_supervised")),
        )

    @property
    def notes(self) -> dict[str, float | None]:
        """How many conversations were dropped for each reason, and how many were cut, split or are copies."""
        others = {"truncated": self.truncated, "split": self.split, "duplicate": self.duplicates, **self.kept_with}
        return {reason: number for reason, number in others.items() if number} | self.reasons

    @property
    def unaccounted(self) -> float | None:
        """Conversations that are neither kept nor dropped: 0 in a sound ledger, None if it lacks a count."""
        if self.given is None or self.kept is None or self.dropped is None:
            return None
        return self.given - self.kept - self.dropped
