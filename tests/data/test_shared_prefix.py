"""The opening that texts share: the tokens are those of the whole text, cut or not."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers

from whet.data.render.shared_prefix import PrefixedEncoding, SharedPrefixEncoder

from .families import CHATML, tokenizer_of

START = "<|im_start|>system\nthe answer is this<|im_end|>\n<|im_start|>"
SPECIAL = ["<|im_start|>", "<|im_end|>"]
TEXTS = st.lists(st.text(st.characters(codec="utf-8"), max_size=20), min_size=2, max_size=5, unique=True)


def backend() -> Any:
    return tokenizer_of(CHATML).backend_tokenizer


def whole(text: str) -> Any:
    return backend().encode(text, add_special_tokens=False)


@settings(max_examples=60, deadline=None)
@given(TEXTS, st.booleans())
def test_ids_and_places_are_those_of_the_whole_text(ends: list[str], places: bool) -> None:
    texts = [START + end for end in ends] + ["another " + ends[0]]
    for found, text in zip(SharedPrefixEncoder(backend(), SPECIAL).encode(texts, places), texts, strict=True):
        assert found.ids == whole(text).ids
        if places:
            check_places(found, text)


def check_places(found: PrefixedEncoding, text: str) -> None:
    encoding = whole(text)
    for place in range(len(text)):
        assert found.char_to_token(place) == encoding.char_to_token(place)
    for token in range(len(encoding)):
        assert found.start_of(token) == encoding.token_to_chars(token)[0]


def counted(openings: SharedPrefixEncoder, texts: list[str]) -> list[int]:
    return [encoded.cut for encoded in openings.encode(texts)]


def test_only_the_rest_is_encoded_once_the_opening_is_known() -> None:
    openings = SharedPrefixEncoder(backend(), SPECIAL)
    assert counted(openings, [START + "a"]) == [0]  # one text alone shows no opening
    assert counted(openings, [START + "a", START + "b"]) == [len(START)] * 2
    assert counted(openings, [START + "c", "c", START]) == [len(START), 0, len(START)]


def test_the_cut_is_behind_a_special_token_never_within_the_words_that_follow() -> None:
    texts = [START + "user\nHow", START + "user\nHowever"]
    assert counted(SharedPrefixEncoder(backend(), SPECIAL), texts) == [len(START)] * 2


@pytest.mark.parametrize("special", [[], ["<|eot|>"]])
def test_without_a_special_token_in_it_there_is_no_opening(special: list[str]) -> None:
    assert counted(SharedPrefixEncoder(backend(), special), [START + "a", START + "b"]) == [0, 0]


def test_a_tokenizer_that_treats_the_first_word_otherwise_is_never_cut() -> None:
    vocabulary = {text: number for number, text in enumerate(["<|s|>", "▁", "a", "b", "▁a", "▁b", "?"])}
    tokenizer = Tokenizer(models.BPE(vocabulary, [("▁", "a"), ("▁", "b")], unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    tokenizer.add_special_tokens(["<|s|>"])
    texts = ["aaaaa<|s|>a", "aaaaa<|s|>b"]
    found = SharedPrefixEncoder(tokenizer, ["<|s|>"]).encode(texts)
    assert [encoded.cut for encoded in found] == [0, 0]
    assert [encoded.ids for encoded in found] == [
        tokenizer.encode(text, add_special_tokens=False).ids for text in texts
    ]
