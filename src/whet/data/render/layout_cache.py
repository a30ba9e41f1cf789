"""Cache of rendered layouts: conversations with the same structure are rendered once, then only filled in.

Rendering a template and locating the mask costs more than tokenizing. But a template that only prints a text, strips it
and searches it for constants treats alike all texts that contain none of these constants and no whitespace at the ends.
So the first conversation of each structure (its roles, its tools, which messages have reasoning) is rendered with
strings that record what the template does with them (`whet.tokenizer.traced_strings`). If it does nothing else, the
literals between the texts are kept and reused:

    ‹<|im_start|>user⏎› Hi ‹<|im_end|>⏎<|im_start|>assistant⏎› Yes ‹<|im_end|>⏎›

A cached layout can also give the mask without offsets (`FastMask`). A sample of all hits is rendered in full and
compared (`LayoutCache.should_verify`).
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from whet.core.errors import BadRecordError
from whet.data.conversation import Conversation
from whet.data.render.sentinels import FIRST_SENTINEL, LAST_SENTINEL, map_texts
from whet.tokenizer.chat_template import ChatTemplate
from whet.tokenizer.traced_strings import TracedStr, TraceGuards

if TYPE_CHECKING:
    from numpy.typing import NDArray

REASONING_TAG = re.compile(
    r"[<\[][^<>\[\]]*(?:think|thought|reason)[^<>\[\]]*[>\]]|<\|channel>thought|<channel\|>", re.IGNORECASE
)
"""What opens or closes reasoning: `<think>`, `[/THINK]`, `<|START_THINKING|>`, Gemma 4's `<|channel>thought`."""

_VERIFY_EVERY = 256  # hits
_MAX_ENTRIES = 4096  # conversations of hundreds of turns have a structure each

Span = tuple[int, int, int]
"""(start, start of the end-of-turn marker, end) of a supervised turn. The last two are equal where the template
rewrites the ends of earlier turns, so that there is no marker to train on."""
_Position = tuple[int, int]
"""(index of a literal, offset in it)."""


@dataclass(frozen=True, slots=True)
class Layout:
    """The rendered text of a conversation and the spans of characters that the model has to produce."""

    text: str
    spans: tuple[Span, ...]
    supervise_all: bool = False
    """Everything is supervised except `spans`."""
    reasoning_dropped: bool = False
    tools_dropped: bool = False
    missing_prefills: tuple[str, ...] = ()
    """What generation prompts open, such as `<think>`, and the turns have not."""
    prompt_differs: bool = False
    """A generation prompt has other whitespace than the turn."""
    context_differs: bool = False
    """A prompt has other text than the conversation before the last message."""
    template_special_tokens: int | None = None
    """How many special tokens the template writes; any more come from the messages. None: unknown."""
    fast_mask: FastMask | None = field(default=None, compare=False)
    """Gives the mask without offsets; from the cache only."""


@dataclass(frozen=True, slots=True)
class CachedLayout:
    """The literals between the texts of a conversation, and the supervised spans in terms of them."""

    literals: tuple[str, ...]
    order: tuple[int, ...]
    """Text number order[i] goes between literals[i] and literals[i + 1]."""
    spans: tuple[tuple[_Position, _Position, _Position], ...]

    def fill(self, texts: Sequence[str]) -> tuple[str, tuple[Span, ...]]:
        """The rendered text and its supervised spans."""
        parts = [self.literals[0]]
        for number, literal in zip(self.order, self.literals[1:], strict=True):
            parts.append(texts[number])
            parts.append(literal)
        starts = [0, *itertools.accumulate(map(len, parts))][0:-1:2]
        return "".join(parts), tuple(
            (starts[a] + i, starts[b] + j, starts[c] + k) for (a, i), (b, j), (c, k) in self.spans
        )


def build_cached_layout(text: str, text_spans: Sequence[Span], spans: Sequence[Span]) -> CachedLayout | None:
    """Cut a rendering at its texts. `text_spans` are (start, end, number) of these in order of appearance.

    None if a supervised turn starts or ends inside a text.
    """
    literals, starts, at = [], [], 0
    for start, end, _ in text_spans:
        literals.append(text[at:start])
        starts.append(at)
        at = end
    literals.append(text[at:])
    starts.append(at)

    def locate(position: int) -> _Position | None:
        for number, (start, literal) in enumerate(zip(starts, literals, strict=True)):
            if start <= position <= start + len(literal):
                return number, position - start
        return None

    located = [tuple(locate(position) for position in span) for span in spans]
    if any(position is None for span in located for position in span):
        return None
    return CachedLayout(tuple(literals), tuple(number for *_, number in text_spans), tuple(located))  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True)
class SpecialTokenSpan:
    """A supervised turn, located by counting the special tokens of the rendering."""

    start_token: int
    """Which special token precedes the header."""
    header: tuple[int, ...]
    """The ids between that token and the first supervised one."""
    end_token: int
    """Which special token ends the turn."""
    supervises_end: bool


@dataclass(frozen=True, slots=True)
class FastMask:
    """The mask of a cached layout without offsets, which would make the tokenizer a third slower."""

    spans: tuple[SpecialTokenSpan, ...]
    special_tokens: int

    def compute(self, ids: NDArray[np.int32], is_special: NDArray[np.bool_]) -> NDArray[np.uint8] | None:
        """The loss mask; None if the tokens are not as expected, so that offsets have to be used."""
        found = np.flatnonzero(is_special[ids])
        if len(found) != self.special_tokens:
            return None
        loss = np.zeros(len(ids), dtype=np.uint8)
        for span in self.spans:
            header = int(found[span.start_token]) + 1
            first = header + len(span.header)
            if tuple(ids[header:first].tolist()) != span.header:
                return None
            loss[first : int(found[span.end_token]) + span.supervises_end] = 1
        return loss


def build_fast_mask(
    layout: CachedLayout, markers: re.Pattern[str], special: Container[str], encode: Callable[[str], Sequence[int]]
) -> FastMask | None:
    """None unless each supervised turn has a special token before its header and ends with one. `markers` finds all
    added tokens, since one that is not special can contain one that is."""
    found = [
        (number, match.start(), match.end())
        for number, literal in enumerate(layout.literals)
        for match in markers.finditer(literal)
        if match.group() in special
    ]
    spans = []
    for (first, start), (last, marker), (_, end) in layout.spans:
        before = [i for i, (number, _, stop) in enumerate(found) if number == first and stop <= start]
        after = [i for i, (number, begin, _) in enumerate(found) if number == last and begin == marker]
        if not before or not after:
            return None
        header = layout.literals[first][found[before[-1]][2] : start]
        spans.append(SpecialTokenSpan(before[-1], tuple(encode(header)) if header else (), after[0], marker < end))
    return FastMask(tuple(spans), len(found))


def _straddling_markers(layout: CachedLayout, markers: tuple[str, ...]) -> set[str]:
    """The markers that a text can form with the literal beside it: `[e~` before the literal `[e~[` is the marker
    `[e~[`, followed by `e~[`, and counting special tokens does not tell."""
    after, before = (set(literals) - {""} for literals in (layout.literals[1:], layout.literals[:-1]))
    return {marker for literal in after for marker in _markers_ending_with(literal, markers)} | {
        marker for literal in before for marker in _markers_starting_with(literal, markers)
    }


@lru_cache(maxsize=1024)  # structures share their literals, and some tokenizers have thousands of markers
def _markers_ending_with(literal: str, markers: tuple[str, ...]) -> list[str]:
    """The markers that can begin before a literal and end in it or after it."""
    candidates = [marker for marker in markers if literal[0] in marker[1:]]
    return [
        marker
        for marker in candidates
        if any(literal.startswith(marker[i:]) or marker[i:].startswith(literal) for i in range(1, len(marker)))
    ]


@lru_cache(maxsize=1024)
def _markers_starting_with(literal: str, markers: tuple[str, ...]) -> list[str]:
    """The markers that can begin in a literal or before it and end after it."""
    candidates = [marker for marker in markers if literal[-1] in marker[:-1]]
    return [
        marker
        for marker in candidates
        if any(literal.endswith(marker[:i]) or marker[:i].endswith(literal) for i in range(1, len(marker)))
    ]


@dataclass(frozen=True, slots=True)
class _CacheEntry:
    layout: CachedLayout
    template_special_tokens: int
    missing_prefills: tuple[str, ...]
    prompt_differs: bool
    context_differs: bool
    fast_mask: FastMask | None
    is_safe: Callable[[str], bool]
    """Whether the template treats a text like those that the entry was made of."""


class LayoutCache:
    """Cached layouts by structure. A conversation hits only if none of its texts could make the template branch."""

    def __init__(
        self,
        template: ChatTemplate,
        content_parts: bool,
        train_on: str,
        markers: re.Pattern[str],
        is_special: Mapping[str, bool],
        encode: Callable[[str], Sequence[int]],
    ) -> None:
        """`markers` finds added tokens in a text; `is_special` has all of them; `encode` gives the ids of a text."""
        self._template, self._content_parts, self._supervise_all = template, content_parts, train_on == "all"
        self._markers, self._all_markers, self._encode = markers, tuple(is_special), encode
        self._special = {text for text, special in is_special.items() if special}
        self._entries: dict[Any, _CacheEntry | None] = {}
        self._hits: dict[Any, int] = {}

    def get(self, conversation: Conversation) -> Layout | None:
        entry = self._entries.get(_cache_key(conversation))
        if entry is None:
            return None
        texts = _message_texts(conversation)
        if not all(map(entry.is_safe, texts)) or not all(map(_has_no_sentinels, texts)):
            return None
        text, spans = entry.layout.fill(texts)
        return Layout(
            text, spans, self._supervise_all, template_special_tokens=entry.template_special_tokens,
            missing_prefills=entry.missing_prefills, prompt_differs=entry.prompt_differs,
            context_differs=entry.context_differs, fast_mask=entry.fast_mask,
        )  # fmt: skip

    def should_verify(self, conversation: Conversation) -> bool:
        """Count a hit; True for hits 1, 2, 4, 8, … and every 256th of a structure."""
        key = _cache_key(conversation)
        count = self._hits[key] = self._hits.get(key, 0) + 1
        return count % _VERIFY_EVERY == 0 or (count < _VERIFY_EVERY and count & (count - 1) == 0)

    def add(self, conversation: Conversation, layout: Layout, text_spans: Sequence[Span] | None) -> None:
        """Keep the layout of a conversation that was rendered in full, or that its structure cannot be cached.

        Where the template found one of its constants in a text, nothing is kept: another conversation may do better.
        """
        key = _cache_key(conversation)
        if key is None or key in self._entries or len(self._entries) >= _MAX_ENTRIES:
            return
        guards, texts = TraceGuards(), _message_texts(conversation)
        if not all(map(guards.predicate(), texts)):
            return
        reusable = self._is_reusable(conversation, layout.text, guards)
        guards.searched.update(tag for prefill in layout.missing_prefills for tag in REASONING_TAG.findall(prefill))
        is_safe = guards.predicate()
        if not all(map(is_safe, texts)):
            return
        cached = None
        if reusable and text_spans is not None:
            cached = build_cached_layout(layout.text, text_spans, layout.spans)
        if cached is None:
            self._entries[key] = None
            return
        fast_mask = None
        if not self._supervise_all:
            fast_mask = build_fast_mask(cached, self._markers, self._special, self._encode)
        if fast_mask is not None:
            guards.searched.update(_straddling_markers(cached, self._all_markers))
            is_safe = guards.predicate()
        assert layout.template_special_tokens is not None
        self._entries[key] = _CacheEntry(
            cached, layout.template_special_tokens, layout.missing_prefills, layout.prompt_differs,
            layout.context_differs, fast_mask, is_safe,
        )  # fmt: skip

    def _is_reusable(self, conversation: Conversation, text: str, guards: TraceGuards) -> bool:
        """Whether `guards` describe all that the template does with the texts, in each rendering that the layout was
        computed from."""
        traced = [map_texts(message, lambda text, _: TracedStr(text, guards)) for message in conversation.messages]
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
        return not guards.is_data_dependent


_SENTINEL = re.compile(f"[{chr(FIRST_SENTINEL)}-{chr(LAST_SENTINEL)}]")


def _has_no_sentinels(text: str) -> bool:
    return text.isascii() or _SENTINEL.search(text) is None


def _cache_key(conversation: Conversation) -> Any:
    """All that a template may branch on, apart from the texts. None with tool calls, which are too different, and with
    content in parts."""
    roles = []
    for message in conversation.messages:
        if message.tool_calls or message.tool_call_id is not None or message.name is not None or message.part_lengths:
            return None
        roles.append((message.role, bool(message.reasoning), bool(message.content), message.train))
    return (*roles, json.dumps(conversation.tools) if conversation.tools else "")


def _message_texts(conversation: Conversation) -> list[str]:
    """The texts in the order of `text_slots`, which is slower, of messages without tool calls."""
    return [text for message in conversation.messages for text in (message.reasoning, message.content) if text]
