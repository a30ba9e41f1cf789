"""One interface to encode marked text with SentencePiece or a fast tokenizer.

Spans are encoded one by one, as GPT-NeoX does on LUMI: a span's tokens do not depend on what stands beside it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from whet.core.errors import WhetError
from whet.core.files import hash_file, hash_json
from whet.tokenizer.sentencepiece import BYTE, KIND_NAMES, NORMAL, UNKNOWN, load_processor, read_sentencepiece_model

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


class Encoder(Protocol):
    """The tokenizer interface of marked text."""

    @property
    def vocab_size(self) -> int:
        """The number of ids."""

    @property
    def eod_id(self) -> int:
        """The end-of-document id."""

    @property
    def fingerprint(self) -> str:
        """A hash that is equal for tokenizers with the same ids."""

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """The ids of each text, encoded separately."""

    def token_to_id(self, text: str) -> int | None:
        """The id of the token with exactly this text."""

    def id_to_token(self, number: int) -> str:
        """The token of an id."""

    def token_kind(self, number: int) -> str | None:
        """None if the id can be a marker; else its kind: ordinary, unknown or byte."""

    def check_markers(self, ids: Sequence[int]) -> None:
        """Raise a WhetError for markers beside which text gets other ids than alone."""


class SentencePieceEncoder:
    """A `.model` file, encoded by the SentencePiece library itself."""

    def __init__(self, path: Path) -> None:
        self._model = read_sentencepiece_model(path)
        self._processor = load_processor(path)
        self._threads = os.cpu_count() or 1
        self.vocab_size = len(self._model.pieces)
        self.eod_id = self._model.eod_id
        self.fingerprint = hash_file(path)

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return list(self._processor.encode(list(texts), num_threads=self._threads)) if texts else []

    def token_to_id(self, text: str) -> int | None:
        return self._model.piece_to_id(text)

    def id_to_token(self, number: int) -> str:
        return self._model.pieces[number].text

    def token_kind(self, number: int) -> str | None:
        kind = self._model.pieces[number].kind
        return KIND_NAMES[kind] if kind in (NORMAL, UNKNOWN, BYTE) else None

    def check_markers(self, ids: Sequence[int]) -> None:
        """Always passes: the library encodes one span at a time and never sees markers."""


class FastTokenizerEncoder:
    """A fast tokenizer of transformers."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        if tokenizer.eos_token_id is None:
            raise WhetError(f"the tokenizer of {tokenizer.name_or_path} has no end-of-sequence token to end a document")
        self._backend = tokenizer.backend_tokenizer
        self._backend.no_truncation()
        self._backend.no_padding()
        self._added = {number: token.content for number, token in tokenizer.added_tokens_decoder.items()}
        self.vocab_size = len(tokenizer)
        self.eod_id = int(tokenizer.eos_token_id)
        self.fingerprint = hash_json(self._backend.to_str())

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return [list(found.ids) for found in self._backend.encode_batch(list(texts), add_special_tokens=False)]

    def token_to_id(self, text: str) -> int | None:
        found = self._backend.token_to_id(text)
        return None if found is None else int(found)

    def id_to_token(self, number: int) -> str:
        return self._added.get(number) or str(self._backend.id_to_token(number))

    def token_kind(self, number: int) -> str | None:
        return None if number in self._added else KIND_NAMES[NORMAL]

    def check_markers(self, ids: Sequence[int]) -> None:
        """A chat encodes all turns at once, so text beside a marker must have the ids that it has alone."""
        spans = ["A b", " c \n", "d"]
        marks = [self._added[number] for number in ids]
        for mark, number in zip(marks, ids, strict=True):
            together = self._backend.encode(mark.join(spans), add_special_tokens=False).ids
            first, *others = self.encode_batch(spans)
            apart = [*first, *(token for span in others for token in (number, *span))]
            if list(together) != apart:
                raise WhetError(
                    f"data.markers: this tokenizer gives text next to {mark} different ids from the text alone, so a "
                    "chat would differ from training. Use the SentencePiece .model file itself (model.tokenizer)"
                )


def make_encoder(load: Callable[[], PreTrainedTokenizerFast], pieces: Path | None) -> Encoder:
    """An encoder for the `.model` file `pieces`, else for the tokenizer that `load` returns."""
    return FastTokenizerEncoder(load()) if pieces is None else SentencePieceEncoder(pieces)
