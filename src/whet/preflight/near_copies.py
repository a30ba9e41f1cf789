"""Validation conversations that are in the training data but for whitespace, the system message or a loss mask."""

from __future__ import annotations

import json
from collections.abc import Iterable

from whet.data.conversation import Conversation, MarkedText, Message, Origin, PlainText


def find_near_copies(items: Iterable[tuple[object, bool]]) -> list[tuple[Origin, Origin]]:
    """The places of a validation conversation and of one with the same words to train on, for each that has one.
    `items`: with whether they are for validation. Linear in time; keeps the hash and the place of each."""
    trained: dict[int, Origin] = {}
    held: list[tuple[int, Origin]] = []
    for item, is_held in items:
        if not isinstance(item, (Conversation, PlainText, MarkedText)):
            continue
        key = hash(_normalize(item))
        if is_held:
            held.append((key, item.origin))
        else:
            trained.setdefault(key, item.origin)
    return [(origin, trained[key]) for key, origin in held if key in trained]


def _normalize(item: Conversation | PlainText | MarkedText) -> tuple[object, ...]:
    if not isinstance(item, Conversation):
        return tuple(item.text.split())
    return tuple(_normalize_message(each) for each in item.messages if each.role not in ("system", "developer"))


def _normalize_message(message: Message) -> tuple[str, ...]:
    calls = [(call.name, json.dumps(call.arguments, sort_keys=True)) for call in message.tool_calls]
    return message.role, str(calls), *message.reasoning.split(), "", *message.content.split()
