"""Tools that a model uses in the middle of an answer: what they say is put into it, token by token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class Watcher(Protocol):
    """Sees one answer grow."""

    def see(self, token: int) -> Sequence[int]:
        """Told of every token, its own ones too; gives the tokens that must follow now, or none. Where it gives some,
        a token that would end the answer does not."""


class Tools(Protocol):
    """What `generate(..., tools=...)` takes."""

    def watch(self) -> Watcher:
        """A watcher for a new answer."""
