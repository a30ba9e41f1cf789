"""The bytes of tokens, against the bytes of the text that they were made from."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from examples import examples
from small_models import smollm2_folder
from whet.model.config import ModelConfig
from whet.model.load.tokenizer import load_tokenizer
from whet.tokenizer.convert_sentencepiece import to_fast_tokenizer
from whet.tokenizer.token_bytes import bytes_per_token

TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=40)


@cache
def builtin(name: str) -> tuple[Any, Any]:
    if name == "builtin:smollm2":
        smollm2_folder()
    tokenizer = load_tokenizer(ModelConfig(path=name))
    return tokenizer, bytes_per_token(tokenizer, 0)


@pytest.mark.parametrize("name", ["builtin:tiny", "builtin:smollm2"])
@settings(max_examples=examples(150), deadline=None)
@given(text=TEXTS)
def test_byte_level_tokens_have_the_bytes_of_their_text(name: str, text: str) -> None:
    tokenizer, bytes_ = builtin(name)
    ids = tokenizer(text, add_special_tokens=False).input_ids
    if tokenizer.backend_tokenizer.decode(ids, skip_special_tokens=False) == text:  # SmolLM2 drops a few rare bytes
        assert bytes_[ids].sum() == len(text.encode())


def test_no_byte_of_text_is_lost() -> None:
    tokenizer, bytes_ = builtin("builtin:smollm2")
    for text in (
        "Ärger, naïve, œuvre",
        "日本語 한국어 ไทย",
        "مرحبا שלום",
        "🙂👍🏽 ∑∫≠",
        "\t\n  x\r\n",
        "привет kā jums",
    ):
        assert bytes_[tokenizer(text, add_special_tokens=False).input_ids].sum() == len(text.encode())


@pytest.mark.parametrize("kind", ["bpe", "unigram"])
@pytest.mark.parametrize("prefix", [False, True])
def test_sentencepiece_tokens_have_the_bytes_of_their_text(
    kind: str, prefix: bool, pieces: Callable[..., Path]
) -> None:
    path = pieces(kind, byte_fallback=True, add_dummy_prefix=prefix, remove_extra_whitespaces=False)
    tokenizer = to_fast_tokenizer(path, None)
    bytes_ = bytes_per_token(tokenizer, 0)
    assert bytes_ is not None
    wanted = {"<0x0A>": 1, "▁": 1, "</s> (control)": 0, "<|user|> (control)": 0, "<|endoftext|>": 0}
    assert {name: int(bytes_[tokenizer.get_vocab()[name]]) for name in wanted} == wanted

    @settings(max_examples=examples(100), deadline=None)
    @given(text=TEXTS)
    def check(text: str) -> None:
        text = f"a {text} z"  # whitespace alone has no tokens
        if "▁" not in text and "<|endoftext|>" not in text:  # a space, and a special token without bytes
            assert bytes_[tokenizer(text, add_special_tokens=False).input_ids].sum() == len(text.encode()) + prefix

    check()


def test_special_tokens_have_no_bytes_and_added_tokens_their_own() -> None:
    tokenizer = load_tokenizer(ModelConfig(path="builtin:tiny"))
    tokenizer.add_tokens(["größer"])
    bytes_ = bytes_per_token(tokenizer, 1000)
    assert bytes_ is not None
    assert len(bytes_) == 1000  # rows of the model that no token has
    assert [int(bytes_[number]) for number in tokenizer.all_special_ids] == [0] * len(tokenizer.all_special_ids)
    assert bytes_[tokenizer.convert_tokens_to_ids("größer")] == len("größer".encode())
    assert bytes_[len(tokenizer) :].sum() == 0
    tokenizer, bytes_ = builtin("builtin:smollm2")
    named = [number for number, token in tokenizer.added_tokens_decoder.items() if token.special]
    assert set(named) > set(tokenizer.all_special_ids) or len(named) > 3
    assert bytes_[named].sum() == 0


def test_a_tokenizer_that_loses_text_has_no_byte_counts() -> None:
    words = {"[UNK]": 0, "hello": 1, "world": 2, "##s": 3}
    backend = Tokenizer(models.WordPiece(words, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    assert bytes_per_token(PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="[UNK]"), 0) is None
    backend.decoder = decoders.Metaspace()  # says that it is one which can be read; the text tells otherwise
    assert bytes_per_token(PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="[UNK]"), 0) is None
