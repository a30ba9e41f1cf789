"""Sentinel rendering: replace each character of the messages by a unique code point and see where a template puts it.

The texts of a message are its reasoning, its content, and the name and string arguments of each tool call. A sentinel
is a code point of planes 4 to 13, where Unicode assigns no characters: in a rendering it can only come from a message,
and its value tells from which character. `whet.data.render.renderer` explains how this becomes a loss mask.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from whet.core.errors import BadRecordError
from whet.data.conversation import Message
from whet.data.render.shared_prefix import common_prefix_length

if TYPE_CHECKING:
    from numpy.typing import NDArray

FIRST_SENTINEL, LAST_SENTINEL = 0x40000, 0xDFFFF  # planes 4 to 13: no character is assigned there
_SENTINELS = LAST_SENTINEL - FIRST_SENTINEL + 1

TOO_LONG_TO_MASK = "too long to mask"
"""The ledger's reason for a conversation with more characters than there are sentinels."""

SHOWN_CHARACTERS = 40  # of a text in an error message
_OTHER_TEMPLATE = "Use a template that writes it unchanged: data.template=FILE.jinja"

TextTransform = Callable[[str, str], str]
"""(text, kind) → text; the kind is reasoning, content, name or value."""


def map_texts(message: Message, transform: TextTransform) -> Message:
    """Apply `transform` to each non-empty text of a message, in a fixed order."""
    reasoning = transform(message.reasoning, "reasoning") if message.reasoning else ""
    content = transform(message.content, "content") if message.content else ""
    tool_calls = tuple(
        replace(call, name=transform(call.name, "name"), arguments=_map_argument_texts(call.arguments, transform))
        for call in message.tool_calls
    )
    return replace(message, reasoning=reasoning, content=content, tool_calls=tool_calls)


def _map_argument_texts(value: Any, transform: TextTransform) -> Any:
    if isinstance(value, str):
        return transform(value, "value") if value else value
    if isinstance(value, dict):
        return {key: _map_argument_texts(part, transform) for key, part in value.items()}
    return [_map_argument_texts(part, transform) for part in value] if isinstance(value, list) else value


@dataclass(frozen=True, slots=True)
class TextSlot:
    """One text of a conversation, and what a template may do with it."""

    message: int
    """Index of its message."""
    text: str
    kind: str
    """See `TextTransform`."""
    droppable: int
    """Number of leading characters that the template may drop."""

    @property
    def may_repeat(self) -> bool:
        """The template may print it more than once, as a tool's result often repeats the tool's name."""
        return self.kind == "name"


def text_slots(messages: Sequence[Message]) -> list[TextSlot]:
    """The texts of messages that a template prints, in the order in which `map_texts` visits them.

    Many templates drop the reasoning of earlier answers on purpose. That of the answer to the last user turn must stay,
    unless it is empty.
    """
    slots: list[TextSlot] = []
    last_user = max((i for i, message in enumerate(messages) if message.role == "user"), default=0)
    for i, message in enumerate(messages):

        def add_slot(
            text: str, kind: str, index: int = i, answer: bool = message.role == "assistant", old: bool = i < last_user
        ) -> str:
            droppable = 0
            if answer:
                droppable = len(text) if old and kind == "reasoning" else _inline_reasoning_length(text, old)
            slots.append(TextSlot(index, text, kind, droppable))
            return text

        map_texts(message, add_slot)
    return slots


def _inline_reasoning_length(text: str, old: bool) -> int:
    """Length of reasoning that is part of the content, up to and including `</think>`; unless `old`, if it is empty."""
    end = text.rfind("</think>")
    if end < 0 or not (old or text[:end].strip() in ("", "<think>")):
        return 0
    return end + len("</think>")


class SentinelMessages:
    """The messages with sentinels in place of their characters."""

    def __init__(
        self,
        messages: Sequence[Message],
        slots: Sequence[TextSlot],
        content_parts: bool,
        constants: Iterable[str] | None = None,
    ) -> None:
        """Whitespace is never replaced, because templates strip it. With `constants`, the strings that the template
        compares with, neither are these, quotes, backslashes and control characters."""
        texts = [slot.text for slot in slots]
        codes = _to_code_points("".join(texts))
        if len(codes) > _SENTINELS:
            raise BadRecordError(
                TOO_LONG_TO_MASK, f"it has {len(codes)} characters; a loss mask is possible up to {_SENTINELS}"
            )
        if _is_sentinel(codes).any():
            raise BadRecordError("unassigned characters", "the text contains code points that Unicode does not assign")
        kept = _kept_characters(codes, texts, constants)
        lengths = [len(text) for text in texts]
        self._originals = codes
        self._slots = slots
        self._slot_of = np.repeat(np.arange(len(texts)), lengths)
        self._message_of = np.repeat([slot.message for slot in slots], lengths).astype(np.int64)
        self._starts = np.cumsum([0, *lengths])
        if constants is not None:
            self._replace_answers_of_constants(messages, kept)
        sentinels = np.where(kept, codes, np.arange(len(codes), dtype=np.uint32) + FIRST_SENTINEL)
        self._is_replaced = _is_sentinel(sentinels)
        self._is_droppable, self._may_repeat = np.zeros((2, len(codes)), dtype=bool)
        for slot, start in zip(slots, self._starts, strict=False):
            self._is_droppable[start : start + slot.droppable] = True
            self._may_repeat[start : start + len(slot.text)] = slot.may_repeat
        self._texts = [_from_code_points(sentinels[a:b]) for a, b in itertools.pairwise(self._starts)]
        replacements = iter(self._texts)
        self.messages = [
            map_texts(message, lambda *_: next(replacements)).as_dict(content_parts) for message in messages
        ]

    def _replace_answers_of_constants(self, messages: Sequence[Message], kept: NDArray[np.bool_]) -> None:
        """An answer that consists of constants, such as `tool`, would leave no trace: only its whitespace is kept."""
        leaving_traces = set(self._message_of[~kept].tolist())
        for slot, (start, end) in zip(self._slots, itertools.pairwise(self._starts), strict=True):
            is_answer = messages[slot.message].role == "assistant" and self.has_answer(slot.message)
            if is_answer and slot.message not in leaving_traces:
                kept[start:end] = np.isin(self._originals[start:end], _WHITESPACE_CODES)

    def verify(self, text: str, sentinel_text: str) -> SentinelRendering:
        """Prove that `sentinel_text`, the rendering of the sentinels, has the characters of `text` in the same places.

        Restoring the originals must give `text`. Each character must appear exactly once, except where its slot allows
        otherwise.
        """
        sentinel_text = self.unescape(sentinel_text)
        codes = _to_code_points(sentinel_text)
        positions = np.flatnonzero(_is_sentinel(codes))
        sources = codes[positions] - FIRST_SENTINEL
        codes[positions] = self._originals[sources]
        restored = _from_code_points(codes)
        if restored != text:
            same = common_prefix_length(restored, text)
            written, given = (each[same : same + SHOWN_CHARACTERS] for each in (text, restored))
            raise BadRecordError(
                "template rewrites",
                f"the chat template changes the text of a message: it writes {written!r} instead of {given!r}, so no "
                f"exact mask exists. {_OTHER_TEMPLATE}",
            )
        times = np.bincount(sources, minlength=len(self._originals))
        if ((times > 1) & ~self._may_repeat).any():
            raise BadRecordError(
                "template repeats text",
                f"the chat template repeats the text of a message, so no exact mask exists. {_OTHER_TEMPLATE}",
            )
        missing = self._is_replaced & (times == 0)
        if (missing & ~self._is_droppable).any():
            slot = self._slots[int(self._slot_of[np.flatnonzero(missing & ~self._is_droppable)[0]])]
            what = {"content": "text", "reasoning": "the reasoning"}.get(slot.kind, "a tool call")
            raise BadRecordError(
                "template drops text",
                f"the chat template drops {what} of message {slot.message + 1} (role "
                f"'{self.messages[slot.message]['role']}'). Remove it from the data, or use a template that writes it: "
                "data.template=FILE.jinja",
            )
        if (times > 1).any():
            positions = _first_occurrences(_to_code_points(sentinel_text))
            sources = _to_code_points(sentinel_text)[positions] - FIRST_SENTINEL
        return SentinelRendering(
            sentinel_text,
            positions,
            self._message_of[sources],
            self._slot_of[sources],
            sources,
            bool(missing.any()),
        )

    def count_unreplaced(self, pattern: re.Pattern[str]) -> int:
        """How often the pattern occurs in the texts although they are replaced; droppable characters do not count."""
        return sum(
            len(pattern.findall(text, slot.droppable)) for slot, text in zip(self._slots, self._texts, strict=True)
        )

    def has_answer(self, message: int) -> bool:
        """Whether the content of a message is more than reasoning."""
        contents = (slot.text for slot in self._slots if slot.message == message and slot.kind == "content")
        return any(text[_inline_reasoning_length(text, old=True) :].strip() for text in contents)

    def whitespace_at_end(self, message: int) -> str:
        """The whitespace that the last text of a message ends with."""
        text = next((slot.text for slot in reversed(self._slots) if slot.message == message), "")
        return text[len(text.rstrip()) :]

    @staticmethod
    def unescape(sentinel_text: str) -> str:
        """The rendering with sentinels that the template escaped as themselves. Python's `repr` escapes all unassigned
        code points, as in arguments that are lists, and `tojson(ensure_ascii=True)` all that are not ASCII."""

        def sentinel(match: re.Match[str]) -> str:
            code, high, low = (int(digits, 16) if digits else 0 for digits in match.groups())
            code = code or 0x10000 + (high - 0xD800) * 0x400 + low - 0xDC00
            return chr(code) if FIRST_SENTINEL <= code <= LAST_SENTINEL else match[0]

        return _ESCAPED.sub(sentinel, sentinel_text)

    @staticmethod
    def tail(sentinel_text: str) -> str:
        """What follows the last sentinel that occurs for the first time."""
        sentinel_text = SentinelMessages.unescape(sentinel_text)
        positions = _first_occurrences(_to_code_points(sentinel_text))
        return sentinel_text[int(positions[-1]) + 1 :] if len(positions) else sentinel_text

    def text_spans(self, rendering: SentinelRendering) -> list[tuple[int, int, int]] | None:
        """(start, end, slot) of every text in order of appearance; None unless each is printed whole and unbroken."""
        found = []
        for slot in dict.fromkeys(rendering.slots.tolist()):
            mine = np.flatnonzero(rendering.slots == slot)
            start, length = int(rendering.positions[mine[0]]), len(self._slots[slot].text)
            if (rendering.positions[mine] - start != rendering.sources[mine] - self._starts[slot]).any():
                return None
            found.append((start, start + length, slot))
        if len(found) < len(self._slots) or any(a[1] > b[0] for a, b in itertools.pairwise(found)):
            return None
        return found


@dataclass(frozen=True, slots=True)
class SentinelRendering:
    """A verified rendering of sentinels. The arrays have one entry for each sentinel in it."""

    text: str
    positions: NDArray[np.int64]
    messages: NDArray[np.int64]
    slots: NDArray[np.int64]
    sources: NDArray[np.uint32]
    """Index of the replaced character in all texts."""
    reasoning_dropped: bool

    def message_span(self, message: int) -> tuple[int, int]:
        """(start, end) of a message's text in the rendering."""
        mine = np.flatnonzero(self.messages == message)
        if not len(mine):
            raise BadRecordError("empty turn", f"message {message + 1} (role 'assistant') has no text to train on")
        slots, steps = self.slots[mine], np.diff(self.sources[mine].astype(np.int64))
        if len(mine) != mine[-1] - mine[0] + 1 or (steps[slots[1:] == slots[:-1]] <= 0).any():
            raise BadRecordError(
                "template reorders text",
                f"the chat template reorders the text of message {message + 1}. {_OTHER_TEMPLATE}",
            )
        return int(self.positions[mine[0]]), int(self.positions[mine[-1]]) + 1

    def end_of_previous_sentinel(self, position: int) -> int:
        """The position after the last sentinel before `position`; 0 if there is none."""
        count = int(np.searchsorted(self.positions, position))
        return int(self.positions[count - 1]) + 1 if count else 0


_ESCAPED = re.compile(r"\\U000([4-9a-d][0-9a-f]{4})|\\u(d[89ab][0-9a-f]{2})\\u(d[c-f][0-9a-f]{2})")


def _to_code_points(text: str) -> NDArray[np.uint32]:
    return np.frombuffer(text.encode("utf-32-le"), dtype=np.uint32).copy()


def _from_code_points(codes: NDArray[np.uint32]) -> str:
    return codes.astype("<u4").tobytes().decode("utf-32-le")


def _is_sentinel(codes: NDArray[np.uint32]) -> NDArray[np.bool_]:
    return (codes >= FIRST_SENTINEL) & (codes <= LAST_SENTINEL)


def _first_occurrences(codes: NDArray[np.uint32]) -> NDArray[np.int64]:
    """Where each sentinel occurs for the first time."""
    positions = np.flatnonzero(_is_sentinel(codes))
    return np.sort(positions[np.unique(codes[positions], return_index=True)[1]])


_WHITESPACE_CODES = np.array([code for code in range(0x3001) if chr(code).isspace()], np.uint32)
_QUOTE_CODES = np.array([ord(char) for char in "\"'\\"], np.uint32)


def _kept_characters(
    codes: NDArray[np.uint32], texts: Sequence[str], constants: Iterable[str] | None
) -> NDArray[np.bool_]:
    """Which characters stay as they are: templates strip whitespace, escape quotes and search for constants."""
    kept: NDArray[np.bool_] = np.isin(codes, _WHITESPACE_CODES)
    if constants is None:
        return kept
    kept |= np.isin(codes, _QUOTE_CODES) | (codes < 0x20)
    offset = 0
    for text in texts:
        for constant in constants:
            at = text.find(constant)
            while at >= 0:
                kept[offset + at : offset + at + len(constant)] = True
                at = text.find(constant, at + len(constant))
        offset += len(text)
    return kept
