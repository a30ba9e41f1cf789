"""What a generator yields, and how its train and held-out splits are kept apart."""

from __future__ import annotations

import hashlib
from typing import Any, NamedTuple

from whet.data.conversation import Message

SPLITS = ("train", "held-out")
_HELD_OUT_TENTHS = 2


class GeneratedSample(NamedTuple):
    """A conversation that comes from nowhere."""

    messages: tuple[Message, ...]
    tools: tuple[dict[str, Any], ...] = ()


def assign_split(facts: str) -> str:
    """The side on which `facts` are, whatever words they are put in."""
    digest = hashlib.blake2b(facts.encode(), digest_size=4).digest()
    return "held-out" if int.from_bytes(digest) % 10 < _HELD_OUT_TENTHS else "train"
