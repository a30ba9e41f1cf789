"""SentencePiece `.model` files, parsed without protobuf, and the library's own processor.

The file is one protobuf message. Only the fields that determine the ids of a text are read:

    1 pieces (1 text, 2 score, 3 kind) · 2 trainer (3 type, 24 whitespace as suffix, 35 byte fallback)
    3 normaliser (1 name, 2 character map, 3 dummy prefix, 4 remove extra spaces, 5 escape spaces)
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from whet.core.errors import WhetError

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
"""The kinds of pieces. Text becomes NORMAL and USER_DEFINED pieces, and BYTE pieces as a fallback; never the others."""
KIND_NAMES = ("", "ordinary", "unknown", "control", "user-defined", "unused", "byte")
UNIGRAM, BPE = 1, 2
END_OF_DOCUMENT = "<|endoftext|>"


@dataclass(frozen=True, slots=True)
class Piece:
    """One token: its text, its score and its kind."""

    text: str
    score: float
    kind: int


@dataclass(frozen=True, slots=True)
class SentencePieceModel:
    """The content of a `.model` file."""

    path: Path
    pieces: tuple[Piece, ...]
    algorithm: int
    byte_fallback: bool
    whitespace_as_suffix: bool
    normalizer_name: str
    """The name of the character normalization rules; empty if there are none."""
    dummy_prefix: bool
    removes_extra_spaces: bool
    escapes_spaces: bool

    def piece_to_id(self, text: str) -> int | None:
        """The id of the piece with this text, or None."""
        return next((number for number, piece in enumerate(self.pieces) if piece.text == text), None)

    @property
    def eod_id(self) -> int:
        """The end-of-document id: of <|endoftext|>, as in GPT-NeoX, else of </s>."""
        for text in (END_OF_DOCUMENT, "</s>"):
            found = self.piece_to_id(text)
            if found is not None:
                return found
        raise WhetError(
            f"{self.path}: neither {END_OF_DOCUMENT} nor </s> is a piece, so there is no end-of-document token"
        )


def read_sentencepiece_model(path: Path) -> SentencePieceModel:
    """Read a SentencePiece `.model` file."""
    try:
        fields = list(_parse_fields(path.read_bytes()))
        trainer, normaliser = (dict(_parse_fields(_last_field(fields, number))) for number in (2, 3))
        pieces = tuple(_parse_piece(value) for number, value in fields if number == 1)
        name = str(normaliser.get(1, b"").decode()) or "custom"
    except OSError as error:
        raise WhetError(f"{path}: cannot be read: {error.strerror}") from None
    except (ValueError, IndexError, struct.error, AttributeError, TypeError):
        raise WhetError(f"{path}: not a SentencePiece model, or a damaged one") from None
    if not pieces:
        raise WhetError(f"{path}: not a SentencePiece model: it has no pieces")
    return SentencePieceModel(
        path, pieces, trainer.get(3, UNIGRAM), bool(trainer.get(35, 0)), bool(trainer.get(24, 0)),
        name if normaliser.get(2) else "", *(bool(normaliser.get(number, 1)) for number in (3, 4, 5)),
    )  # fmt: skip


def load_processor(path: Path) -> Any:
    """The SentencePiece library's processor of a `.model` file."""
    try:
        from sentencepiece import SentencePieceProcessor
    except ImportError:
        raise WhetError(f"{path}: a SentencePiece model needs its library: pip install 'whet[data]'") from None
    read_sentencepiece_model(path)  # for its error messages
    return SentencePieceProcessor(model_file=str(path))


def _parse_piece(message: bytes) -> Piece:
    fields = dict(_parse_fields(message))
    return Piece(fields[1].decode(), fields.get(2, 0.0), fields.get(3, NORMAL))


def _last_field(fields: list[tuple[int, Any]], number: int) -> bytes:
    return next((value for found, value in reversed(fields) if found == number), b"")


def _parse_fields(message: bytes) -> Iterator[tuple[int, Any]]:
    """The (field number, value) pairs of a protobuf message: integers, 32-bit floats, and bytes for everything else."""
    at = 0
    while at < len(message):
        tag, at = _read_varint(message, at)
        number, kind = tag >> 3, tag & 7
        if kind == 0:
            value, at = _read_varint(message, at)
            yield number, value
        elif kind == 2:
            size, at = _read_varint(message, at)
            if at + size > len(message):
                raise ValueError("cut off")
            yield number, message[at : at + size]
            at += size
        elif kind == 5:
            yield number, struct.unpack_from("<f", message, at)[0]
            at += 4
        elif kind == 1:
            yield number, message[at : at + 8]
            at += 8
        else:
            raise ValueError("no protobuf")


def _read_varint(message: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = message[at]
        value |= (byte & 127) << shift
        at, shift = at + 1, shift + 7
        if byte < 128:
            return value, at
