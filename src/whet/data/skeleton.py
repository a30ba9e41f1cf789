"""Skeletons: conversations of one shape are rendered once, then only filled in.

Rendering a template and finding the mask costs more than tokenising. But a template that only prints a text, strips it
and looks for fixed words in it does the same for every text that has none of these words and no space at its ends. So
the first conversation of a shape (its roles, its tools, where reasoning stands) is rendered with texts that note what
is done to them; if nothing else was done, what lies between the texts is kept and serves all others:

    ‹<|im_start|>user⏎› Hi ‹<|im_end|>⏎<|im_start|>assistant⏎› Yes ‹<|im_end|>⏎›
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, SupportsIndex


class InspectedError(Exception):
    """The template looked into a text in a way that other texts of the same shape would answer differently."""


class Traced(str):
    """A text that tells when a template does more than print, join, strip or search it."""

    __slots__ = ()

    def __add__(self, other: str) -> Traced:
        return Traced(str.__add__(self, other))

    def __radd__(self, other: str) -> Traced:
        return Traced(str.__add__(other, self))

    def __bool__(self) -> bool:
        return str.__len__(self) > 0

    def __iter__(self) -> Iterator[str]:  # asking whether it can be iterated is no look inside; iterating is
        return map(_refuse, (None,))

    def __len__(self) -> int:
        _refuse()

    def __getitem__(self, key: SupportsIndex | slice) -> NoReturn:
        _refuse()

    def strip(self, chars: str | None = None) -> Traced:
        return Traced(str.strip(self, chars))

    def lstrip(self, chars: str | None = None) -> Traced:
        return Traced(str.lstrip(self, chars))

    def rstrip(self, chars: str | None = None) -> Traced:
        return Traced(str.rstrip(self, chars))

    def replace(self, old: str, new: str, count: SupportsIndex = -1) -> Traced:
        return Traced(str.replace(self, old, new, count))

    def split(self, sep: str | None = None, maxsplit: SupportsIndex = -1) -> list[str]:
        if sep is None:
            _refuse()
        return [Traced(part) for part in str.split(self, sep, maxsplit)]


def _refuse(*_: Any, **__: Any) -> NoReturn:
    raise InspectedError


for _name in (
    "capitalize", "casefold", "center", "count", "encode", "expandtabs", "find", "format", "format_map", "index",
    "isalnum", "isalpha", "isascii", "isdecimal", "isdigit", "isidentifier", "islower", "isnumeric", "isprintable",
    "isspace", "istitle", "isupper", "ljust", "lower", "partition", "rfind", "rindex", "rjust", "rpartition", "rsplit",
    "splitlines", "swapcase", "title", "translate", "upper", "zfill", "__mod__", "__mul__", "__rmul__", "__lt__",
    "__le__", "__gt__", "__ge__",
):  # fmt: skip
    setattr(Traced, _name, _refuse)


def note_encoding(value: Any) -> None:
    """Called where a template encodes a value: an encoding escapes some characters, so it depends on the text."""
    if isinstance(value, Traced):
        raise InspectedError
    if isinstance(value, dict):
        value = value.values()
    elif not isinstance(value, list | tuple):
        return
    for part in value:
        note_encoding(part)


_Place = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Skeleton:
    """What stands between the texts of a conversation, and where in it the supervised turns begin and end."""

    literals: tuple[str, ...]
    order: tuple[int, ...]
    """Text number order[i] stands between literals[i] and literals[i + 1]."""
    places: tuple[tuple[_Place, _Place, _Place], ...]
    """Of each supervised turn its three places, each as (literal, offset in it)."""

    def fill(self, texts: Sequence[str]) -> tuple[str, tuple[tuple[int, int, int], ...]]:
        """The rendered text and the places in it."""
        parts = [self.literals[0]]
        for number, literal in zip(self.order, self.literals[1:], strict=True):
            parts.append(texts[number])
            parts.append(literal)
        starts = [0, *itertools.accumulate(map(len, parts))][0:-1:2]
        return "".join(parts), tuple(
            (starts[a] + i, starts[b] + j, starts[c] + k) for (a, i), (b, j), (c, k) in self.places
        )


def skeleton_of(
    text: str, extents: Sequence[tuple[int, int, int]], spans: Sequence[tuple[int, int, int]]
) -> Skeleton | None:
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
    return Skeleton(tuple(literals), tuple(number for *_, number in extents), tuple(places))  # type: ignore[arg-type]
