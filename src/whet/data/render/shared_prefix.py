"""Tokenize the prefix that all texts share, such as a system prompt, only once.

A tokenizer first splits its text at special tokens and then encodes the parts independently. Where all texts begin
alike up to a special token, only the rest has to be encoded each time. This saves a fifth of the work for short
conversations with a default system prompt. That the split does not change the ids is verified on texts that the
prefix was found in, and on others that begin with it. Tokenizers that treat the first word of a text differently fail
this check and encode every text whole.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, NamedTuple

_MIN_PREFIX_TOKENS = 4
_VERIFIED_TEXTS = 8
_VERIFIED_RESTS = ("a", " a", "\na", "1")
"""The rest of other texts: tokenizers treat a first word otherwise than a first space."""


class PrefixedEncoding(NamedTuple):
    """The encoding of a text as those of its prefix and of the rest."""

    prefix: Any
    rest: Any
    prefix_characters: int
    """0: the text does not start with the shared prefix, and `rest` is the whole encoding."""

    @property
    def ids(self) -> list[int]:
        return [*self.prefix.ids, *self.rest.ids] if self.prefix_characters else list(self.rest.ids)

    def char_to_token(self, position: int) -> int | None:
        """The token of a character; None if it has none."""
        if position < self.prefix_characters:
            found = self.prefix.char_to_token(position)
            return None if found is None else int(found)
        found = self.rest.char_to_token(position - self.prefix_characters)
        return None if found is None else int(found) + self._prefix_tokens

    def token_start(self, token: int) -> int:
        """The position of a token's first character."""
        if token < self._prefix_tokens:
            return int(self.prefix.token_to_chars(token)[0])
        return int(self.rest.token_to_chars(token - self._prefix_tokens)[0]) + self.prefix_characters

    def token_end(self, token: int) -> int:
        """The position after a token's last character."""
        if token < self._prefix_tokens:
            return int(self.prefix.token_to_chars(token)[1])
        return int(self.rest.token_to_chars(token - self._prefix_tokens)[1]) + self.prefix_characters

    @property
    def _prefix_tokens(self) -> int:
        return len(self.prefix) if self.prefix_characters else 0


class SharedPrefixEncoder:
    """Encodes batches of texts. The first batch with different texts determines the shared prefix."""

    def __init__(self, backend: Any, special: Sequence[str]) -> None:
        """`special`: tokens at which `backend` splits a text; without any, texts are always encoded whole."""
        self._backend = backend
        self._special = re.compile("|".join(map(re.escape, sorted(special, key=len, reverse=True))) or "(?!)")
        self._prefix, self._encoding = "", None
        self._is_determined = not special

    def encode(self, texts: Sequence[str], offsets: bool = True) -> list[PrefixedEncoding]:
        """Encode each text. Without `offsets` it is faster, and the encodings have ids only."""
        if not self._is_determined and len(set(texts)) > 1:
            self._find_prefix(texts)
        cuts = [len(self._prefix) if self._prefix and text.startswith(self._prefix) else 0 for text in texts]
        rests = [text[cut:] if cut else text for text, cut in zip(texts, cuts, strict=True)]
        encode = self._backend.encode_batch if offsets else self._backend.encode_batch_fast
        encodings = encode(rests, add_special_tokens=False)
        return [PrefixedEncoding(self._encoding, rest, cut) for rest, cut in zip(encodings, cuts, strict=True)]

    def _find_prefix(self, texts: Sequence[str]) -> None:
        self._is_determined = True
        common = texts[0][: common_prefix_length(min(texts), max(texts))]  # the extremes in order bound all others
        *_, cut = [0, *(found.end() for found in self._special.finditer(common))]
        prefix = self._backend.encode(texts[0][:cut], add_special_tokens=False)
        if len(prefix) < _MIN_PREFIX_TOKENS:
            return
        sample = [*texts[:_VERIFIED_TEXTS], *(texts[0][:cut] + rest for rest in _VERIFIED_RESTS)]
        whole = self._backend.encode_batch(list(sample), add_special_tokens=False)
        rests = self._backend.encode_batch([text[cut:] for text in sample], add_special_tokens=False)
        if all([*prefix.ids, *rest.ids] == full.ids for rest, full in zip(rests, whole, strict=True)):
            self._prefix, self._encoding = texts[0][:cut], prefix


def common_prefix_length(a: str, b: str) -> int:
    """How many characters two texts have in common at their start."""
    length = min(len(a), len(b))
    if a[:length] == b[:length]:
        return length
    return next(i for i in range(length) if a[i] != b[i])
