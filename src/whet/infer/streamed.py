"""Text as it comes: tokens in, the characters that are certain out."""

from __future__ import annotations

from collections.abc import Callable, Sequence


class TextStream:
    """A character may take several tokens, and a text that ends the answer is not to be shown: both are held back."""

    def __init__(self, text: Callable[[Sequence[int]], str], stop: Sequence[str] = ()) -> None:
        self._text, self._stop = text, stop
        self._held = max((len(string) for string in stop), default=1) - 1
        self._ids: list[int] = []
        self._given = 0

    def take(self, token: int) -> str:
        """What can be shown now."""
        self._ids.append(token)
        text = self._text(self._ids)
        certain = min(len(text) - self._held, len(before(text, self._stop)))
        if text.endswith("\N{REPLACEMENT CHARACTER}"):
            certain = min(certain, len(text.rstrip("\N{REPLACEMENT CHARACTER}")))
        return self._up_to(text, certain)

    def rest(self, answer: str) -> str:
        """What is left when the answer is known."""
        return self._up_to(answer, len(answer))

    def _up_to(self, text: str, end: int) -> str:
        found = text[self._given : max(end, self._given)]
        self._given += len(found)
        return found


def before(text: str, stop: Sequence[str]) -> str:
    """The text up to the first of the strings that end it."""
    return text[: min((text.find(string) for string in stop if string in text), default=len(text))]
