"""Tokenizing a shared prefix once gives the ids and offsets of the whole text."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers

from examples import examples
from whet.data.render.shared_prefix import PrefixedEncoding, SharedPrefixEncoder

from .template_families import CHATML, tokenizer_of

START = "<|im_start|>system\nthe answer is this<|im_end|>\n<|im_start|>"
SPECIAL = ["<|im_start|>", "<|im_end|>"]
TEXTS = st.lists(st.text(st.characters(codec="utf-8"), max_size=20), min_size=2, max_size=5, unique=True)


def backend() -> Any:
    return tokenizer_of(CHATML).backend_tokenizer


def whole(text: str) -> Any:
    return backend().encode(text, add_special_tokens=False)


@settings(max_examples=examples(60), deadline=None)
@given(TEXTS, st.booleans())
def test_ids_and_offsets_are_those_of_the_whole_text(ends: list[str], offsets: bool) -> None:
    texts = [START + end for end in ends] + ["another " + ends[0]]
    for found, text in zip(SharedPrefixEncoder(backend(), SPECIAL).encode(texts, offsets), texts, strict=True):
        assert found.ids == whole(text).ids
        if offsets:
            check_offsets(found, text)


def check_offsets(found: PrefixedEncoding, text: str) -> None:
    encoding = whole(text)
    for position in range(len(text)):
        assert found.char_to_token(position) == encoding.char_to_token(position)
    for token in range(len(encoding)):
        assert found.token_start(token) == encoding.token_to_chars(token)[0]


def prefix_lengths(encoder: SharedPrefixEncoder, texts: list[str]) -> list[int]:
    return [encoded.prefix_characters for encoded in encoder.encode(texts)]


def test_once_the_prefix_is_found_only_the_rest_is_encoded() -> None:
    encoder = SharedPrefixEncoder(backend(), SPECIAL)
    assert prefix_lengths(encoder, [START + "a"]) == [0]  # one text alone shows no prefix
    assert prefix_lengths(encoder, [START + "a", START + "b"]) == [len(START)] * 2
    assert prefix_lengths(encoder, [START + "c", "c", START]) == [len(START), 0, len(START)]


def test_the_prefix_ends_with_a_special_token() -> None:
    texts = [START + "user\nHow", START + "user\nHowever"]
    assert prefix_lengths(SharedPrefixEncoder(backend(), SPECIAL), texts) == [len(START)] * 2


@pytest.mark.parametrize("special", [[], ["<|eot|>"]])
def test_without_a_special_token_there_is_no_shared_prefix(special: list[str]) -> None:
    assert prefix_lengths(SharedPrefixEncoder(backend(), special), [START + "a", START + "b"]) == [0, 0]


def test_a_tokenizer_that_treats_the_first_word_differently_encodes_texts_whole() -> None:
    vocabulary = {text: number for number, text in enumerate(["<|s|>", "▁", "a", "b", "▁a", "▁b", "?"])}
    tokenizer = Tokenizer(models.BPE(vocabulary, [("▁", "a"), ("▁", "b")], unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    tokenizer.add_special_tokens(["<|s|>"])
    texts = ["aaaaa<|s|>a", "aaaaa<|s|>b"]
    found = SharedPrefixEncoder(tokenizer, ["<|s|>"]).encode(texts)
    assert [encoded.prefix_characters for encoded in found] == [0, 0]
    assert [encoded.ids for encoded in found] == [
        tokenizer.encode(text, add_special_tokens=False).ids for text in texts
    ]


def test_texts_that_all_go_on_with_a_space_do_not_speak_for_those_that_do_not() -> None:
    """SentencePiece puts a space before the first word of a text, unless there is one: the rest must not count as a
    text of its own."""
    vocabulary = {text: i for i, text in enumerate(["<unk>", "<A>", "▁", "a", "▁a"])}
    backend = Tokenizer(models.BPE(vocabulary, [("▁", "a")], unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    backend.add_special_tokens(["<A>"])
    start = "<A>a a a<A>"
    encoder = SharedPrefixEncoder(backend, ["<A>"])
    encoder.encode([start + " a", start + "  a"])
    (found,) = encoder.encode([start + "a"])
    assert found.ids == backend.encode(start + "a", add_special_tokens=False).ids
