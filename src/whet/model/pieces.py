"""A SentencePiece model as a fast tokenizer that transformers, and all that read its folders, can load.

The ids must be SentencePiece's own, span by span: between two markers a span is a text of its own, with its dummy
prefix. Three things that converters commonly get wrong are done otherwise here:

- Control pieces never come from text. Their names are changed (`<s> (control)`): no text can hold them, because
  spaces are escaped before the vocabulary is searched.
- A piece that the user defined is found without a new dummy prefix after it.
- Rules that rewrite characters (NFKC and the like) are refused. tokenizers' own `Precompiled` applies them to
  graphemes instead of the longest match and loses marks: "ｃ" with a cedilla becomes "c" instead of "ç".

What is built is compared with SentencePiece before it is used (`pieces_check`).
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from whet.core.console import say
from whet.core.errors import WhetError
from whet.core.spm import (
    BPE,
    BYTE,
    CONTROL,
    KINDS,
    NORMAL,
    UNIGRAM,
    UNKNOWN,
    UNUSED,
    USER_DEFINED,
    PieceModel,
    open_processor,
    read_piece_model,
)
from whet.model.pieces_backend import make_backend
from whet.model.pieces_check import check_ids
from whet.model.turns import Mark, Turns, speak_in_turns

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


def derive_tokenizer(path: Path, turns: Turns | None) -> PreTrainedTokenizerFast:
    """The fast tokenizer of a `.model` file, with the markers at their ids and their chat template."""
    from tokenizers import AddedToken
    from transformers import PreTrainedTokenizerFast

    model = read_piece_model(path)
    _refuse_what_differs(model)
    marks = turns.marks if turns else {}
    ids = {_mark_id(model, role, mark): mark.text for role, mark in marks.items()}
    names = _names(model, ids)
    backend = make_backend(model, names)
    specials = [AddedToken(names[number], special=True, normalized=False) for number in (model.eod, *ids)]
    backend.add_special_tokens(specials)
    ties = check_ids(model, open_processor(path), backend, [token.content for token in specials])
    if ties:
        say(f"{path}: in a chat, equally likely pieces may stand in another order than in training ({ties} probes)")
    eod = names[model.eod]
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token=eod, pad_token=eod, clean_up_tokenization_spaces=False,
        extra_special_tokens=[str(token.content) for token in specials[1:]],
    )  # fmt: skip
    tokenizer.name_or_path = str(path)
    if turns is not None:
        speak_in_turns(tokenizer, turns)
    return tokenizer


def _refuse_what_differs(model: PieceModel) -> None:
    reason = ""
    if model.algorithm not in (UNIGRAM, BPE):
        reason = "it is neither a unigram nor a BPE model"
    elif model.normalisation:
        reason = f"it rewrites characters by the rules {model.normalisation}, which fast tokenizers apply otherwise"
    elif model.whitespace_as_suffix or not model.escapes_spaces:
        reason = "it treats spaces in a way that fast tokenizers have not"
    elif any(" " in piece.text for piece in model.pieces if piece.kind == USER_DEFINED):
        reason = "a piece that its user defined holds a space"
    if reason:
        raise WhetError(
            f"{model.path}: no fast tokenizer gives the same ids as this model: {reason}. To train with ids that "
            "differ a little, convert it yourself and give the folder with the tokenizer.json: model.tokenizer=FOLDER"
        )


def _mark_id(model: PieceModel, role: str, mark: Mark) -> int:
    number = model.id_of(mark.text) if mark.id is None else mark.id
    if number is None or number >= len(model.pieces):
        raise WhetError(f"data.markers.{role}: {model.path} has no piece {mark.text if number is None else number}")
    piece, taken = model.pieces[number], model.id_of(mark.text)
    if piece.kind in (NORMAL, UNKNOWN, BYTE) or taken not in (None, number):
        raise WhetError(
            f"data.markers.{role}: {mark.text} cannot be id {number}, the {KINDS[piece.kind]} piece {piece.text!r}"
            + (f": it is piece {taken} already" if taken not in (None, number) else ": text becomes it too")
        )
    return number


def _names(model: PieceModel, marks: dict[int, str]) -> list[str]:
    """Each piece's name in the vocabulary: a marker's is its text, and a control piece's is one that no text holds."""
    names = [
        f"{piece.text} ({KINDS[piece.kind]})" if piece.kind in (UNKNOWN, CONTROL, UNUSED) else piece.text
        for piece in model.pieces
    ]
    names[model.eod] = model.pieces[model.eod].text
    for number, text in marks.items():
        names[number] = text
    return names
