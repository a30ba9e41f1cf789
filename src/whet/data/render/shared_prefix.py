"""Tokenize the prefix that all texts share, such as a system prompt, only once."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, NamedTuple

# The opening that texts share, such as a system prompt, tokenised once.
#
# A tokenizer cuts its text at special tokens before anything else, so what stands before one and what stands behind it
# are tokenised apart. Where all texts begin alike up to a special token, only the rest is encoded each time: a fifth of
# the work for short conversations below a default system prompt. That the cut changes nothing is tried on the texts it
# was found in, once; some tokenizers treat the first word of a text otherwise, and theirs are never cut.

_MIN_PREFIX_TOKENS = 4  # tokens that are worth the trouble
_VERIFIED_TEXTS = 8  # texts that the cut is tried on


class PrefixedEncoding(NamedTuple):
    """A text's tokens: those of the opening, then those of the rest."""

    opening: Any
    rest: Any
    cut: int
    """Characters of the opening."""

    @property
    def ids(self) -> list[int]:
        return [*self.opening.ids, *self.rest.ids] if self.cut else list(self.rest.ids)

    def char_to_token(self, place: int) -> int | None:
        """The token of a character; None if it has none."""
        if place < self.cut:
            found = self.opening.char_to_token(place)
            return None if found is None else int(found)
        found = self.rest.char_to_token(place - self.cut)
        return None if found is None else int(found) + (len(self.opening) if self.cut else 0)

    def start_of(self, token: int) -> int:
        """The first character of a token."""
        before = len(self.opening) if self.cut else 0
        if token < before:
            return int(self.opening.token_to_chars(token)[0])
        return int(self.rest.token_to_chars(token - before)[0]) + self.cut


class SharedPrefixEncoder:
    """Encodes batches; the opening is found in the first one that has several texts."""

    def __init__(self, backend: Any, special: Sequence[str]) -> None:
        """`special`: tokens at which texts are cut before all else."""
        self._backend = backend
        self._special = re.compile("|".join(map(re.escape, special)) or "(?!)")
        self._text, self._encoding = "", None
        self._is_known = not special

    def encode(self, texts: Sequence[str], with_places: bool = True) -> list[PrefixedEncoding]:
        """The tokens of each text; without places only ids may be asked for, which is faster."""
        if not self._is_known and len(set(texts)) > 1:
            self._find(texts)
        cuts = [len(self._text) if self._text and text.startswith(self._text) else 0 for text in texts]
        rests = [text[cut:] if cut else text for text, cut in zip(texts, cuts, strict=True)]
        encode = self._backend.encode_batch if with_places else self._backend.encode_batch_fast
        encodings = encode(rests, add_special_tokens=False)
        return [PrefixedEncoding(self._encoding, rest, cut) for rest, cut in zip(encodings, cuts, strict=True)]

    def _find(self, texts: Sequence[str]) -> None:
        self._is_known = True
        *_, last = [0, *(found.end() for found in self._special.finditer(_common_prefix(min(texts), max(texts))))]
        opening = self._backend.encode(texts[0][:last], add_special_tokens=False)
        if len(opening) < _MIN_PREFIX_TOKENS:
            return
        tried = texts[:_VERIFIED_TEXTS]
        whole = self._backend.encode_batch(list(tried), add_special_tokens=False)
        rests = self._backend.encode_batch([text[last:] for text in tried], add_special_tokens=False)
        if all([*opening.ids, *rest.ids] == all_.ids for rest, all_ in zip(rests, whole, strict=True)):
            self._text, self._encoding = texts[0][:last], opening


def _common_prefix(a: str, b: str) -> str:
    """What two texts begin with alike: of the first and the last in order, what all between them do."""
    length = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    return a[:length]
