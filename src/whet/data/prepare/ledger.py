"""The ledger: every conversation and token that went in is kept, cut or dropped, with the reason and the line."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from whet.data.conversation import Origin

_MAX_EXAMPLES = 5


@dataclass(slots=True)
class Account:
    """What became of one source's conversations, or of a part of them."""

    read: int = 0
    kept: int = 0
    truncated: int = 0
    split: int = 0
    documents: int = 0
    tokens: int = 0
    supervised: int = 0
    ended: int = 0
    duplicates: int = 0
    reasons: Counter[str] = field(default_factory=Counter)
    """Why conversations were dropped."""
    notes: Counter[str] = field(default_factory=Counter)
    """What is to be known about conversations that were kept."""
    first: dict[str, list[str]] = field(default_factory=dict)

    def keep(self, tokens: int, supervised: int, ended: bool) -> None:
        """Count a document; what makes the conversation kept is `kept`."""
        self.documents += 1
        self.tokens += tokens
        self.supervised += supervised
        self.ended += ended

    def drop(self, reason: str, origin: Origin) -> None:
        """Leave a conversation out; the first few of each reason are named."""
        self.reasons[reason] += 1
        self.remember(reason, origin)

    def truncate(self, origin: Origin) -> None:
        """Count a conversation that was cut; if the rest is dropped too, both are told."""
        self.truncated += 1
        self.remember("truncated", origin)

    def note(self, what: str, origin: Origin) -> None:
        """Count something about a conversation that is kept."""
        self.notes[what] += 1
        self.remember(what, origin)

    def remember(self, reason: str, origin: Origin) -> None:
        """Name a place; of each reason the first few are kept."""
        places = self.first.setdefault(reason, [])
        if len(places) < _MAX_EXAMPLES:
            places.append(str(origin))

    def add(self, other: Account) -> None:
        """Take over what a later part of the same source adds."""
        for name in ("read", "kept", "truncated", "split", "documents", "tokens", "supervised", "ended", "duplicates"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.reasons.update(other.reasons)
        self.notes.update(other.notes)
        for reason, places in other.first.items():
            known = self.first.setdefault(reason, [])
            known += places[: _MAX_EXAMPLES - len(known)]

    def state(self) -> dict[str, Any]:
        """As plain values, for `restore`."""
        return {name: getattr(self, name) for name in self.__slots__}

    @classmethod
    def restore(cls, state: dict[str, Any]) -> Account:
        return cls(**state | {"reasons": Counter(state["reasons"]), "notes": Counter(state["notes"])})

    def as_dict(self, source: str, use: str) -> dict[str, Any]:
        """The entry in the ledger. `use` is train or validation."""
        dropped = self.reasons.total()
        assert self.read == self.kept + dropped, "a conversation was lost from the ledger"
        return {
            "source": source,
            "use": use,
            "conversations": {
                "in": self.read, "kept": self.kept, "dropped": dropped, "truncated": self.truncated,
                "split": self.split,
            },
            "reasons": dict(self.reasons),
            "notes": dict(self.notes),
            "duplicates": self.duplicates,
            "first": self.first,
            "documents": self.documents,
            "tokens": self.tokens,
            "supervised_tokens": self.supervised,
            "eos_supervised": self.ended / self.documents if self.documents else None,
        }  # fmt: skip
