"""Skeletons: conversations of one shape are rendered once, then only filled in.

Rendering a template and finding the mask costs more than tokenising. But a template that only prints a text, strips it
and looks for fixed words in it does the same for every text that has none of these words and no space at its ends. So
the first conversation of a shape (its roles, its tools, where reasoning stands) is rendered with texts that note what
is done to them (`whet.data.traced`); if nothing else was done, what lies between the texts is kept and serves others:

    ‹<|im_start|>user⏎› Hi ‹<|im_end|>⏎<|im_start|>assistant⏎› Yes ‹<|im_end|>⏎›
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

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
