"""The skeletons of the shapes that were met, and which texts may be filled into them."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from whet.data.conversation import BadRecordError, Conversation
from whet.data.dye import map_texts
from whet.data.quick import Quick
from whet.data.skeleton import Skeleton, skeleton_of
from whet.data.template import ChatTemplate
from whet.data.traced import Questions, Traced

_CHECK_EVERY = 256
_MOST = 4096  # shapes kept; conversations of hundreds of turns have a shape each

_UNASSIGNED = re.compile("[\U00040000-\U000dffff]")


@dataclass(frozen=True, slots=True)
class _Known:
    skeleton: Skeleton
    controls: int
    quick: Quick | None
    is_answered: Callable[[str], bool]


class Shapes:
    """Skeletons by shape. A conversation is served only if no text of it could make the template act differently."""

    def __init__(
        self, template: ChatTemplate, in_parts: bool, quick: Callable[[Skeleton], Quick | None] = lambda _: None
    ) -> None:
        """`quick` says how the turns of a skeleton are found without offsets."""
        self._template, self._in_parts, self._quick = template, in_parts, quick
        self._known: dict[Any, _Known | None] = {}
        self._served: dict[Any, int] = {}

    def fill(
        self, conversation: Conversation
    ) -> tuple[str, tuple[tuple[int, int, int], ...], int, Quick | None] | None:
        """The rendered text, its supervised places, the number of the template's control tokens and the quick way to
        the mask, if the shape is known and the texts are harmless."""
        known = self._known.get(_shape(conversation))
        if known is None:
            return None
        texts = _texts(conversation)
        if not all(map(known.is_answered, texts)) or not all(map(_is_assigned, texts)):
            return None
        return (*known.skeleton.fill(texts), known.controls, known.quick)

    def is_due_for_a_check(self, conversation: Conversation) -> bool:
        """Now and then, more often at first, a filled-in conversation is rendered in full and compared."""
        shape = _shape(conversation)
        count = self._served[shape] = self._served.get(shape, 0) + 1
        return count % _CHECK_EVERY == 0 or (count < _CHECK_EVERY and count & (count - 1) == 0)

    def learn(
        self, conversation: Conversation, text: str, extents: Sequence[tuple[int, int, int]] | None,
        spans: Sequence[tuple[int, int, int]], controls: int,
    ) -> None:  # fmt: skip
        """Keep the skeleton of a conversation that was rendered in full, if there is one.

        Where the template found one of the words that it looks for, another conversation may do better.
        """
        shape = _shape(conversation)
        if shape is None or shape in self._known or len(self._known) >= _MOST:
            return
        questions, texts = Questions(), _texts(conversation)
        if not all(map(questions.closed(), texts)):
            return
        prints_only = self._prints_only(conversation, text, questions)
        is_answered = questions.closed()
        if all(map(is_answered, texts)):
            skeleton = skeleton_of(text, extents, spans) if prints_only and extents is not None else None
            quick = None if skeleton is None else self._quick(skeleton)
            self._known[shape] = None if skeleton is None else _Known(skeleton, controls, quick, is_answered)

    def _prints_only(self, conversation: Conversation, text: str, questions: Questions) -> bool:
        """Whether texts are only asked what they can answer, also where the places of the turns were looked for."""
        traced = [map_texts(message, lambda text, _: Traced(text, questions)) for message in conversation.messages]
        messages = [message.as_dict(self._in_parts) for message in traced]
        turns = [i for i, message in enumerate(traced) if message.role == "assistant"]
        try:
            if "".join([self._template.trace(messages, conversation.tools)]) != text:
                return False
            for turn in turns:
                self._template.trace(messages[:turn], conversation.tools, prompt=True)
                self._template.trace(messages[: turn + 1], conversation.tools)
        except BadRecordError:
            return False
        return not questions.inspected


def _is_assigned(text: str) -> bool:
    return text.isascii() or _UNASSIGNED.search(text) is None


def _shape(conversation: Conversation) -> Any:
    """What a template may treat differently, texts aside; None where there are tool calls, which are too manifold."""
    roles = []
    for message in conversation.messages:
        if message.calls or message.call_id is not None or message.name is not None:
            return None
        roles.append((message.role, bool(message.reasoning), bool(message.content), message.learn))
    return (*roles, json.dumps(conversation.tools) if conversation.tools else "")


def _texts(conversation: Conversation) -> list[str]:
    """The texts in the order of the slots: reasoning, then content."""
    return [text for message in conversation.messages for text in (message.reasoning, message.content) if text]
