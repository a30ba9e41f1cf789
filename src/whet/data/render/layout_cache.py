"""Cache of rendered layouts: conversations with the same structure are rendered once, then only filled in, with a fast path to the loss mask."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from whet.core.errors import BadRecordError
from whet.data.conversation import Conversation
from whet.data.render.sentinels import map_texts
from whet.tokenizer.chat_template import ChatTemplate
from whet.tokenizer.traced_strings import TracedStr, TraceGuards

# Skeletons: conversations of one shape are rendered once, then only filled in.
#
# Rendering a template and finding the mask costs more than tokenising. But a template that only prints a text, strips it
# and looks for fixed words in it does the same for every text that has none of these words and no space at its ends. So
# the first conversation of a shape (its roles, its tools, where reasoning stands) is rendered with texts that note what
# is done to them (`whet.tokenizer.traced_strings`); if nothing else was done, what lies between the texts is kept and serves others:
#
# ‹<|im_start|>user⏎› Hi ‹<|im_end|>⏎<|im_start|>assistant⏎› Yes ‹<|im_end|>⏎›

_Position = tuple[int, int]


@dataclass(frozen=True, slots=True)
class CachedLayout:
    """What stands between the texts of a conversation, and where in it the supervised turns begin and end."""

    literals: tuple[str, ...]
    order: tuple[int, ...]
    """Text number order[i] stands between literals[i] and literals[i + 1]."""
    spans: tuple[tuple[_Position, _Position, _Position], ...]
    """Of each supervised turn its three places, each as (literal, offset in it)."""

    def fill(self, texts: Sequence[str]) -> tuple[str, tuple[tuple[int, int, int], ...]]:
        """The rendered text and the places in it."""
        parts = [self.literals[0]]
        for number, literal in zip(self.order, self.literals[1:], strict=True):
            parts.append(texts[number])
            parts.append(literal)
        starts = [0, *itertools.accumulate(map(len, parts))][0:-1:2]
        return "".join(parts), tuple(
            (starts[a] + i, starts[b] + j, starts[c] + k) for (a, i), (b, j), (c, k) in self.spans
        )


def build_cached_layout(
    text: str, extents: Sequence[tuple[int, int, int]], spans: Sequence[tuple[int, int, int]]
) -> CachedLayout | None:
    """A skeleton from a rendering: `extents` are (start, end, number) of its texts in order of appearance.

    None if a supervised turn begins or ends inside a text.
    """
    literals, starts, at = [], [], 0
    for start, end, _ in extents:
        literals.append(text[at:start])
        starts.append(at)
        at = end
    literals.append(text[at:])
    starts.append(at)

    def place(position: int) -> tuple[int, int] | None:
        for number, (start, literal) in enumerate(zip(starts, literals, strict=True)):
            if start <= position <= start + len(literal):
                return number, position - start
        return None

    places = [tuple(place(position) for position in span) for span in spans]
    if any(found is None for turn in places for found in turn):
        return None
    return CachedLayout(tuple(literals), tuple(number for *_, number in extents), tuple(places))  # type: ignore[arg-type]


# Masks without offsets, for conversations that are filled into a skeleton.
#
# Asking the tokenizer which characters a token came from makes it a third slower. It is not needed where turns begin and
# end at control tokens: the skeleton knows how many there are before each, and the tokens of a header are known too. If
# they are not found where they should be, the offsets decide as for any other text.

if TYPE_CHECKING:
    from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class ControlTokenSpan:
    """Where a supervised turn is, counted in control tokens."""

    start_token: int
    """The control token before its header."""
    header: tuple[int, ...]
    """The tokens between that and what is learned."""
    end_token: int
    """The control token that ends it."""
    supervises_end: bool


@dataclass(frozen=True, slots=True)
class FastMask:
    """The turns of a shape."""

    spans: tuple[ControlTokenSpan, ...]
    controls: int

    def compute(self, ids: NDArray[np.int32], is_control: NDArray[np.bool_]) -> NDArray[np.uint8] | None:
        """The mask; None if the tokens are not where they are expected, and offsets must tell."""
        controls = np.flatnonzero(is_control[ids])
        if len(controls) != self.controls:
            return None
        loss = np.zeros(len(ids), dtype=np.uint8)
        for turn in self.spans:
            opened = int(controls[turn.start_token]) + 1
            first = opened + len(turn.header)
            if tuple(ids[opened:first].tolist()) != turn.header:
                return None
            loss[first : int(controls[turn.end_token]) + turn.supervises_end] = 1
        return loss


def build_fast_mask(
    skeleton: CachedLayout, control: re.Pattern[str], encode: Callable[[str], Sequence[int]]
) -> FastMask | None:
    """How to find the turns of a skeleton; None if one does not begin behind, or end with, a control token."""
    found = [
        (number, match.start(), match.end())
        for number, literal in enumerate(skeleton.literals)
        for match in control.finditer(literal)
    ]
    turns = []
    for (opening, start), (ending, marker), (_, end) in skeleton.spans:
        before = [i for i, (number, _, stop) in enumerate(found) if number == opening and stop <= start]
        after = [i for i, (number, begin, _) in enumerate(found) if number == ending and begin == marker]
        if not before or not after:
            return None
        header = skeleton.literals[opening][found[before[-1]][2] : start]
        turns.append(ControlTokenSpan(before[-1], tuple(encode(header)) if header else (), after[0], marker < end))
    return FastMask(tuple(turns), len(found))


# The skeletons of the shapes that were met, and which texts may be filled into them.

_VERIFY_EVERY = 256
_MAX_ENTRIES = 4096  # shapes kept; conversations of hundreds of turns have a shape each

_UNASSIGNED_CODE_POINTS = re.compile("[\U00040000-\U000dffff]")


@dataclass(frozen=True, slots=True)
class _CacheEntry:
    layout: CachedLayout
    controls: int
    fast_mask: FastMask | None
    guard: Callable[[str], bool]


class LayoutCache:
    """Skeletons by shape. A conversation is served only if no text of it could make the template act differently."""

    def __init__(
        self, template: ChatTemplate, in_parts: bool, quick: Callable[[CachedLayout], FastMask | None] = lambda _: None
    ) -> None:
        """`quick` says how the turns of a skeleton are found without offsets."""
        self._template, self._content_parts, self._quick = template, in_parts, quick
        self._entries: dict[Any, _CacheEntry | None] = {}
        self._hits: dict[Any, int] = {}

    def get(
        self, conversation: Conversation
    ) -> tuple[str, tuple[tuple[int, int, int], ...], int, FastMask | None] | None:
        """The rendered text, its supervised places, the number of the template's control tokens and the quick way to
        the mask, if the shape is known and the texts are harmless."""
        known = self._entries.get(_cache_key(conversation))
        if known is None:
            return None
        texts = _message_texts(conversation)
        if not all(map(known.guard, texts)) or not all(map(_has_no_sentinels, texts)):
            return None
        return (*known.layout.fill(texts), known.controls, known.fast_mask)

    def should_verify(self, conversation: Conversation) -> bool:
        """Now and then, more often at first, a filled-in conversation is rendered in full and compared."""
        shape = _cache_key(conversation)
        count = self._hits[shape] = self._hits.get(shape, 0) + 1
        return count % _VERIFY_EVERY == 0 or (count < _VERIFY_EVERY and count & (count - 1) == 0)

    def add(
        self, conversation: Conversation, text: str, extents: Sequence[tuple[int, int, int]] | None,
        spans: Sequence[tuple[int, int, int]], controls: int,
    ) -> None:  # fmt: skip
        """Keep the skeleton of a conversation that was rendered in full, if there is one.

        Where the template found one of the words that it looks for, another conversation may do better.
        """
        shape = _cache_key(conversation)
        if shape is None or shape in self._entries or len(self._entries) >= _MAX_ENTRIES:
            return
        questions, texts = TraceGuards(), _message_texts(conversation)
        if not all(map(questions.predicate(), texts)):
            return
        prints_only = self._is_reusable(conversation, text, questions)
        is_answered = questions.predicate()
        if all(map(is_answered, texts)):
            skeleton = build_cached_layout(text, extents, spans) if prints_only and extents is not None else None
            quick = None if skeleton is None else self._quick(skeleton)
            self._entries[shape] = None if skeleton is None else _CacheEntry(skeleton, controls, quick, is_answered)

    def _is_reusable(self, conversation: Conversation, text: str, questions: TraceGuards) -> bool:
        """Whether texts are only asked what they can answer, also where the places of the turns were looked for."""
        traced = [map_texts(message, lambda text, _: TracedStr(text, questions)) for message in conversation.messages]
        messages = [message.as_dict(self._content_parts) for message in traced]
        turns = [i for i, message in enumerate(traced) if message.role == "assistant"]
        try:
            if "".join([self._template.render_traced(messages, conversation.tools)]) != text:
                return False
            for turn in turns:
                self._template.render_traced(messages[:turn], conversation.tools, prompt=True)
                self._template.render_traced(messages[: turn + 1], conversation.tools)
        except BadRecordError:
            return False
        return not questions.is_data_dependent


def _has_no_sentinels(text: str) -> bool:
    return text.isascii() or _UNASSIGNED_CODE_POINTS.search(text) is None


def _cache_key(conversation: Conversation) -> Any:
    """What a template may treat differently, texts aside; None where there are tool calls, which are too manifold."""
    roles = []
    for message in conversation.messages:
        if message.tool_calls or message.tool_call_id is not None or message.name is not None:
            return None
        roles.append((message.role, bool(message.reasoning), bool(message.content), message.train))
    return (*roles, json.dumps(conversation.tools) if conversation.tools else "")


def _message_texts(conversation: Conversation) -> list[str]:
    """The texts in the order of the slots: reasoning, then content."""
    return [text for message in conversation.messages for text in (message.reasoning, message.content) if text]
