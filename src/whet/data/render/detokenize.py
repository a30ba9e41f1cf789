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
    """Decodes ids."""

    def text(self, ids: Sequence[int]) -> str: ...

    def piece(self, number: int) -> str:
        """The vocabulary entry of an id."""
        ...


class _FastDecoder:
    def __init__(self, path: Path) -> None:
        from tokenizers import Tokenizer

        try:
            self._tokenizer = Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises plain Exception
            raise WhetError(f"{path}: not a tokenizer ({error})") from None

    def text(self, ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=False))

    def piece(self, number: int) -> str:
        return str(self._tokenizer.id_to_token(number))


class _SentencePieceDecoder:
    def __init__(self, path: Path) -> None:
        self._processor = load_processor(path)

    def text(self, ids: Sequence[int]) -> str:
        """Control pieces, which the library decodes to nothing, appear by name."""
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
    """Open a tokenizer.json or a SentencePiece .model; `place` is the file or its folder."""
    candidates = [place / TOKENIZER_JSON, place / SENTENCEPIECE_MODEL] if place.is_dir() else [place]
    for file in candidates:
        if file.is_file():
            return _SentencePieceDecoder(file) if file.suffix == ".model" else _FastDecoder(file)
    raise WhetError(
        f"{place}: no tokenizer here ({TOKENIZER_JSON} or {SENTENCEPIECE_MODEL}). Give one: --tokenizer PATH"
    )


def token_texts(ids: Sequence[int], decoder: Decoder) -> list[str]:
    """The text that each token adds; joined, they are the whole text. Of a character whose bytes lie in several tokens,
    the last has it and the others are empty."""
    texts: list[str] = []
    first = decoded = 0  # some tokenizers decode the start of a text differently: begin a token earlier
    for end in range(1, len(ids) + 1):
        before, after = decoder.text(ids[first:decoded]), decoder.text(ids[first:end])
        if after.endswith("\ufffd") and end < len(ids) and end - decoded < _MAX_CHARACTER_TOKENS:
            texts.append("")
            continue
        texts.append(after[common_prefix_length(before, after) :])
        first, decoded = decoded, end
    return texts


_MAX_CHARACTER_TOKENS = 8


def supervised_segments(ids: Sequence[int], loss: Sequence[int], decoder: Decoder) -> list[tuple[str, bool]]:
    """Split the text into (segment, supervised); joined, the segments are the whole text.

    Some tokenizers decode the start of a text differently from its middle, so a segment is what its tokens add to the
    text of all before them. A character whose bytes lie in two segments belongs to the later one."""
    if not len(ids):
        return []
    whole = decoder.text(ids)
    starts = [0, *(i for i in range(1, len(ids)) if bool(loss[i]) != bool(loss[i - 1]))]
    cuts = [0]
    for start in starts[1:]:
        cuts.append(max(cuts[-1], common_prefix_length(decoder.text(ids[:start]), whole)))
    return [
        (whole[a:b], bool(loss[start])) for start, (a, b) in zip(starts, pairwise([*cuts, len(whole)]), strict=True)
    ]
