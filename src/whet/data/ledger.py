"""The ledger: every conversation and token that went in is kept, cut or dropped, with the reason and the line."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from whet.data.conversation import Origin

_SHOWN = 5


@dataclass(slots=True)
class Account:
    """What became of one source's conversations."""

    source: str
    use: str
    read: int = 0
    kept: int = 0
    truncated: int = 0
    tokens: int = 0
    supervised: int = 0
    ended: int = 0
    reasons: Counter[str] = field(default_factory=Counter)
    first: dict[str, list[str]] = field(default_factory=dict)

    def keep(self, tokens: int, supervised: int, ended: bool) -> None:
        self.kept += 1
        self.tokens += tokens
        self.supervised += supervised
        self.ended += ended

    def drop(self, reason: str, origin: Origin) -> None:
        """Leave a conversation out; the first few of each reason are named."""
        self.reasons[reason] += 1
        self._note(reason, origin)

    def truncate(self, origin: Origin) -> None:
        """Count a conversation that was cut and kept; if the rest is dropped too, both are told."""
        self.truncated += 1
        self._note("truncated", origin)

    def _note(self, reason: str, origin: Origin) -> None:
        places = self.first.setdefault(reason, [])
        if len(places) < _SHOWN:
            places.append(str(origin))

    def as_dict(self) -> dict[str, Any]:
        dropped = self.reasons.total()
        assert self.read == self.kept + dropped, "a conversation was lost from the ledger"
        return {
            "source": self.source,
            "use": self.use,
            "conversations": {
                "in": self.read, "kept": self.kept, "dropped": dropped, "truncated": self.truncated,
            },
            "reasons": dict(self.reasons),
            "first": self.first,
            "tokens": self.tokens,
            "supervised_tokens": self.supervised,
            "eos_supervised": self.ended / self.kept if self.kept else None,
        }  # fmt: skip
