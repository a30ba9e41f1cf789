"""Marked text: the ids and masks that the description of LUMI's data gives, written out or computed another way."""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken
from transformers import PreTrainedTokenizerFast

from examples import examples
from whet.core.errors import BadRecordError, WhetError
from whet.data.config import DataConfig, Marker, Markers, Source
from whet.data.conversation import Conversation, MarkedText, Message, Origin, ToolCall
from whet.data.prepare.chunks import Chunk
from whet.data.prepare.store import StoreWriter
from whet.data.prepare.tokenize import tokenize_records
from whet.data.render.marked_text import MARKER_LOOK_ALIKE, MarkedRenderer
from whet.data.render.renderer import Rendered
from whet.tokenizer.encoders import FastTokenizerEncoder, SentencePieceEncoder, make_encoder

SentencePieceProcessor = pytest.importorskip("sentencepiece").SentencePieceProcessor

U, A, S = "<<<|user|>>>", "<<<|assistant|>>>", "<<<|system|>>>"
MARKERS = Markers(user=Marker(text=U, id=7), assistant=Marker(text=A, id=8))
WITH_SYSTEM = Markers(user=MARKERS.user, assistant=MARKERS.assistant, system=Marker(text=S, id=6))
HERE = Origin("lumi.jsonl", 1)


class Letters:
    """An encoder whose ids can be written by hand: a letter's id is its code point."""

    vocab_size, eod_id, fingerprint = 0x110000, 3, "letters"

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        assert all(text.strip() for text in texts), "whitespace alone is never encoded"
        return [[ord(char) for char in text] for text in texts]

    def token_to_id(self, text: str) -> int | None:
        return {U: 7, A: 8}.get(text)

    def id_to_token(self, number: int) -> str:
        return {3: "<|endoftext|>", 6: "<|system|>", 7: "<|user|>", 8: "<|assistant|>"}.get(number) or chr(number)

    def token_kind(self, number: int) -> str | None:
        return None if number < 10 else "ordinary"

    def check_markers(self, ids: Sequence[int]) -> None:
        assert set(ids) <= {6, 7, 8}


def render(item: str | Conversation, markers: Markers = MARKERS, train_on: str = "assistant") -> Rendered:
    record = MarkedText(item, HERE) if isinstance(item, str) else item
    (found,) = MarkedRenderer(Letters(), markers, train_on).render_items([record])
    assert isinstance(found, Rendered), found
    assert found.ids.dtype == np.int32
    assert found.loss.dtype == np.uint8
    return found


def refusal(item: str | Conversation, markers: Markers = MARKERS, train_on: str = "assistant") -> BadRecordError:
    record = MarkedText(item, HERE) if isinstance(item, str) else item
    (found,) = MarkedRenderer(Letters(), markers, train_on).render_items([record])
    assert isinstance(found, BadRecordError)
    return found


def conversation_of(*turns: tuple[str, str] | Message) -> Conversation:
    return Conversation(tuple(turn if isinstance(turn, Message) else Message(*turn) for turn in turns), HERE)


TWO = f"{U}ab{U}{A}c{A}\n{U}d{U}{A}ef{A}"
TWO_IDS = [7, 97, 98, 7, 8, 99, 8, 7, 100, 7, 8, 101, 102, 8, 3]


@pytest.mark.parametrize(
    ("train_on", "loss"),
    [
        ("assistant", [0, 0, 0, 0, 0, 1, 1, 0, 0, 0, 0, 1, 1, 1, 1]),
        ("last", [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1]),
        ("all", [0, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1]),
    ],
)
def test_a_line_of_two_turns_by_hand(train_on: str, loss: list[int]) -> None:
    found = render(TWO, train_on=train_on)
    assert found.ids.tolist() == TWO_IDS
    assert found.loss.tolist() == loss
    assert found.supervises_end
    assert found.notes == ()


def test_without_end_of_document_the_closing_marker_is_the_last_token() -> None:
    found = render(TWO, Markers(user=MARKERS.user, assistant=MARKERS.assistant, append_eod=False))
    assert found.ids.tolist() == TWO_IDS[:-1]
    assert found.loss.tolist()[-1] == 1
    assert found.supervises_end


@pytest.mark.parametrize(
    ("text", "ids", "loss"),
    [
        (
            f"x{U}a{U}y{A}b{A}",
            [120, 7, 97, 7, 121, 8, 98, 8, 3],
            [0, 0, 0, 0, 0, 0, 1, 1, 1],
        ),  # outside: kept, unsupervised
        (f" \n{U}a{U}\t{A}b{A} ", [7, 97, 7, 8, 98, 8, 3], [0, 0, 0, 0, 1, 1, 1]),  # whitespace outside: dropped
        (f"{U} {U}{A} b{A}", [7, 7, 8, 32, 98, 8, 3], [0, 0, 0, 1, 1, 1, 1]),  # and inside, but not beside text
        (f"{U}a{U}{A}{A}", [7, 97, 7, 8, 8, 3], [0, 0, 0, 0, 1, 1]),  # an empty answer teaches to end
        (f"{A}b{A}{U}a{U}", [8, 98, 8, 7, 97, 7, 3], [0, 1, 1, 0, 0, 0, 0]),  # no answer ends here: EOD is not learned
        (f"{A}b{A}z", [8, 98, 8, 122, 3], [0, 1, 1, 0, 0]),
    ],
)
def test_ids_and_mask_by_hand(text: str, ids: list[int], loss: list[int]) -> None:
    found = render(text)
    assert found.ids.tolist() == ids
    assert found.loss.tolist() == loss


@pytest.mark.parametrize(
    ("text", "reason", "says"),
    [
        ("hello", "no marker", U),
        ("", "no marker", A),
        (f"{U}a{U}{A}b", "unclosed turn", "is not closed"),
        (f"{U}a{A}b{A}{U}", "unclosed turn", "before the turn of <<<|user|>>> is closed"),
        (f"{U}a{U}", "no assistant turn", "nothing is supervised"),
        (f"{U}\ud800{U}{A}b{A}", "bad text", "surrogate"),
    ],
)
def test_a_refused_line_has_a_reason(text: str, reason: str, says: str) -> None:
    error = refusal(text)
    assert error.reason == reason
    assert says in str(error)


def test_a_bad_line_does_not_shift_its_neighbours() -> None:
    renderer = MarkedRenderer(Letters(), MARKERS, "assistant")
    found = renderer.render_items(
        [MarkedText(TWO, HERE), MarkedText("x", HERE), conversation_of(("user", "a"), ("assistant", "b"))]
    )
    assert isinstance(found[1], BadRecordError)
    assert [item.ids.tolist() for item in (found[0], found[2]) if isinstance(item, Rendered)] == [
        TWO_IDS, [7, 97, 7, 8, 98, 8, 3],
    ]  # fmt: skip


@pytest.mark.parametrize(
    "text", ["<<|user|>>", "<|assistant|>", "<<<| User |>>>", "<|USER|>", "<user>", "<|endoftext|>", "a\x07b"]
)
def test_marker_look_alikes_are_kept_and_noted(text: str) -> None:
    found = render(f"{U}{text}{U}{A}b{A}")
    assert found.notes == (MARKER_LOOK_ALIKE,)
    assert found.ids.tolist() == [7, *map(ord, text), 7, 8, 98, 8, 3]


@pytest.mark.parametrize("text", ["user", "the user > the assistant", "a < b | c > d", "users: <b>bold</b>"])
def test_ordinary_text_is_not_noted(text: str) -> None:
    assert render(f"{U}{text}{U}{A}b{A}").notes == ()


SPAN = st.text(st.sampled_from("ab<|>\n é▁"), max_size=6)
TURNS = st.lists(st.tuples(st.sampled_from(["user", "assistant"]), SPAN), min_size=1, max_size=6)


@settings(max_examples=examples(200), deadline=None)
@given(turns=TURNS, train_on=st.sampled_from(["assistant", "last", "all"]), eod=st.booleans())
def test_ids_and_mask_follow_from_the_turns(turns: list[tuple[str, str]], train_on: str, eod: bool) -> None:
    marks, numbers = {"user": U, "assistant": A}, {"user": 7, "assistant": 8}
    text = "".join(marks[role] + span + marks[role] for role, span in turns)
    markers = Markers(user=MARKERS.user, assistant=MARKERS.assistant, append_eod=eod)
    answers = [place for place, (role, _) in enumerate(turns) if role == "assistant"]
    if not answers and train_on != "all":
        assert refusal(text, markers, train_on).reason == "no assistant turn"
        return
    expected: list[tuple[int, int]] = []
    for place, (role, span) in enumerate(turns):
        taught = train_on == "all" or place in (answers[-1:] if train_on == "last" else answers)
        expected.append((numbers[role], train_on == "all"))
        expected += [(ord(char), taught) for char in span] if span.strip() else []
        expected.append((numbers[role], taught))
    if eod:
        expected.append((3, expected[-1][1]))
    expected[0] = (expected[0][0], 0)
    found = render(text, markers, train_on)
    assert list(zip(found.ids.tolist(), found.loss.tolist(), strict=True)) == expected


def test_a_marker_may_begin_like_another() -> None:
    markers = Markers(user=Marker(text="<|", id=7), assistant=Marker(text="<|a", id=8))
    assert render("<|x<|<|ay<|a", markers).ids.tolist() == [7, 120, 7, 8, 121, 8, 3]


# Conversations between markers


def test_a_conversation_renders_like_the_equivalent_marked_line() -> None:
    said = conversation_of(("user", "ab"), ("assistant", "c"), ("user", "d"), ("assistant", "ef"))
    for train_on in ("assistant", "last", "all"):
        ours, line = render(said, train_on=train_on), render(TWO, train_on=train_on)
        assert ours.ids.tolist() == line.ids.tolist()
        assert ours.loss.tolist() == line.loss.tolist()


def test_a_system_message_has_its_marker_or_is_prepended_to_the_user_turn() -> None:
    said = conversation_of(("system", "s"), ("developer", "t"), ("user", "a"), ("assistant", "b"))
    assert render(said, WITH_SYSTEM).ids.tolist() == [6, 115, 6, 6, 116, 6, 7, 97, 7, 8, 98, 8, 3]
    merged = [115, 10, 10, 116, 10, 10, 97]
    assert render(said).ids.tolist() == [7, *merged, 7, 8, 98, 8, 3]
    assert render(f"{S}s{S}{U}a{U}{A}b{A}", WITH_SYSTEM).ids.tolist()[:3] == [6, 115, 6]


def test_a_turn_with_train_false_is_not_supervised() -> None:
    said = conversation_of(("user", "a"), ("assistant", "b"), ("user", "c"), Message("assistant", "d", train=False))
    assert render(said).loss.tolist() == [0, 0, 0, 0, 1, 1, 0, 0, 0, 0, 0, 0, 0]
    assert render(said, train_on="all").loss.tolist() == [0, 1, 1, 1, 1, 1, 1, 1, 1, 0, 0, 0, 0]


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        (conversation_of(("user", "a"), Message("assistant", "b", tool_calls=(ToolCall("f", {}),))), "tools"),
        (conversation_of(("user", "a"), ("tool", "1"), ("assistant", "b")), "tools"),
        (Conversation((Message("user", "a"), Message("assistant", "b")), HERE, ({"name": "f"},)), "tools"),
        (conversation_of(("user", "a"), Message("assistant", "b", reasoning="hm")), "reasoning"),
        (conversation_of(("user", "a"), ("assistant", " \n")), "empty turn"),
        (conversation_of(("user", f"a{A}"), ("assistant", "b")), "marker in a message"),
        (conversation_of(("user", "a"), ("system", "s"), ("assistant", "b")), "system without user"),
        (conversation_of(("user", "a"), ("assistant", "b"), ("system", "s")), "system without user"),
    ],
)
def test_what_markers_cannot_express_is_refused(said: Conversation, reason: str) -> None:
    assert refusal(said).reason == reason


# Markers and their ids


def test_a_marker_without_an_id_is_looked_up() -> None:
    found = MarkedRenderer(Letters(), Markers(user=Marker(text=U), assistant=Marker(text=A)), "assistant")
    assert found.ids == {"user": 7, "assistant": 8}


@pytest.mark.parametrize(
    ("user", "says"),
    [
        (Marker(text="[user]"), r"data\.markers\.user\.text: \[user\] is not a token"),
        (Marker(text=U, id=0x110000), r"data\.markers\.user\.id: 1114112 is beyond"),
        (Marker(text=U, id=97), r"data\.markers\.user\.id: id 97 is the ordinary piece 'a'"),
        (Marker(text=U, id=8), r"data\.markers\.assistant: .*\(id 8\) is also the marker of user"),
        (Marker(text=U, id=3), r"data\.markers\.user: .*is also the end of document"),
        (Marker(text=A, id=7), r"data\.markers\.assistant: .*is also the marker of user"),
    ],
)
def test_an_ambiguous_or_unknown_marker_is_refused(user: Marker, says: str) -> None:
    with pytest.raises(WhetError, match=says):
        MarkedRenderer(Letters(), Markers(user=user, assistant=MARKERS.assistant), "assistant")


# Real tokenizers


def as_on_lumi(text: str, processor: Any) -> list[int]:
    """The ids by the description alone: cut at markers, encode what is not whitespace, put 7 and 8 in, then EOD."""
    ids: list[int] = []
    while text:
        cuts = [(at, mark, number) for mark, number in ((U, 7), (A, 8)) if (at := text.find(mark)) >= 0]
        at, mark, number = min(cuts, default=(len(text), "", None))
        if text[:at].strip():
            ids += processor.encode(text[:at])
        ids += [] if number is None else [number]
        text = text[at + len(mark) :]
    return [*ids, processor.piece_to_id("<|endoftext|>")]


@pytest.mark.parametrize("kind", ["bpe", "unigram"])
def test_sentencepiece_matches_the_lumi_pipeline_and_its_files(
    pieces: Callable[..., Path], kind: str, tmp_path: Path
) -> None:
    path = pieces(kind, byte_fallback=True)
    encoder, processor = SentencePieceEncoder(path), SentencePieceProcessor(model_file=str(path))
    assert (encoder.eod_id, encoder.vocab_size) == (3, processor.get_piece_size())
    lines = [
        f"{U}hello world{U}{A}sveiki{A}", f"{U} the quick{U}\n{A}kā jums?{A}{U}x{U}{A} 12  345 {A}",
        f"{U}<|user|> 😀{U}{A}{A} left {U} {U}",
    ]  # fmt: skip
    found = MarkedRenderer(encoder, MARKERS, "assistant").render_items([MarkedText(text, HERE) for text in lines])
    writer = StoreWriter(tmp_path, encoder.vocab_size)
    for number, document in enumerate(found):
        assert isinstance(document, Rendered)
        writer.add(
            document.ids, document.loss, np.array([len(document.ids)], np.int32), np.zeros(1, np.int32),
            np.array([[0, number + 1]]), np.zeros(1, np.uint64),
        )  # fmt: skip
    writer.finish({})
    raw, data = (tmp_path / "tokens.idx").read_bytes(), (tmp_path / "tokens.bin").read_bytes()
    magic, version, code, count, documents = struct.unpack_from("<9sQBQQ", raw)
    assert (magic, version, code, count, documents) == (b"MMIDIDX\0\0", 1, 8, 3, 4)
    sizes = struct.unpack_from("<3i", raw, 34)
    pointers = struct.unpack_from("<3q", raw, 34 + 12)
    assert struct.unpack_from("<4q", raw, 34 + 36) == (0, 1, 2, 3)
    wanted = [as_on_lumi(text, processor) for text in lines]
    assert [list(struct.unpack_from(f"<{n}H", data, at)) for n, at in zip(sizes, pointers, strict=True)] == wanted
    assert len(data) == 2 * sum(map(len, wanted))
    assert [document.notes for document in found if isinstance(document, Rendered)] == [(), (), (MARKER_LOOK_ALIKE,)]


def test_an_ordinary_sentencepiece_piece_is_refused_as_marker(pieces: Callable[..., Path]) -> None:
    encoder = SentencePieceEncoder(pieces("bpe", byte_fallback=True))
    for number, kind in (
        (encoder.token_to_id("▁hello"), "ordinary"),
        (0, "unknown"),
        (encoder.token_to_id("<0x41>"), "byte"),
    ):
        markers = Markers(user=Marker(text=U, id=number), assistant=MARKERS.assistant)
        with pytest.raises(WhetError, match=rf"data\.markers\.user\.id: id {number} is the {kind} piece"):
            MarkedRenderer(encoder, markers, "assistant")
    assert encoder.token_kind(7) is None


def test_a_fast_tokenizer_encodes_the_spans_too(chatml: PreTrainedTokenizerFast) -> None:
    start, end = chatml.convert_tokens_to_ids("<|im_start|>"), chatml.convert_tokens_to_ids("<|im_end|>")
    chatml.add_special_tokens({"pad_token": "<|pad|>"})
    markers = Markers(user=Marker(text=U, id=start), assistant=Marker(text=A, id=chatml.pad_token_id))
    encoder = make_encoder(lambda: chatml, None)
    assert encoder.eod_id == end
    (found,) = MarkedRenderer(encoder, markers, "assistant").render_items([MarkedText(f"{U}Hi you{U}{A} Yes{A}", HERE)])
    assert isinstance(found, Rendered)
    text = f"<|im_start|>Hi you<|im_start|><|pad|> Yes<|pad|>{chatml.eos_token}"
    assert found.ids.tolist() == chatml.encode(text, add_special_tokens=False)


def test_a_token_that_strips_its_neighbours_is_refused_as_marker(chatml: PreTrainedTokenizerFast) -> None:
    chatml.add_special_tokens({"pad_token": AddedToken("<|pad|>", rstrip=True)})
    with pytest.raises(WhetError, match=r"next to <\|pad\|> different ids"):
        FastTokenizerEncoder(chatml).check_markers([chatml.pad_token_id])


def test_marked_text_is_split_between_its_turns() -> None:
    renderer = MarkedRenderer(Letters(), MARKERS, "assistant")
    turns = [f"{U}question {n}{U}{A}answer {n}{A}" for n in range(6)]
    pairs = ["".join(turns[i : i + 2]) for i in (0, 2, 4)]
    config = DataConfig(
        sources=[Source(path="a")], markers=MARKERS, max_length=len(render(pairs[0]).ids), too_long="split"
    )
    added: list[Rendered] = []

    class Spy(Chunk):
        def add(self, documents: Sequence[tuple[Rendered, int]], origin: Origin) -> None:
            added.extend(document for document, _ in documents)

    tokenize_records([MarkedText("".join(turns), HERE)], Spy(0, Letters.vocab_size), renderer, config)
    assert [piece.ids.tolist() for piece in added] == [render(pair).ids.tolist() for pair in pairs]
    added.clear()
    tokenize_records([MarkedText("outside" + "".join(turns), HERE)], Spy(0, Letters.vocab_size), renderer, config)
    assert [n for piece in added for n in piece.ids.tolist()] == render("outside" + "".join(turns)).ids.tolist()
