"""Masks without offsets, for conversations that are filled into a skeleton.

Asking the tokenizer which characters a token came from makes it a third slower. It is not needed where turns begin and
end at control tokens: the skeleton knows how many there are before each, and the tokens of a header are known too. If
they are not found where they should be, the offsets decide as for any other text.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from whet.data.skeleton import Skeleton

if TYPE_CHECKING:
    from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class Turn:
    """Where a supervised turn is, counted in control tokens."""

    opened_by: int
    """The control token before its header."""
    header: tuple[int, ...]
    """The tokens between that and what is learned."""
    ended_by: int
    """The control token that ends it."""
    learns_end: bool


@dataclass(frozen=True, slots=True)
class Quick:
    """The turns of a shape."""

    turns: tuple[Turn, ...]
    controls: int

    def loss(self, ids: NDArray[np.int32], is_control: NDArray[np.bool_]) -> NDArray[np.uint8] | None:
        """The mask; None if the tokens are not where they are expected, and offsets must tell."""
        controls = np.flatnonzero(is_control[ids])
        if len(controls) != self.controls:
            return None
        loss = np.zeros(len(ids), dtype=np.uint8)
        for turn in self.turns:
            opened = int(controls[turn.opened_by]) + 1
            first = opened + len(turn.header)
            if tuple(ids[opened:first].tolist()) != turn.header:
                return None
            loss[first : int(controls[turn.ended_by]) + turn.learns_end] = 1
        return loss


def quick_of(skeleton: Skeleton, control: re.Pattern[str], encode: Callable[[str], Sequence[int]]) -> Quick | None:
    """How to find the turns of a skeleton; None if one does not begin behind, or end with, a control token."""
    found = [
        (number, match.start(), match.end())
        for number, literal in enumerate(skeleton.literals)
        for match in control.finditer(literal)
    ]
    turns = []
    for (opening, start), (ending, marker), (_, end) in skeleton.places:
        before = [i for i, (number, _, stop) in enumerate(found) if number == opening and stop <= start]
        after = [i for i, (number, begin, _) in enumerate(found) if number == ending and begin == marker]
        if not before or not after:
            return None
        header = skeleton.literals[opening][found[before[-1]][2] : start]
        turns.append(Turn(before[-1], tuple(encode(header)) if header else (), after[0], marker < end))
    return Quick(tuple(turns), len(found))
