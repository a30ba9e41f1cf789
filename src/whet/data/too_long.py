"""Splitting what is too long: conversations between exchanges, plain text into windows."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace

from whet.data.conversation import Conversation, Message
from whet.data.render import Rendered

Exchange = tuple[Message, ...]
"""A question and all that answers it: user turns, then assistant turns with their tools' results."""


def leading(conversation: Conversation) -> Exchange:
    """The system messages at the start, which every piece repeats."""
    return tuple(itertools.takewhile(lambda m: m.role in ("system", "developer"), conversation.messages))


def exchanges(conversation: Conversation) -> list[Exchange]:
    """The messages after the system's, cut before each user turn that follows an answer."""
    found: list[list[Message]] = []
    for before, message in itertools.pairwise((None, *conversation.messages[len(leading(conversation)) :])):
        assert message is not None
        if before is None or (message.role == "user" and before.role != "user"):
            found.append([])
        found[-1].append(message)
    return [tuple(part) for part in found]


def join(conversation: Conversation, parts: Sequence[Exchange]) -> Conversation:
    """A conversation of its own from some exchanges."""
    return replace(conversation, messages=(*leading(conversation), *itertools.chain(*parts)))


def windows(document: Rendered, limit: int) -> list[Rendered]:
    """Contiguous pieces of at most `limit` tokens; together they are the document, token by token."""
    total = len(document.ids)
    edges = [*range(0, total, limit), total]
    if edges[-1] - edges[-2] == 1 and limit > 2:  # a window of one token has nothing to learn it from
        edges[-2] -= 1
    return [
        replace(document, ids=document.ids[a:b], loss=document.loss[a:b], ends=document.ends and b == total)
        for a, b in itertools.pairwise(edges)
    ]
