"""A tokenizer in GGUF: its tokens, and the names under which llama.cpp knows its rules.

llama.cpp has a hard-coded list of pre-tokenizers, the regular expressions that split text before BPE merges, and the
file names one of them in `tokenizer.ggml.pre`. Under a wrong name, digits or capitals are split differently while most
prompts look right, so tokenizers without a known name are refused.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from whet.core.errors import WhetError
from whet.exporting.spec import GenerationSettings

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6  # gguf.TokenType
_SPACE = "▁"
_UNMERGED_SCORE = -1e9
_WORD_PATTERN = (
    r"""(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"""
)
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASE_PATTERN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+%s|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*%s|%s"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_CONTRACTION = "(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_SPLIT_PATTERNS = {
    _WORD_PATTERN % r"\p{N}{1,3}": "llama-bpe",
    _WORD_PATTERN % r"\p{N}": "qwen2",
    _CASE_PATTERN % (_CONTRACTION, _CONTRACTION, r"\p{N}{1,3}"): "gpt-4o",
    _CASE_PATTERN % ("", "", r"\p{N}"): "tekken",
}
PRE_TOKENIZER_NAMES = ("gpt-2", "smollm", *_SPLIT_PATTERNS.values())
_CONVERTER = "Use --to merged, and llama.cpp's own converter"


@dataclass(frozen=True, slots=True)
class TokenizerRules:
    """llama.cpp's names for what a tokenizer does."""

    model: str
    """`gpt2` (byte-level BPE), `llama` (SentencePiece BPE) or `t5` (SentencePiece unigram)."""
    pre: str
    space_prefix: bool = False
    """Whether a text gets a space before it; for SentencePiece."""
    first_text_only: bool = False
    """Whether only a text at the very beginning gets it, which llama.cpp does not have. Prompts begin with a token."""


def tokenizer_rules(tokenizer: PreTrainedTokenizerFast) -> TokenizerRules:
    """What to call this tokenizer's rules; a WhetError if llama.cpp does not have them."""
    serialized = json.loads(tokenizer.backend_tokenizer.to_str())
    model = serialized["model"]
    if model["type"] == "BPE" and not model.get("byte_fallback"):
        return TokenizerRules("gpt2", pre_tokenizer_name(tokenizer))
    if model["type"] not in ("BPE", "Unigram"):
        raise WhetError(
            f"--to gguf: this model's tokenizer is of the type {model['type']}, and whet writes byte-level BPE and "
            f"SentencePiece. {_CONVERTER}"
        )
    if model["type"] == "Unigram" and model.get("byte_fallback"):
        raise WhetError(
            "--to gguf: this model has a SentencePiece unigram tokenizer with byte fallback, which llama.cpp does not "
            "support. Use --to merged"
        )
    steps = [*_steps(serialized["normalizer"], "normalizers"), *_steps(serialized["pre_tokenizer"], "pretokenizers")]
    unknown = [step["type"] for step in steps if not _is_sentencepiece_step(step)]
    if unknown:
        raise WhetError(
            f"--to gguf: this model's SentencePiece tokenizer has the step {unknown[0]}, which llama.cpp does not "
            f"have. {_CONVERTER}"
        )
    prefix = any(step["type"] == "Prepend" or step.get("prepend_scheme") == "always" for step in steps)
    first = any(step.get("prepend_scheme") == "first" for step in steps)
    return TokenizerRules("llama" if model["type"] == "BPE" else "t5", "default", prefix, first)


def _steps(outer: dict[str, Any] | None, key: str) -> list[dict[str, Any]]:
    return [] if outer is None else list(outer.get(key, [outer]))


def _is_sentencepiece_step(step: dict[str, Any]) -> bool:
    """Whether a step does what SentencePiece does, and llama.cpp: spaces become ▁, perhaps with one in front."""
    match step["type"]:
        case "Metaspace":
            return step["replacement"] == _SPACE
        case "Prepend":
            return step["prepend"] == _SPACE
        case "Replace":
            return step["pattern"] == {"String": " "} and step["content"] == _SPACE
        case "Split":
            return step["pattern"] == {"String": " "} and step["behavior"] == "MergedWithPrevious"
    return False


def pre_tokenizer_name(tokenizer: PreTrainedTokenizerFast) -> str:
    """llama.cpp's name for the pre-tokenizer of byte-level BPE."""
    steps = _steps(json.loads(tokenizer.backend_tokenizer.to_str())["pre_tokenizer"], "pretokenizers")
    types = [step.get("type") for step in steps]
    if types == ["ByteLevel"] and steps[0].get("use_regex", True):
        return "gpt-2"
    if types == ["Digits", "ByteLevel"] and steps[0]["individual_digits"] and steps[1].get("use_regex", True):
        return "smollm"
    if types == ["Split", "ByteLevel"] and not steps[1].get("use_regex", True):
        known = _SPLIT_PATTERNS.get(steps[0]["pattern"].get("Regex"))
        if known is not None and steps[0]["behavior"] in ("Isolated", "Removed") and _keeps_matches(steps[0]):
            return known
    raise WhetError(
        f"--to gguf: whet knows no GGUF name for the pre-tokenizer of this model ({types}), only for "
        f"{', '.join(PRE_TOKENIZER_NAMES)}. {_CONVERTER}"
    )


def _keeps_matches(split: dict[str, Any]) -> bool:
    """Both spellings of a split: isolate the matches, or remove what is none."""
    return bool(split["invert"]) == (split["behavior"] == "Removed")


def set_pre_tokenizer(tokenizer: PreTrainedTokenizerFast, name: str) -> None:
    """Give a tokenizer llama.cpp's pre-tokenizer of this name. transformers ignores the name when it loads a GGUF."""
    from tokenizers import Regex, pre_tokenizers

    bytes_only = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    if name in ("gpt-2", "smollm"):
        digits = [pre_tokenizers.Digits(individual_digits=True)] if name == "smollm" else []
        steps = pre_tokenizers.Sequence([*digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    else:
        pattern = next(regex for regex, known in _SPLIT_PATTERNS.items() if known == name)
        steps = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(pattern), "isolated"), bytes_only])
    tokenizer.backend_tokenizer.pre_tokenizer = steps
    if name == "llama-bpe":
        tokenizer.backend_tokenizer.model.ignore_merges = True


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """The tokens of a file, by id."""

    tokens: list[str]
    types: list[int]
    scores: list[float]
    """For SentencePiece: the greater, the earlier two tokens merge into this one; of unigrams the log-probability."""
    merges: list[str]
    """For byte-level BPE."""


def gguf_vocabulary(tokenizer: PreTrainedTokenizerFast, rows: int) -> Vocabulary:
    """Embedding rows without a token get the name of an unused one."""
    vocabulary: dict[str, int] = tokenizer.get_vocab()
    if max(vocabulary.values()) >= rows:
        raise WhetError(
            f"--to gguf: the tokenizer has {max(vocabulary.values()) + 1:,} tokens, but the model has only {rows:,} "
            "embedding rows. Use the tokenizer that came with the model"
        )
    model = json.loads(tokenizer.backend_tokenizer.to_str())["model"]
    is_sentencepiece = tokenizer_rules(tokenizer).model != "gpt2"
    tokens, types = [f"[PAD{number}]" for number in range(rows)], [UNUSED] * rows
    for token, number in vocabulary.items():
        is_byte = is_sentencepiece and re.fullmatch("<0x[0-9A-F]{2}>", token)
        tokens[number], types[number] = token, BYTE if is_byte else NORMAL
    for number, added in tokenizer.added_tokens_decoder.items():
        text = added.content if added.special or not is_sentencepiece else added.content.replace(_SPACE, " ")
        tokens[number], types[number] = text, CONTROL if added.special else USER_DEFINED
    if is_sentencepiece and tokenizer.unk_token_id is not None:
        types[tokenizer.unk_token_id] = UNKNOWN
    pairs = [merge.split(" ", 1) if isinstance(merge, str) else merge for merge in model.get("merges", [])]
    scores = [_UNMERGED_SCORE] * rows
    if model["type"] == "Unigram":
        for number, (_, score) in enumerate(model["vocab"]):
            scores[number] = score
    elif is_sentencepiece:
        for rank in reversed(range(len(pairs))):  # the earliest merge that makes a token counts
            scores[vocabulary["".join(pairs[rank])]] = -float(rank)
    return Vocabulary(tokens, types, scores, [" ".join(pair) for pair in pairs])


def add_tokenizer(writer: Any, settings: GenerationSettings, rows: int) -> None:
    """Write tokens, rules, special tokens and chat template."""
    tokenizer = settings.tokenizer
    rules, vocabulary = tokenizer_rules(tokenizer), gguf_vocabulary(tokenizer, rows)
    writer.add_tokenizer_model(rules.model)
    writer.add_tokenizer_pre(rules.pre)
    writer.add_token_list(vocabulary.tokens)
    writer.add_token_types(vocabulary.types)
    if rules.model == "gpt2":
        writer.add_token_merges(vocabulary.merges)
    else:
        writer.add_token_scores(vocabulary.scores)
        writer.add_add_space_prefix(rules.space_prefix)
        if tokenizer.unk_token_id is not None:
            writer.add_unk_token_id(tokenizer.unk_token_id)
    ends = (tokenizer.eos_token_id, settings.end_of_turn_id, *settings.stop_ids)
    eos = next((number for number in ends if number is not None), None)
    if eos is not None:
        writer.add_eos_token_id(eos)
    if settings.end_of_turn_id is not None:
        writer.add_eot_token_id(settings.end_of_turn_id)
    if tokenizer.bos_token_id is not None:
        writer.add_bos_token_id(tokenizer.bos_token_id)
    if tokenizer.pad_token_id is not None:
        writer.add_pad_token_id(tokenizer.pad_token_id)
    ids = tokenizer("a", add_special_tokens=True)["input_ids"]
    writer.add_add_bos_token(bool(ids) and ids[0] == tokenizer.bos_token_id)
    writer.add_add_eos_token(False)
    templates = tokenizer.chat_template
    if isinstance(templates, dict):  # `default`, and others such as `tool_use`, which llama.cpp takes for tools
        templates = [{"name": name, "template": template} for name, template in templates.items()]
    if templates:
        writer.add_chat_template(templates)


def default_template(tokenizer: PreTrainedTokenizerFast) -> str | None:
    """The template for conversations without tools."""
    templates = tokenizer.chat_template
    return templates.get("default") if isinstance(templates, dict) else templates


def read_templates(fields: Any) -> str | dict[str, str] | None:
    """The chat templates of a file, by name if there are several."""
    key = "tokenizer.chat_template"
    default = fields[key].contents() if key in fields else None
    if f"{key}s" not in fields:
        return default
    named = {name: fields[f"{key}.{name}"].contents() for name in fields[f"{key}s"].contents()}
    return named if default is None else {"default": default, **named}
