"""Tokenizers in GGUF: SentencePiece by its scores, and what llama.cpp cannot express is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from whet.core.errors import WhetError
from whet.exporting.gguf.gguf_tokenizer import BYTE, CONTROL, UNKNOWN, UNUSED, gguf_vocabulary, tokenizer_rules

N, P = normalizers, pre_tokenizers
STYLES: dict[str, tuple[Any, Any, bool]] = {
    "Llama 2": (N.Sequence([N.Prepend("▁"), N.Replace(" ", "▁")]), None, True),
    "Llama 2, new": (None, P.Metaspace("▁", prepend_scheme="first", split=False), False),
    "always": (None, P.Metaspace("▁", prepend_scheme="always", split=False), True),
    "Gemma": (N.Replace(" ", "▁"), P.Split(" ", "merged_with_previous"), False),
}
MERGES = [("▁", "a"), ("b", "c"), ("▁a", "bc"), ("a", "bc")]


def sentencepiece(style: str) -> PreTrainedTokenizerFast:
    """A BPE tokenizer with byte fallback, as transformers makes one of a SentencePiece model."""
    specials = ["<unk>", "<s>", "</s>"]
    pieces = [*specials, *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "a", "b", "c", *map("".join, MERGES)]
    vocabulary = {piece: number for number, piece in enumerate(pieces)}
    backend = Tokenizer(models.BPE(vocabulary, MERGES, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    backend.normalizer, backend.pre_tokenizer = STYLES[style][:2]
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, unk_token="<unk>", bos_token="<s>", eos_token="</s>",
        chat_template="{{ bos_token }}{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '</s>\n' }}"
        "{% endfor %}{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}",
    )  # fmt: skip


@pytest.mark.parametrize("style", STYLES)
def test_sentencepiece_merges_become_scores(style: str) -> None:
    tokenizer = sentencepiece(style)
    rules = tokenizer_rules(tokenizer)
    assert (rules.model, rules.pre, rules.space_prefix) == ("llama", "default", STYLES[style][2])
    found = gguf_vocabulary(tokenizer, len(tokenizer) + 2)
    scores = {token: found.scores[number] for token, number in tokenizer.get_vocab().items()}
    assert [scores["".join(pair)] for pair in MERGES] == [0, -1, -2, -3]
    assert scores["a"] < -3
    types = dict(zip(found.tokens, found.types, strict=True))
    assert (types["<unk>"], types["<s>"], types["<0x41>"], found.types[-1]) == (UNKNOWN, CONTROL, BYTE, UNUSED)


@pytest.mark.slow
@pytest.mark.parametrize("style", STYLES)
def test_llama_cpp_gives_the_same_ids(
    random_model: Callable[..., Any], export_spec_of: Callable[..., Any], tmp_path: Any, style: str
) -> None:
    pytest.importorskip("cyllama")
    from whet.exporting.exporter import write_export

    tokenizer = sentencepiece(style)
    spec = export_spec_of(random_model("llama", vocab_size=len(tokenizer) + 3), tokenizer=tokenizer)
    probe = tokenizer.encode("abc  a b cabc ab\n\nGröße")
    certificate = write_export(spec, "gguf", tmp_path / "gguf", [probe])
    assert certificate.same_ids
    assert certificate.same_template
    assert certificate.max_logit_difference < 1e-4


def test_what_llama_cpp_cannot_express_is_refused() -> None:
    tokenizer = sentencepiece("Gemma")
    tokenizer.backend_tokenizer.normalizer = N.Sequence([N.NFKC(), N.Replace(" ", "▁")])
    with pytest.raises(WhetError, match=r"has the step NFKC, which llama\.cpp does not have"):
        tokenizer_rules(tokenizer)
    words = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel({"a": 0}, unk_token="a")))
    with pytest.raises(WhetError, match="of the type WordLevel, and whet writes byte-level BPE and SentencePiece"):
        tokenizer_rules(words)
    unigram = Tokenizer(models.Unigram([("<unk>", 0.0), ("a", -1.0)], unk_id=0, byte_fallback=True))
    with pytest.raises(WhetError, match="unigram tokenizer with byte fallback"):
        tokenizer_rules(PreTrainedTokenizerFast(tokenizer_object=unigram))
