"""Prompts as token ids: those that come before every answer.

Where a prompt ends in whitespace, the tokenizer may merge it with the word that follows. No answer then follows the ids
of the prompt by itself, so that a model would be asked to continue tokens that it was never trained on:

    prompt            Assistant:␣           ‹Assistant› ‹:› ‹␣›
    with an answer    Assistant:␣Yes        ‹Assistant› ‹:› ‹␣Yes›
    with another      Assistant:␣42         ‹Assistant› ‹:› ‹␣› ‹4› ‹2›
    prompt's ids                            ‹Assistant› ‹:›

So the prompt's ids end before such whitespace, for every answer alike. The model generates it, and the loss mask
(`whet.data.render.renderer`) starts there.
"""

from __future__ import annotations

import itertools
import re
from functools import lru_cache
from string import printable
from typing import Any

FIRST_WORDS = (
    "The", "I", "Yes", "No", "It", "is", "a", "In", "To", "You", "This", "Here", "Sure", "Hello", "and", "of",
    *printable.split()[0],
)  # fmt: skip
"""What answers may begin with: common words; digits, letters and punctuation."""
_CONTEXT_CHARACTERS = 64
"""As many characters before an answer, or fewer from the last marker on, decide how it is split into tokens."""


class PromptEncoder:
    """Encodes prompts with one tokenizer."""

    def __init__(self, backend: Any, markers: re.Pattern[str]) -> None:
        """`markers` finds the tokens at which `backend` splits a text."""
        self._backend, self._markers = backend, markers
        self._cached_open_end = lru_cache(maxsize=256)(self._find_open_end)

    def encode(self, prompt: str) -> list[int]:
        """The ids of a prompt as they are before every answer."""
        word = FIRST_WORDS[0] if prompt[-1:].isspace() else ""
        encoding = self._backend.encode(prompt + word, add_special_tokens=False)
        length = len(prompt) - self.open_end(prompt)
        return [token for token, (_, end) in zip(encoding.ids, encoding.offsets, strict=True) if end <= length]

    def open_end(self, prompt: str) -> int:
        """How many characters of whitespace at the end of a prompt are not the same tokens before every answer."""
        if not prompt[-1:].isspace():
            return 0
        start = max((marker.start() for marker in self._markers.finditer(prompt)), default=0)
        return self._cached_open_end(prompt[max(start, len(prompt) - _CONTEXT_CHARACTERS) :])

    def _find_open_end(self, prompt: str) -> int:
        before = []
        for encoding in self._backend.encode_batch([prompt + word for word in FIRST_WORDS], add_special_tokens=False):
            tokens = list(zip(encoding.ids, encoding.offsets, strict=True))
            cut = min((start for _, (start, end) in tokens if end > len(prompt)), default=len(prompt))
            before.append([(token, end) for token, (_, end) in tokens if end <= cut])
        same = list(itertools.takewhile(lambda tokens: len(set(tokens)) == 1, zip(*before, strict=False)))
        open_end = len(prompt) - (same[-1][0][1] if same else 0)
        is_whitespace = open_end <= len(prompt) - len(prompt.rstrip())
        return open_end if is_whitespace else 0
