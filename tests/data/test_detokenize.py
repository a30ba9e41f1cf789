"""Ids back to text: what is shown as learned and as given is, put together, the text."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from examples import examples
from whet.core.errors import WhetError
from whet.data.render.detokenize import Decoder, open_decoder, supervised_segments

from .template_families import CHATML, tokenizer_of


def processor_of(path: Path) -> Any:
    return pytest.importorskip("sentencepiece").SentencePieceProcessor(model_file=str(path))


@pytest.fixture(scope="module", params=["fast", "bpe", "unigram"])
def decoder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Decoder, int]:
    """A decoder with the size of its vocabulary."""
    if request.param == "fast":
        file = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
        tokenizer_of(CHATML).backend_tokenizer.save(str(file))
        return open_decoder(file), 304
    path = request.getfixturevalue("pieces")(request.param, byte_fallback=True)
    return open_decoder(path), processor_of(path).get_piece_size()


@settings(max_examples=examples(200), deadline=None)
@given(data=st.data())
def test_segments_make_up_the_text_and_change_with_the_mask(decoder: tuple[Decoder, int], data: st.DataObject) -> None:
    decode, size = decoder
    pairs = data.draw(st.lists(st.tuples(st.integers(0, size - 1), st.integers(0, 1)), max_size=20))
    ids, loss = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
    found = supervised_segments(ids, loss, decode)
    assert "".join(text for text, _ in found) == decode.text(ids)
    changes = [bool(flag) for i, flag in enumerate(loss) if i == 0 or loss[i - 1] != flag]
    assert [learned for _, learned in found] == changes


def test_each_segment_has_the_text_of_its_tokens(tmp_path: Path) -> None:
    tokenizer = tokenizer_of(CHATML)
    tokenizer.backend_tokenizer.save(str(tmp_path / "tokenizer.json"))
    decode = open_decoder(tmp_path)
    given_, learned = tokenizer.encode("<|im_start|>user\n "), tokenizer.encode(" kā iet?<|im_end|>")
    loss = [0] * len(given_) + [1] * len(learned)
    assert supervised_segments([*given_, *learned], loss, decode) == [
        ("<|im_start|>user\n ", False),
        (" kā iet?<|im_end|>", True),
    ]


def test_a_character_with_bytes_on_both_sides_of_a_border_is_shown_once(tmp_path: Path) -> None:
    tokenizer = tokenizer_of(CHATML)
    tokenizer.backend_tokenizer.save(str(tmp_path / "tokenizer.json"))
    ids = tokenizer.encode("xāy")
    assert len(ids) == 4
    assert supervised_segments(ids, [0, 0, 1, 1], open_decoder(tmp_path)) == [("x", False), ("āy", True)]


def test_control_pieces_are_shown_by_name(pieces: Callable[..., Path]) -> None:
    decode = open_decoder(pieces("bpe"))
    assert decode.text([7, *processor_of(pieces("bpe")).encode("hello world"), 7, 3]) == (
        "<|user|>hello world<|user|><|endoftext|>"
    )


def test_no_tokenizer_or_a_damaged_one_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(WhetError, match=rf"{tmp_path}: no tokenizer here .*--tokenizer PATH"):
        open_decoder(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(WhetError, match=r"tokenizer\.json: not a tokenizer"):
        open_decoder(tmp_path)
