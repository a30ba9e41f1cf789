"""Sentinel rendering: replace every character of the messages by a unique unassigned code point to see where a template puts it."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from whet.core.errors import BadRecordError
from whet.data.conversation import Message

# Dye: every character of a conversation's texts replaced by a code point of its own, so that a rendering shows where
# each went.
#
# The texts of a message are its reasoning, its content, and of each tool call the name and the texts in its arguments.
# Unicode assigns nothing in the planes that the dye is taken from, so nothing else in a rendering looks like it.

if TYPE_CHECKING:
    from numpy.typing import NDArray

_FIRST_SENTINEL, _END_OF_SENTINELS = 0x40000, 0xE0000  # planes 4 to 13: no character is assigned there


TOO_LONG_TO_MASK = "too long to mask"
"""The ledger's reason for a conversation with more characters than there is dye for."""

TextTransform = Callable[[str, str], str]


def map_texts(message: Message, change: TextTransform) -> Message:
    """The message with each of its texts changed; the second argument is the kind: reasoning, content, name, value."""
    reasoning = change(message.reasoning, "reasoning") if message.reasoning else ""
    content = change(message.content, "content") if message.content else ""
    calls = tuple(
        replace(call, name=change(call.name, "name"), arguments=_map_argument_texts(call.arguments, change))
        for call in message.tool_calls
    )
    return replace(message, reasoning=reasoning, content=content, tool_calls=calls)


def _map_argument_texts(value: Any, change: TextTransform) -> Any:
    if isinstance(value, str):
        return change(value, "value") if value else value
    if isinstance(value, dict):
        return {key: _map_argument_texts(part, change) for key, part in value.items()}
    return [_map_argument_texts(part, change) for part in value] if isinstance(value, list) else value


@dataclass(frozen=True, slots=True)
class TextSlot:
    """A text of a conversation: the number of its message, how many characters of it a template may leave out, and
    whether it may write it again (a tool's result often names the tool that was called)."""

    turn: int
    text: str
    may_vanish: int
    may_repeat: bool


def text_slots(messages: Sequence[Message]) -> list[TextSlot]:
    """All texts in the order in which `map_texts` meets them.

    Templates leave out the reasoning of answers to earlier questions on purpose; that of the last answer never.
    """
    slots: list[TextSlot] = []
    asked = max((turn for turn, message in enumerate(messages) if message.role == "user"), default=0)
    for turn, message in enumerate(messages):
        earlier = message.role == "assistant" and turn < asked

        def note(text: str, kind: str, turn: int = turn, earlier: bool = earlier) -> str:
            thoughts = 0 if not earlier else len(text) if kind == "reasoning" else _inline_reasoning_length(text)
            slots.append(TextSlot(turn, text, thoughts, kind == "name"))
            return text

        map_texts(message, note)
    return slots


def _inline_reasoning_length(text: str) -> int:
    """Reasoning that is written into the content: templates drop it from earlier turns as they drop a field."""
    end = text.rfind("</think>")
    return 0 if end < 0 else end + len("</think>")


class SentinelMessages:
    """The messages with their texts dyed, and the way back."""

    def __init__(
        self, messages: Sequence[Message], slots: Sequence[TextSlot], in_parts: bool, words: Iterable[str] | None = None
    ) -> None:
        """Whitespace is never dyed, because templates strip it; with `words`, neither are they and quotes."""
        texts = [slot.text for slot in slots]
        codes = _to_code_points("".join(texts))
        if len(codes) > _END_OF_SENTINELS - _FIRST_SENTINEL:
            raise BadRecordError(
                TOO_LONG_TO_MASK, f"over {_END_OF_SENTINELS - _FIRST_SENTINEL} characters cannot be masked"
            )
        if _is_sentinel(codes).any():
            raise BadRecordError("unassigned characters", "the text holds code points that Unicode has not assigned")
        self._plain = codes
        self._slots = slots
        self._slot_of = np.repeat(np.arange(len(texts)), [len(text) for text in texts])
        self._turn_of = np.repeat([slot.turn for slot in slots], [len(text) for text in texts]).astype(np.int64)
        dyed = np.where(
            _kept_characters(codes, texts, words), codes, np.arange(len(codes), dtype=np.uint32) + _FIRST_SENTINEL
        )
        self._starts = np.cumsum([0, *map(len, texts)])
        self._vanishing, self._repeating = np.zeros((2, len(codes)), dtype=bool)
        for slot, start in zip(slots, self._starts, strict=False):
            self._vanishing[start : start + slot.may_vanish] = True
            self._repeating[start : start + len(slot.text)] = slot.may_repeat
        self._expected = _is_sentinel(dyed)
        self._parts = [_from_code_points(dyed[a:b]) for a, b in zip(self._starts[:-1], self._starts[1:], strict=True)]
        parts = iter(self._parts)
        self._dyed = [map_texts(message, lambda *_: next(parts)) for message in messages]
        self.messages = [message.as_dict(in_parts) for message in self._dyed]

    def check(self, text: str, dyed: str) -> SentinelRendering:
        """`dyed`, once it is proven that washing the dye out gives `text` and that no character was lost.

        Only what may vanish may be missing.
        """
        codes = _to_code_points(dyed)
        where = np.flatnonzero(_is_sentinel(codes))
        sources = codes[where] - _FIRST_SENTINEL
        codes[where] = self._plain[sources]
        if _from_code_points(codes) != text:
            raise BadRecordError("template rewrites", "the template changes the text itself, so no exact mask exists")
        times = np.bincount(sources, minlength=len(self._plain))
        if ((times > 1) & ~self._repeating).any():
            raise BadRecordError(
                "template repeats text", "the chat template repeats a message, so no exact mask exists"
            )
        missing = self._expected & (times == 0)
        if (missing & ~self._vanishing).any():
            number = int(self._turn_of[np.flatnonzero(missing & ~self._vanishing)[0]])
            raise BadRecordError(
                "template drops text",
                f"the chat template leaves out message {number + 1} (role '{self.messages[number]['role']}') or part "
                "of it (text, reasoning or tool calls that it has no place for)",
            )
        if (times > 1).any():
            where = _first_occurrences(_to_code_points(dyed))
            sources = _to_code_points(dyed)[where] - _FIRST_SENTINEL
        return SentinelRendering(
            dyed, where, self._turn_of[sources], self._slot_of[sources], sources, bool(missing.any())
        )

    def undyed(self, pattern: re.Pattern[str]) -> int:
        """How often the pattern stands undyed in the texts themselves, what may vanish aside."""
        return sum(
            len(pattern.findall(part, slot.may_vanish)) for slot, part in zip(self._slots, self._parts, strict=True)
        )

    def content(self, turn: int) -> str:
        """The dyed content of a message."""
        return self._dyed[turn].content

    def last_dyed(self, dyed: str) -> int:
        """The place behind the last dyed character, 0 if there is none."""
        where = _first_occurrences(_to_code_points(dyed))
        return int(where[-1]) + 1 if len(where) else 0

    def extents(self, rendering: SentinelRendering) -> list[tuple[int, int, int]] | None:
        """(start, end, slot) of every text in order of appearance, if each stands there whole and in one piece."""
        slots = rendering.slots
        found = []
        for slot in dict.fromkeys(slots.tolist()):
            mine = np.flatnonzero(slots == slot)
            start, length = int(rendering.where[mine[0]]), len(self._slots[slot].text)
            codes = np.arange(length) + self._starts[slot]
            if (rendering.where[mine] - start != rendering.sources[mine] - codes[0]).any():
                return None
            found.append((start, start + length, slot))
        if len(found) < len(self._slots) or any(a[1] > b[0] for a, b in itertools.pairwise(found)):
            return None
        return found


@dataclass(frozen=True, slots=True)
class SentinelRendering:
    """A dyed rendering: where dye is, which message and which character each dyed place came from."""

    text: str
    where: NDArray[np.int64]
    turns: NDArray[np.int64]
    slots: NDArray[np.int64]
    sources: NDArray[np.uint32]
    reasoning_dropped: bool

    def extent(self, turn: int) -> tuple[int, int]:
        """The first character of a message in the rendering, and the one behind its last."""
        mine = np.flatnonzero(self.turns == turn)
        if not len(mine):
            raise BadRecordError("empty turn", f"message {turn + 1} (role 'assistant') has no text to learn")
        slots, steps = self.slots[mine], np.diff(self.sources[mine].astype(np.int64))
        if len(mine) != mine[-1] - mine[0] + 1 or (steps[slots[1:] == slots[:-1]] <= 0).any():
            raise BadRecordError("template reorders text", f"the template reorders message {turn + 1}")
        return int(self.where[mine[0]]), int(self.where[mine[-1]]) + 1

    def before(self, place: int) -> int:
        """The place behind the last dyed character before `place`."""
        count = int(np.searchsorted(self.where, place))
        return int(self.where[count - 1]) + 1 if count else 0


def _to_code_points(text: str) -> NDArray[np.uint32]:
    return np.frombuffer(text.encode("utf-32-le"), dtype=np.uint32).copy()


def _from_code_points(codes: NDArray[np.uint32]) -> str:
    return codes.astype("<u4").tobytes().decode("utf-32-le")


def _is_sentinel(codes: NDArray[np.uint32]) -> NDArray[np.bool_]:
    return (codes >= _FIRST_SENTINEL) & (codes < _END_OF_SENTINELS)


def _first_occurrences(codes: NDArray[np.uint32]) -> NDArray[np.int64]:
    """Where each dyed character stands for the first time."""
    where = np.flatnonzero(_is_sentinel(codes))
    return np.sort(where[np.unique(codes[where], return_index=True)[1]])


_WHITESPACE_CODES = np.array([code for code in range(0x3001) if chr(code).isspace()], np.uint32)
_QUOTE_CODES = np.array([ord(char) for char in "\"'\\"], np.uint32)


def _kept_characters(codes: NDArray[np.uint32], texts: Sequence[str], words: Iterable[str] | None) -> NDArray[np.bool_]:
    """Characters that stay undyed: templates strip whitespace, escape quotes and look for certain words."""
    kept: NDArray[np.bool_] = np.isin(codes, _WHITESPACE_CODES)
    if words is None:
        return kept
    kept |= np.isin(codes, _QUOTE_CODES) | (codes < 0x20)
    offset = 0
    for text in texts:
        for word in words:
            at = text.find(word)
            while at >= 0:
                kept[offset + at : offset + at + len(word)] = True
                at = text.find(word, at + len(word))
        offset += len(text)
    return kept
