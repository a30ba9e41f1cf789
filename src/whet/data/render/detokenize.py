"""Token ids → text, and its supervised and unsupervised segments."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Protocol

from whet.core.errors import WhetError
from whet.data.render.chat_tokenizer import SENTENCEPIECE_MODEL, TOKENIZER_JSON
from whet.data.render.shared_prefix import common_prefix_length
from whet.tokenizer.sentencepiece import load_processor


class Decoder(Protocol):
    """Ids back to text."""

    def text(self, ids: Sequence[int]) -> str: ...

    def piece(self, number: int) -> str:
        """One id as the vocabulary has it."""
        ...


class _FastDecoder:
    def __init__(self, path: Path) -> None:
        from tokenizers import Tokenizer

        try:
            self._tokenizer = Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises nothing more special
            raise WhetError(f"{path}: not a tokenizer ({error})") from None

    def text(self, ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=False))

    def piece(self, number: int) -> str:
        return str(self._tokenizer.id_to_token(number))


class _SentencePieceDecoder:
    def __init__(self, path: Path) -> None:
        self._processor = load_processor(path)

    def text(self, ids: Sequence[int]) -> str:
        """Control pieces, which the library prints as nothing, are shown by their names."""
        parts: list[str] = []
        run: list[int] = []
        for number in ids:
            if self._processor.is_control(number) or self._processor.is_unused(number):
                parts += [self._processor.decode(run), self.piece(number)]
                run = []
            else:
                run.append(number)
        return "".join([*parts, self._processor.decode(run)])

    def piece(self, number: int) -> str:
        return str(self._processor.id_to_piece(number))


def open_decoder(place: Path) -> Decoder:
    """From a folder with a tokenizer, or the file itself: tokenizer.json or a SentencePiece .model."""
    candidates = [place / TOKENIZER_JSON, place / SENTENCEPIECE_MODEL] if place.is_dir() else [place]
    for file in candidates:
        if file.is_file():
            return _SentencePieceDecoder(file) if file.suffix == ".model" else _FastDecoder(file)
    raise WhetError(
        f"{place}: no tokenizer here ({TOKENIZER_JSON} or {SENTENCEPIECE_MODEL}). Name one: --tokenizer PATH"
    )


def supervised_segments(ids: Sequence[int], loss: Sequence[int], decoder: Decoder) -> list[tuple[str, bool]]:
    """The text in pieces that are learned or not; together they are the whole text. Each is what its tokens add to all
    before them, because some tokenizers decode the beginning of a text otherwise than its middle. A character whose
    bytes are on both sides of a border is on the later one."""
    if not len(ids):
        return []
    whole = decoder.text(ids)
    starts = [0, *(i for i in range(1, len(ids)) if bool(loss[i]) != bool(loss[i - 1]))]
    places = [0]
    for start in starts[1:]:
        places.append(max(places[-1], common_prefix_length(decoder.text(ids[:start]), whole)))
    return [
        (whole[a:b], bool(loss[start])) for start, (a, b) in zip(starts, pairwise([*places, len(whole)]), strict=True)
    ]
