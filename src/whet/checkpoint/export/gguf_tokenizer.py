"""A tokenizer as GGUF has it: pieces, merges, and the name of the rule that cuts text before merging.

llama.cpp does not read regular expressions from the file; it knows them by name (`tokenizer.ggml.pre`). Under a wrong
name digits or capitals are cut differently while many a prompt looks right, so a rule that has no name here is refused.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from whet.core.errors import WhetError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

NORMAL, CONTROL, USER_DEFINED, UNUSED = 1, 3, 4, 5
_WORDS = (
    r"""(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"""
)
_SPLITS = {_WORDS % r"\p{N}{1,3}": "llama-bpe", _WORDS % r"\p{N}": "qwen2"}
KNOWN_CUTS = ("gpt-2", "smollm", *_SPLITS.values())


def cut_of(tokenizer: PreTrainedTokenizerFast) -> str:
    """The name that llama.cpp has for the way this tokenizer cuts text."""
    written = json.loads(tokenizer.backend_tokenizer.to_str())
    if written["model"]["type"] != "BPE" or written["model"].get("byte_fallback"):
        raise WhetError(
            "--to gguf: this model's tokenizer is not byte-level BPE (it may be SentencePiece), which whet cannot "
            f"write as GGUF. It can: byte-level BPE that cuts text like {', '.join(KNOWN_CUTS)}. Use --to merged"
        )
    before = written["pre_tokenizer"] or {}
    steps = before.get("pretokenizers", [before])
    shape = [step.get("type") for step in steps]
    if shape == ["ByteLevel"] and steps[0].get("use_regex", True):
        return "gpt-2"
    if shape == ["Digits", "ByteLevel"] and steps[0]["individual_digits"] and steps[1].get("use_regex", True):
        return "smollm"
    if shape == ["Split", "ByteLevel"] and not steps[1].get("use_regex", True):
        known = _SPLITS.get(steps[0]["pattern"].get("Regex"))
        if known is not None and steps[0]["behavior"] == "Isolated" and not steps[0]["invert"]:
            return known
    raise WhetError(
        f"--to gguf: this model's tokenizer cuts text in a way that whet has no GGUF name for ({shape}). It knows "
        f"{', '.join(KNOWN_CUTS)}. Use --to merged, and llama.cpp's own converter"
    )


def set_cut(tokenizer: PreTrainedTokenizerFast, name: str) -> None:
    """Cut text as a program that goes by this name does: transformers does not look at it when it reads a GGUF."""
    from tokenizers import Regex, pre_tokenizers

    bytes_only = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    if name in ("gpt-2", "smollm"):
        digits = [pre_tokenizers.Digits(individual_digits=True)] if name == "smollm" else []
        cut = pre_tokenizers.Sequence([*digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    else:
        pattern = next(regex for regex, known in _SPLITS.items() if known == name)
        cut = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(pattern), "isolated"), bytes_only])
    tokenizer.backend_tokenizer.pre_tokenizer = cut
    if name == "llama-bpe":
        tokenizer.backend_tokenizer.model.ignore_merges = True


def pieces_of(tokenizer: PreTrainedTokenizerFast, rows: int) -> tuple[list[str], list[int], list[str]]:
    """(pieces, their types, merges); rows of the embedding without a piece get a name that no text is cut into."""
    vocabulary: dict[str, int] = tokenizer.get_vocab()
    if max(vocabulary.values()) >= rows:
        raise WhetError(
            f"--to gguf: the tokenizer knows {max(vocabulary.values()) + 1:,} tokens and the model only {rows:,}. They "
            "do not belong together: use the tokenizer that came with the model"
        )
    pieces, types = [f"[PAD{number}]" for number in range(rows)], [UNUSED] * rows
    for piece, number in vocabulary.items():
        pieces[number], types[number] = piece, NORMAL
    for number, token in tokenizer.added_tokens_decoder.items():
        pieces[number], types[number] = token.content, CONTROL if token.special else USER_DEFINED
    merges: list[Any] = json.loads(tokenizer.backend_tokenizer.to_str())["model"]["merges"]
    return pieces, types, [merge if isinstance(merge, str) else " ".join(merge) for merge in merges]
