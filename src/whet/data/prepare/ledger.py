"""The ledger: each conversation read is kept, truncated, split or dropped, and counted with reason and line.

Counts and the first lines of each reason are in ledger.json; ledger.jsonl names every line that was dropped or changed.
"""

from __future__ import annotations

import functools
import json
from collections import Counter
from dataclasses import dataclass, field
from typing import Any, Literal

from whet.data.conversation import Origin

LEDGER_LINES = "ledger.jsonl"
"""The file of a store, and of a run, that has one object for each outcome other than kept unchanged."""
_MAX_EXAMPLES = 5
_MAX_DETAIL = 500  # characters: a detail may quote the user's keys, which have any length

Outcome = Literal["dropped", "truncated", "split", "kept"]
"""Of a conversation in ledger.jsonl; `kept`: as it is, with a note or as a duplicate."""


def ledger_line(source: int, origin: Origin, outcome: Outcome, reason: str, detail: str) -> bytes:
    """A line of ledger.jsonl. `source` is the number of the source in its list, from 0."""
    text = (
        f'{{"source": {source}, "file": {_quote(origin.source)}, "line": {origin.line}, "outcome": "{outcome}", '
        f'"reason": {_quote(reason)}, "detail": {json.dumps(detail[:_MAX_DETAIL], ensure_ascii=False)}}}\n'
    )
    return text.encode(errors="backslashreplace")  # a lone surrogate in a file's name becomes a JSON escape


@functools.lru_cache(maxsize=256)
def _quote(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def with_use(line: bytes, use: str, renamed: dict[tuple[int, str], str]) -> bytes:
    """A line of a store's ledger.jsonl as a run has it: with train or validation, and the files' names of today."""
    if not renamed:
        return f'{{"use": "{use}", '.encode() + line.removeprefix(b"{")
    entry = json.loads(line)
    entry["file"] = renamed.get((entry["source"], entry["file"]), entry["file"])
    text = json.dumps({"use": use, **entry}, ensure_ascii=False) + "\n"
    return text.encode(errors="backslashreplace")


@dataclass(slots=True)
class Account:
    """Counts of one source or of a part of it."""

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
    """Remarks on conversations that were kept."""
    first: dict[str, list[str]] = field(default_factory=dict)
    """The first few origins of each reason and note."""

    def keep(self, tokens: int, supervised: int, ended: bool) -> None:
        """Count a document. `kept` counts conversations, which may be split into several."""
        self.documents += 1
        self.tokens += tokens
        self.supervised += supervised
        self.ended += ended

    def drop(self, reason: str, origin: Origin) -> None:
        """Count a conversation that is left out."""
        self.reasons[reason] += 1
        self.add_example(reason, origin)

    def truncate(self, origin: Origin) -> None:
        """Count a truncated conversation; it may still be dropped."""
        self.truncated += 1
        self.add_example("truncated", origin)

    def note(self, what: str, origin: Origin) -> None:
        """Count a remark on a conversation that is kept."""
        self.notes[what] += 1
        self.add_example(what, origin)

    def add_example(self, reason: str, origin: Origin) -> None:
        examples = self.first.setdefault(reason, [])
        if len(examples) < _MAX_EXAMPLES:
            examples.append(str(origin))

    def add(self, other: Account) -> None:
        """Add the counts of a later part of the same source."""
        for name in ("read", "kept", "truncated", "split", "documents", "tokens", "supervised", "ended", "duplicates"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.reasons.update(other.reasons)
        self.notes.update(other.notes)
        for reason, origins in other.first.items():
            examples = self.first.setdefault(reason, [])
            examples += origins[: _MAX_EXAMPLES - len(examples)]

    def state(self) -> dict[str, Any]:
        """As JSON values, for `restore`."""
        return {name: getattr(self, name) for name in self.__slots__}

    @classmethod
    def restore(cls, state: dict[str, Any]) -> Account:
        return cls(**state | {"reasons": Counter(state["reasons"]), "notes": Counter(state["notes"])})

    def as_dict(self, source: str, use: str) -> dict[str, Any]:
        """The entry in ledger.json. `use` is train or validation."""
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


def has_changes(account: dict[str, Any]) -> bool:
    """Whether ledger.jsonl has lines of this account (`Account.as_dict`)."""
    counts = account["conversations"]
    return any((counts["dropped"], counts["truncated"], counts["split"], account["notes"], account["duplicates"]))


def sum_accounts(accounts: list[dict[str, Any]]) -> dict[str, Any]:
    """The total over the accounts (`Account.as_dict`) of all sources."""
    reasons: dict[str, int] = {}
    notes: dict[str, int] = {}
    first: dict[str, list[str]] = {}
    for account in accounts:
        for reason, places in account["first"].items():
            first.setdefault(reason, []).extend(places)
        for sums, own in ((reasons, account["reasons"]), (notes, account["notes"])):
            for reason, number in own.items():
                sums[reason] = sums.get(reason, 0) + number
    keys = ("in", "kept", "dropped", "truncated", "split")
    return {
        "conversations": {key: sum(account["conversations"][key] for account in accounts) for key in keys},
        "reasons": reasons,
        "notes": notes,
        "duplicates": sum(account["duplicates"] for account in accounts),
        "first": first,
        "tokens": sum(account["tokens"] for account in accounts),
        "supervised_tokens": sum(account["supervised_tokens"] for account in accounts),
    }
