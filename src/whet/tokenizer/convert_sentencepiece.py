"""Convert a SentencePiece model to a fast tokenizer with the same ids, and check that they are the same.

Ids are SentencePiece's own, span by span: a span between two markers is encoded like a text of its own, with its dummy
prefix. Three things that converters commonly get wrong:

- Control pieces never come from text. They are renamed (`<s> (control)`): no text contains the new name, because spaces
  are escaped before the vocabulary is searched.
- A user-defined piece is matched without a new dummy prefix after it.
- Models with character normalization rules (NFKC and the like) are refused. The `Precompiled` normalizer of tokenizers
  applies them to graphemes instead of the longest match and loses marks: "ｃ" with a cedilla becomes "c", not "ç".
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from whet.core.console import info
from whet.core.errors import WhetError
from whet.tokenizer.named_templates import TurnMarker, TurnMarkers, set_marker_template
from whet.tokenizer.sentencepiece import (
    BPE,
    BYTE,
    CONTROL,
    KIND_NAMES,
    NORMAL,
    UNIGRAM,
    UNKNOWN,
    UNUSED,
    USER_DEFINED,
    SentencePieceModel,
    load_processor,
    read_sentencepiece_model,
)

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

_SPACE = "▁"
_WHITESPACE = "".join(re.escape(chr(code)) for code in range(0x3001) if chr(code).isspace())


def to_fast_tokenizer(path: Path, turns: TurnMarkers | None) -> PreTrainedTokenizerFast:
    """Convert a `.model` file to a fast tokenizer, with the turn markers at their ids and their chat template."""
    from tokenizers import AddedToken
    from transformers import PreTrainedTokenizerFast

    model = read_sentencepiece_model(path)
    _refuse_unsupported(model)
    turns = None if turns is None else _resolve_markers(model, turns)
    ids = {mark.id: mark.text for mark in turns.by_role.values() if mark.id is not None} if turns else {}
    names = _vocabulary_names(model, ids)
    backend = build_backend(model, names)
    specials = [AddedToken(names[number], special=True, normalized=False) for number in (model.eod_id, *ids)]
    backend.add_special_tokens(specials)
    ties = check_same_ids(model, load_processor(path), backend, [token.content for token in specials])
    if ties:
        info(f"{path}: in a chat, equally likely pieces may come in another order than in training ({ties} probes)")
    eod = names[model.eod_id]
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token=eod, pad_token=eod, clean_up_tokenization_spaces=False,
        extra_special_tokens=[str(token.content) for token in specials[1:]],
    )  # fmt: skip
    tokenizer.name_or_path = str(path)
    if turns is not None:
        set_marker_template(tokenizer, turns)
    return tokenizer


def _refuse_unsupported(model: SentencePieceModel) -> None:
    reason = ""
    if model.algorithm not in (UNIGRAM, BPE):
        reason = "it is neither a unigram nor a BPE model"
    elif model.normalizer_name:
        reason = f"it rewrites characters by the rules {model.normalizer_name}, which fast tokenizers apply differently"
    elif model.whitespace_as_suffix or not model.escapes_spaces:
        reason = "it treats spaces in a way that fast tokenizers do not support"
    elif any(" " in piece.text for piece in model.pieces if piece.kind == USER_DEFINED):
        reason = "a user-defined piece contains a space"
    if reason:
        raise WhetError(
            f"{model.path}: no fast tokenizer gives the same ids as this model: {reason}. To train with ids that "
            "differ a little, convert it yourself and give the folder with the tokenizer.json: model.tokenizer=FOLDER"
        )


def _resolve_markers(model: SentencePieceModel, turns: TurnMarkers) -> TurnMarkers:
    """The markers with their ids. One whose piece is user-defined takes the piece's text: text becomes that piece, in
    SentencePiece too."""
    found = {}
    for role, mark in turns.by_role.items():
        number = _marker_id(model, role, mark)
        piece = model.pieces[number]
        found[role] = TurnMarker(piece.text if piece.kind == USER_DEFINED else mark.text, number)
    return replace(turns, by_role=found)


def _marker_id(model: SentencePieceModel, role: str, mark: TurnMarker) -> int:
    number = model.piece_to_id(mark.text) if mark.id is None else mark.id
    if number is None or number >= len(model.pieces):
        raise WhetError(f"data.markers.{role}: {model.path} has no piece {mark.text if number is None else number}")
    piece, taken = model.pieces[number], model.piece_to_id(mark.text)
    if piece.kind in (NORMAL, UNKNOWN, BYTE) or taken not in (None, number):
        raise WhetError(
            f"data.markers.{role}: {mark.text} cannot be id {number}, the {KIND_NAMES[piece.kind]} piece {piece.text!r}"
            + (f": it is piece {taken} already" if taken not in (None, number) else ": text becomes it too")
        )
    return number


def _vocabulary_names(model: SentencePieceModel, marks: dict[int, str]) -> list[str]:
    """Each piece's name in the vocabulary: markers have their text, control pieces a name that no text contains."""
    names = [
        f"{piece.text} ({KIND_NAMES[piece.kind]})" if piece.kind in (UNKNOWN, CONTROL, UNUSED) else piece.text
        for piece in model.pieces
    ]
    names[model.eod_id] = model.pieces[model.eod_id].text
    for number, text in marks.items():
        names[number] = text
    return names


# The tokenizers pipeline


def build_backend(model: SentencePieceModel, names: list[str]) -> Any:
    """The `tokenizers` pipeline that does what the SentencePiece model does; `names` are the vocabulary's."""
    from tokenizers import Tokenizer, decoders

    backend = Tokenizer(_unigram_model(model, names) if model.algorithm == UNIGRAM else _bpe_model(model, names))
    backend.normalizer = _normalizer(model)
    pre_tokenizer = _pre_tokenizer(model)
    if pre_tokenizer is not None:
        backend.pre_tokenizer = pre_tokenizer
    steps = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if model.dummy_prefix else steps)
    return backend


def _normalizer(model: SentencePieceModel) -> Any:
    """Spaces as SentencePiece treats them. A text of whitespace alone has no tokens: between markers it is dropped."""
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


def _unigram_model(model: SentencePieceModel, names: list[str]) -> Any:
    """The most likely segmentation wins. User-defined pieces get a score by their length in bytes, as measured in
    SentencePiece 0.2.2; where another version differs, `check_same_ids` refuses the model."""
    from tokenizers import models

    scores = [
        0.1 * (len(piece.text.encode()) - 1) if piece.kind == USER_DEFINED else piece.score for piece in model.pieces
    ]
    unknown = next(number for number, piece in enumerate(model.pieces) if piece.kind == UNKNOWN)
    return models.Unigram(list(zip(names, scores, strict=True)), unknown, model.byte_fallback)


def _bpe_model(model: SentencePieceModel, names: list[str]) -> Any:
    """SentencePiece merges the pair whose joint piece has the best score; each way to split a piece is such a pair."""
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


def _pre_tokenizer(model: SentencePieceModel) -> Any:
    """Where the text is split before the pieces are matched: around BPE's user-defined pieces, which always win, and
    inside text that looks like a byte piece (`<0x41>`), which must not match it. BPE matches whole words, and so such
    text, only if there are user-defined pieces."""
    from tokenizers import Regex, pre_tokenizers

    defined = sorted((piece.text for piece in model.pieces if piece.kind == USER_DEFINED), key=len, reverse=True)
    splits = []
    if model.algorithm == BPE and defined:
        splits.append(pre_tokenizers.Split(Regex("|".join(re.escape(text) for text in defined)), "isolated"))
    if model.byte_fallback and (model.algorithm == UNIGRAM or defined):
        splits.append(pre_tokenizers.Split(Regex(_byte_piece_regex(model)), "merged_with_previous"))
    return pre_tokenizers.Sequence(splits) if splits else None


def _byte_piece_regex(model: SentencePieceModel) -> str:
    """Matches the start of text such as `<0x41>`, up to a position that no piece crosses."""
    texts = [piece.text for piece in model.pieces if piece.kind in (NORMAL, USER_DEFINED)]
    for start, across, rest in (("<", "<0", "0x[0-9A-F]{2}>"), ("<0x", "x[0-9A-F]", "[0-9A-F]{2}>")):
        if not any(re.search(across, text) for text in texts):
            return f"{start}(?={rest})"
    raise WhetError(
        f"{model.path}: text such as <0x41> cannot be told from the byte pieces of that name. Convert the model "
        "yourself and give the folder with the tokenizer.json: model.tokenizer=FOLDER"
    )


# Comparison with SentencePiece, on texts that are likely to show a difference

_MAX_PROBES = 20_000  # pieces; a vocabulary of 128,000 is checked in two seconds
_ODD_TEXTS = (
    " ", "  a", "a  ", " a  b ", "▁", "a▁", "▁▁a", "\n", "a\nb", "\ta", "a\r\n", "\0", "a\0b", "\u00a0", "a\u2028b",
    "<s>", "</s>", "<unk>", "<0x41>", "a<0x41>b", "e\u0301", "ﬁ", "ｃ\u0327", "\u1100\u1161\u11a8",
    "👩‍👩‍👧", "\U000f0000",
)  # fmt: skip


def check_same_ids(model: SentencePieceModel, processor: Any, backend: Any, specials: Sequence[str]) -> int:
    """Compare a converted tokenizer with SentencePiece and raise a WhetError where the ids differ.

    Probes that contain a special token are left out. Returns how many probes got other ids of equal likelihood, which
    unigram models allow (`equivalent_ids`).
    """
    texts = [text for text in _probe_texts(model) if not any(special in text for special in specials)]
    found = backend.encode_batch(texts, add_special_tokens=False)
    wanted = processor.encode(texts)
    ties = 0
    for text, ours, theirs in zip(texts, found, wanted, strict=True):
        ties += bool(text.strip()) and list(ours.ids) != theirs
        if not equivalent_ids(model, list(ours.ids), theirs if text.strip() else []):
            raise WhetError(
                f"{model.path}: no fast tokenizer gives the same ids as this model: {text!r} is {theirs} by "
                f"SentencePiece and {ours.ids} by tokenizers. To train with ids that differ a little, convert it "
                "yourself and give the folder with the tokenizer.json: model.tokenizer=FOLDER"
            )
    return ties


def equivalent_ids(model: SentencePieceModel, ours: Sequence[int], theirs: Sequence[int]) -> bool:
    """Whether ids are equal or, in a unigram model, equally likely: the same pieces in another order, as in long runs
    of spaces, where SentencePiece, which adds in fp32, decides by rounding. On 31,500 texts of Python code: 41 texts;
    with BPE: none."""
    if list(ours) == list(theirs) or model.algorithm != UNIGRAM:
        return list(ours) == list(theirs)
    a, b = (sum(model.pieces[number].score for number in ids) for ids in (ours, theirs))
    return abs(a - b) <= 1e-6 * (len(ours) + 1) * max(1.0, abs(a))


def _probe_texts(model: SentencePieceModel) -> Iterator[str]:
    """Each piece alone, overlapping itself and among others; the names of special pieces; odd characters."""
    draw = random.Random(0)
    known = [piece.text.replace("▁", " ") for piece in model.pieces if piece.kind in (NORMAL, USER_DEFINED)]
    some = draw.sample(known, min(_MAX_PROBES, len(known)))
    yield from _ODD_TEXTS
    yield from some
    yield from (piece.text for piece in model.pieces if piece.kind not in (NORMAL, USER_DEFINED))
    for text in some:
        overlap = next((n for n in range(len(text) - 1, 0, -1) if text.startswith(text[-n:])), 0)
        if overlap:
            yield from (text + text[overlap:] * times for times in (1, 2, 3))
    for _ in range(1000):
        yield "".join(draw.choices(known, k=draw.randint(2, 12)))
        yield "".join(draw.choices([*known, *_ODD_TEXTS], k=draw.randint(2, 6)))
