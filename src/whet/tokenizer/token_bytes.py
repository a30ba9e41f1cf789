"""UTF-8 bytes per token, so that losses of different tokenizers can be compared (bits per byte)."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from whet.core.console import info

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from transformers import PreTrainedTokenizerFast

_BYTE_PIECE = re.compile(r"<0x[0-9A-F]{2}>")
_PROBES = ("Naïve café: 12,345 × 日本語 🙂 — straße.", "The quick brown fox jumps over the lazy dog.", "hello world")


@functools.lru_cache(maxsize=1)  # a large vocabulary takes a second, at every evaluation
def bytes_per_token(tokenizer: PreTrainedTokenizerFast, vocabulary: int) -> NDArray[np.int64] | None:
    """UTF-8 bytes of each token by id, 0 for special tokens; None, with a message, if they are unknown.

    Byte-level tokens have one character per byte; SentencePiece writes a space as ▁ and a single byte as <0x0A>. The
    dummy prefix of SentencePiece counts as a byte. The counts are verified on sample texts.
    """
    found = _count_bytes(tokenizer, vocabulary)
    if found is None or not _matches_text(tokenizer, found):
        info("val_bpb is not reported: the bytes per token of this tokenizer are unknown")
        return None
    return found


def _count_bytes(tokenizer: PreTrainedTokenizerFast, vocabulary: int) -> NDArray[np.int64] | None:
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return None
    described = json.loads(backend.to_str())
    kinds = set(_component_types(described["decoder"])) | set(_component_types(described["pre_tokenizer"]))
    if "ByteLevel" in kinds:
        measure: Callable[[str], int] = len
    elif kinds & {"Metaspace", "ByteFallback", "Replace"}:
        measure = _piece_bytes
    else:
        return None
    pieces = tokenizer.get_vocab()
    found = np.zeros(max([vocabulary - 1, *pieces.values()]) + 1, dtype=np.int64)
    for piece, number in pieces.items():
        found[number] = measure(piece)
    for number, token in tokenizer.added_tokens_decoder.items():  # stored as plain text
        found[number] = 0 if token.special else len(token.content.encode())
    found[[number for number in tokenizer.all_special_ids if number is not None]] = 0
    return found


def _piece_bytes(piece: str) -> int:
    if " " in piece:  # a name, such as `</s> (control)`: in text a space is ▁
        return 0
    return 1 if _BYTE_PIECE.fullmatch(piece) else len(piece.replace("▁", " ").encode())


def _component_types(part: Any) -> list[str]:
    """The types of all components of a decoder or a pre-tokenizer."""
    if not isinstance(part, dict):
        return []
    inner = [*part.get("decoders", []), *part.get("pretokenizers", [])]
    return [part["type"], *(kind for each in inner for kind in _component_types(each))]


def _matches_text(tokenizer: PreTrainedTokenizerFast, found: NDArray[np.int64]) -> bool:
    """Whether the bytes of a sample's tokens add up to the sample's, or to one more for the dummy prefix. Samples with
    unknown characters are skipped."""
    for text in _PROBES:
        ids = tokenizer(text, add_special_tokens=False).input_ids
        if tokenizer.unk_token_id is None or tokenizer.unk_token_id not in ids:
            return int(found[ids].sum()) - len(text.encode()) in (0, 1)
    return False
