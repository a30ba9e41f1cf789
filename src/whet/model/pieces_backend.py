"""The parts of a fast tokenizer that together do what a SentencePiece model does."""

from __future__ import annotations

import re
from typing import Any

from whet.core.errors import WhetError
from whet.core.spm import BPE, NORMAL, UNIGRAM, UNKNOWN, USER_DEFINED, PieceModel

_SPACE = "▁"
_WHITESPACE = "".join(re.escape(chr(code)) for code in range(0x3001) if chr(code).isspace())


def make_backend(model: PieceModel, names: list[str]) -> Any:
    """SentencePiece's algorithm in the parts that the tokenizers library has; `names` are those of the vocabulary."""
    from tokenizers import Tokenizer, decoders

    backend = Tokenizer(_unigram(model, names) if model.algorithm == UNIGRAM else _bpe(model, names))
    backend.normalizer = _normalizer(model)
    cut = _cut(model)
    if cut is not None:
        backend.pre_tokenizer = cut
    steps = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if model.dummy_prefix else steps)
    return backend


def _normalizer(model: PieceModel) -> Any:
    """Spaces as SentencePiece treats them. Whitespace alone has no tokens: between markers it is dropped."""
    from tokenizers import Regex, normalizers

    replace = normalizers.Replace
    steps: list[Any] = [replace(Regex(rf"\A[{_WHITESPACE}]+\z"), "")]
    if model.removes_extra_spaces:
        steps += [replace(Regex(r"\A +"), ""), replace(Regex(" {2,}"), " ")]
    steps.append(replace(" ", _SPACE))
    if model.dummy_prefix:
        steps.append(normalizers.Prepend(_SPACE))
    if model.removes_extra_spaces:
        steps.append(replace(Regex(rf"{_SPACE}+\z"), ""))
    return normalizers.Sequence(steps)


def _unigram(model: PieceModel, names: list[str]) -> Any:
    """The likeliest pieces win. One that the user defined gets a bonus by its bytes, as measured in SentencePiece
    0.2.2; with a library that does otherwise, the check refuses the model."""
    from tokenizers import models

    scores = [
        0.1 * (len(piece.text.encode()) - 1) if piece.kind == USER_DEFINED else piece.score for piece in model.pieces
    ]
    unknown = next(number for number, piece in enumerate(model.pieces) if piece.kind == UNKNOWN)
    return models.Unigram(list(zip(names, scores, strict=True)), unknown, model.byte_fallback)


def _bpe(model: PieceModel, names: list[str]) -> Any:
    """SentencePiece merges the pair whose joint piece has the best score; each way to cut a piece is such a pair."""
    from tokenizers import models

    normal = {piece.text: piece.score for piece in model.pieces if piece.kind == NORMAL}
    ranked = sorted(normal, key=lambda text: -normal[text])
    merges = [
        (text[:at], text[at:])
        for text in ranked
        for at in range(len(text) - 1, 0, -1)
        if text[:at] in normal and text[at:] in normal
    ]
    unknown = next(names[number] for number, piece in enumerate(model.pieces) if piece.kind == UNKNOWN)
    defined = any(piece.kind == USER_DEFINED for piece in model.pieces)
    vocabulary = {name: number for number, name in enumerate(names)}
    return models.BPE(
        vocabulary, merges, unk_token=unknown, fuse_unk=True, byte_fallback=model.byte_fallback, ignore_merges=defined
    )


def _cut(model: PieceModel) -> Any:
    """Where the text is cut before pieces are searched: at what BPE's user defined, which always wins, and inside the
    name of a byte piece, which must not be found in text. BPE looks for whole words, and so for such names, only where
    its user defined any."""
    from tokenizers import Regex, pre_tokenizers

    defined = sorted((piece.text for piece in model.pieces if piece.kind == USER_DEFINED), key=len, reverse=True)
    cuts = []
    if model.algorithm == BPE and defined:
        cuts.append(pre_tokenizers.Split(Regex("|".join(re.escape(text) for text in defined)), "isolated"))
    if model.byte_fallback and (model.algorithm == UNIGRAM or defined):
        cuts.append(pre_tokenizers.Split(Regex(_byte_names(model)), "merged_with_previous"))
    return pre_tokenizers.Sequence(cuts) if cuts else None


def _byte_names(model: PieceModel) -> str:
    """Finds the start of <0x41> and the like, up to a place that no piece of text reaches across."""
    texts = [piece.text for piece in model.pieces if piece.kind in (NORMAL, USER_DEFINED)]
    for start, across, rest in (("<", "<0", "0x[0-9A-F]{2}>"), ("<0x", "x[0-9A-F]", "[0-9A-F]{2}>")):
        if not any(re.search(across, text) for text in texts):
            return f"{start}(?={rest})"
    raise WhetError(f"{model.path}: text such as <0x41> cannot be told from the byte pieces, which have such names")
