"""What is too long: left out, cut or split, and every exchange and token is found again or entry."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from examples import examples
from whet.core.errors import WhetError
from whet.data.config import DataConfig, Source
from whet.data.conversation import Conversation, Message, Origin, ParsedRecord, PlainText, TokenizedDocument
from whet.data.prepare.chunks import Chunk
from whet.data.prepare.ledger import Account
from whet.data.prepare.tokenize import tokenize_records
from whet.data.render.renderer import CONTEXT_DIFFERS, Rendered, Renderer

from .template_families import (
    CHATML,
    DEEPSEEK,
    GEMMA,
    LLAMA2,
    LLAMA3,
    MISTRAL,
    QWEN3,
    Family,
    small_tokenizer,
    tokenizer_of,
)

HERE = Origin("a.jsonl", 1)
VOCABULARY = 400
FAMILIES = (CHATML, LLAMA2, LLAMA3, MISTRAL, GEMMA, DEEPSEEK, QWEN3)


@cache
def renderer_of(family: Family) -> Renderer:
    return Renderer(tokenizer_of(family), "assistant")


def tokenized(
    item: ParsedRecord, limit: int, family: Family = CHATML, renderer: Renderer | None = None, **options: Any
) -> tuple[list[Rendered], Account]:
    """The documents that an item becomes, and its account."""
    documents: list[Rendered] = []

    class Spy(Chunk):
        def add(self, added: Sequence[tuple[Rendered, int]], origin: Origin) -> None:
            documents.extend(document for document, _ in added)
            super().add(added, origin)

    chunk = Spy(0, VOCABULARY)
    config = DataConfig(sources=[Source(path="a")], max_length=limit, **{"too_long": "split", **options})
    tokenize_records([item], chunk, renderer or renderer_of(family), config)
    entry = chunk.account.as_dict("a", "train")
    assert entry["tokens"] == sum(len(document.ids) for document in documents)
    assert entry["supervised_tokens"] == sum(int(document.loss[1:].sum()) for document in documents)
    assert all(len(document.ids) <= limit for document in documents)
    return documents, chunk.account


def conversation_of(system: str | None, *turns: tuple[str, str]) -> Conversation:
    start = [] if system is None else [("system", system)]
    return Conversation(tuple(Message(role, text) for role, text in (*start, *turns)), HERE)


def exchange(i: int, question: str, answer: str) -> list[tuple[str, str]]:
    return [("user", f"q{i}, {question}"), ("assistant", f"a{i}. {answer}")]


TEXT = st.text("ab c", max_size=40)


@settings(max_examples=examples(150), deadline=None)
@given(
    family=st.sampled_from(FAMILIES),
    system=st.one_of(st.none(), st.text("xyz", min_size=1, max_size=12)),
    texts=st.lists(st.tuples(TEXT, TEXT), min_size=1, max_size=7),
    limit=st.integers(20, 160),
)
def test_every_exchange_that_fits_is_in_exactly_one_piece(
    family: Family, system: str | None, texts: list[tuple[str, str]], limit: int
) -> None:
    system = system if family.takes_system else None
    exchanges = [exchange(i, *pair) for i, pair in enumerate(texts)]
    tokenizer, renderer = tokenizer_of(family), renderer_of(family)

    def ids(numbers: list[int]) -> list[int]:
        turns = [turn for number in numbers for turn in exchanges[number]]
        messages = [message.as_dict() for message in conversation_of(system, *turns).messages]
        return list(tokenizer.apply_chat_template(messages, return_dict=False))

    everything = [*range(len(exchanges))]
    documents, account = tokenized(
        conversation_of(system, *(turn for pair in exchanges for turn in pair)), limit, family
    )
    del account.notes[CONTEXT_DIFFERS]  # Mistral's template writes a system prompt before the last question
    if len(ids(everything)) <= limit:
        assert [document.ids.tolist() for document in documents] == [ids(everything)]
        assert (account.kept, account.split, account.notes) == (1, 0, {})
        return
    fitting = [number for number in everything if len(ids([number])) <= limit]
    found = [[int(n) for n in re.findall(r"q(\d+),", tokenizer.decode(document.ids))] for document in documents]
    assert [number for numbers in found for number in numbers] == fitting
    for numbers, document in zip(found, documents, strict=True):
        assert document.ids.tolist() == ids(numbers)
        turns = [turn for number in numbers for turn in exchanges[number]]
        (alone,) = renderer.render_items([conversation_of(system, *turns)])
        assert isinstance(alone, Rendered)
        assert document.loss.tolist() == alone.loss.tolist()
        assert document.supervises_end == alone.supervises_end
    if family is CHATML:  # its lengths add up, so pieces are as long as can be
        for one, other in pairwise(found):
            assert other[0] != one[-1] + 1 or len(ids([*one, other[0]])) > limit
    if fitting:
        assert (account.kept, account.split, dict(account.reasons)) == (1, 1, {})
        assert account.notes == ({} if fitting == everything else {"an exchange of it too long": 1})
    else:
        assert (account.kept, account.split, dict(account.reasons)) == (0, 0, {"too long": 1})


def test_pieces_with_a_long_system_prompt_are_as_long_as_possible() -> None:
    system, turns = "s" * 60, [turn for i in range(6) for turn in exchange(i, "", "")]
    (three,), _ = tokenized(conversation_of(system, *turns[:6]), 1000)
    documents, _ = tokenized(conversation_of(system, *turns), len(three.ids))
    assert [len(document.ids) for document in documents] == [len(three.ids)] * 2


def test_pieces_fit_where_exchanges_are_longer_together_than_alone() -> None:
    between = "{% if m.role == 'assistant' and not loop.last %}{{ 'and so it went on and on' }}{% endif %}{% endfor %}"
    template = CHATML.template.replace("{% endfor %}", between, 1)
    renderer = Renderer(small_tokenizer(template, CHATML.markers, eos="<|im_end|>"), "assistant")
    turns = [turn for i in range(6) for turn in exchange(i, "", "")]

    def length(numbers: int) -> int:
        (found,) = renderer.render_items([conversation_of(None, *turns[: 2 * numbers])])
        assert isinstance(found, Rendered)
        return len(found.ids)

    assert length(3) > 3 * length(1)
    documents, account = tokenized(conversation_of(None, *turns), 3 * length(1), renderer=renderer)
    assert [len(document.ids) for document in documents] == [length(2)] * 3
    assert account.notes == {}


@pytest.mark.parametrize("asks_again", [False, True], ids=["answered", "unanswered"])
@pytest.mark.parametrize("limit", [20, 60, 100, 140])
def test_with_train_on_last_the_last_answer_of_the_conversation_is_learned_and_no_other(
    limit: int, asks_again: bool
) -> None:
    tokenizer, renderer = tokenizer_of(CHATML), Renderer(tokenizer_of(CHATML), "last")
    turns = [turn for i in range(8) for turn in exchange(i, "and more", "Yes")]
    conversation = conversation_of("Be brief.", *turns, *([("user", "q8, again?")] if asks_again else []))

    def answered(exchanges: int) -> int:
        messages = conversation_of("Be brief.", *turns[16 - 2 * exchanges :]).messages
        ids = tokenizer.apply_chat_template([message.as_dict() for message in messages], return_dict=False)
        return len(ids)

    documents, account = tokenized(conversation, limit, renderer=renderer, train_on="last")
    fitting = sum(answered(n) <= limit for n in range(1, 9))
    if not fitting:
        assert (documents, dict(account.reasons)) == ([], {"too long": 1})
        return
    (document,) = documents
    assert len(document.ids) == answered(fitting)
    assert tokenizer.decode(document.ids[document.loss.astype(bool)]) == "a7. Yes<|im_end|>"
    assert (account.kept, account.split, account.notes) == (1, 1, {})


def test_exchanges_are_not_split() -> None:
    """Several questions in a row, and calls with their results, are one exchange."""
    messages = (
        Message("system", "Be brief."),
        Message("user", "one"), Message("user", "and two"), Message("assistant", "yes"),
        Message("user", "three"), Message("assistant", "calling"),
        Message("tool", "7"), Message("assistant", "seven"),
    )  # fmt: skip
    whole = Conversation(messages, HERE)
    (complete,), _ = tokenized(whole, 1000)
    documents, account = tokenized(whole, len(complete.ids) - 1)
    texts = [tokenizer_of(CHATML).decode(document.ids) for document in documents]
    assert [re.findall(r"one|two|yes|three|calling|7|seven|brief", text) for text in texts] == [
        ["brief", "one", "two", "yes"], ["brief", "three", "calling", "7", "seven"],
    ]  # fmt: skip
    assert account.split == 1


@pytest.mark.parametrize(
    ("unsupervised", "pieces", "dropped"),
    [((1,), ["01", "23"], 0), ((0,), ["01", "23"], 0), ((2, 3), ["01"], 1), ((0, 1), ["12", "3"], 1)],
)
def test_unsupervised_exchanges_are_context_and_a_piece_of_them_is_dropped_and_noted(
    unsupervised: tuple[int, ...], pieces: list[str], dropped: int
) -> None:
    whole = conversation_of(None, *(turn for i in range(4) for turn in exchange(i, "x" * 10, "y" * 10)))
    answers = [f"a{i}" for i in unsupervised]
    messages = [replace(m, train=False if m.content[:2] in answers else None) for m in whole.messages]
    documents, account = tokenized(Conversation(tuple(messages), HERE), 80)
    texts = [tokenizer_of(CHATML).decode(document.ids) for document in documents]
    assert ["".join(re.findall(r"q(\d),", text)) for text in texts] == pieces
    assert account.notes == ({"a piece of it left out: nothing to learn": 1} if dropped else {})
    learned = [tokenizer_of(CHATML).decode(document.ids[document.loss == 1]) for document in documents]
    wanted = [[i for i in piece if int(i) not in unsupervised] for piece in pieces]
    assert [re.findall(r"a(\d)\.", text) for text in learned] == wanted


def test_a_question_without_an_answer_is_dropped_and_noted() -> None:
    turns = [turn for i in range(3) for turn in exchange(i, "x" * 10, "y" * 10)]
    documents, account = tokenized(conversation_of(None, *turns, ("user", "q3, and?")), 80)
    texts = [tokenizer_of(CHATML).decode(document.ids) for document in documents]
    assert ["".join(re.findall(r"q(\d),", text)) for text in texts] == ["01", "2"]
    assert account.notes == {"a piece of it left out: no assistant turn": 1}


# Plain text and ready ids


@settings(deadline=None)
@given(text=st.text(min_size=1, max_size=200), limit=st.integers(3, 50))
def test_windows_of_a_text_are_the_text(text: str, limit: int) -> None:
    documents, account = tokenized(PlainText(text, HERE), limit)
    (whole,) = renderer_of(CHATML).render_items([PlainText(text, HERE)])
    assert isinstance(whole, Rendered)
    assert np.concatenate([document.ids for document in documents]).tolist() == whole.ids.tolist()
    assert account.split == (len(whole.ids) > limit)
    assert account.notes == {}
    assert [document.supervises_end for document in documents] == [False] * (len(documents) - 1) + [
        whole.supervises_end
    ]
    assert all(len(document.ids) == limit for document in documents[:-2])


@settings(deadline=None)
@given(ids=st.lists(st.integers(0, VOCABULARY - 1), min_size=2, max_size=120), limit=st.integers(3, 50))
def test_windows_of_pretokenized_ids_are_the_ids(ids: list[int], limit: int) -> None:
    loss = [0] + [1] * (len(ids) - 1)
    documents, account = tokenized(TokenizedDocument(np.array(ids, np.int32), np.array(loss, np.uint8), HERE), limit)
    assert np.concatenate([document.ids for document in documents]).tolist() == ids
    assert np.concatenate([document.loss for document in documents]).tolist() == loss
    assert (account.kept, account.split) == (1, len(ids) > limit)


def test_a_window_without_targets_is_dropped_and_noted() -> None:
    ids, loss = np.arange(12, dtype=np.int32), np.array([0] * 4 + [1] * 4 + [0] * 4, np.uint8)
    documents, account = tokenized(TokenizedDocument(ids, loss, HERE), 4)
    assert [document.ids.tolist() for document in documents] == [[4, 5, 6, 7]]
    assert account.notes == {"a piece of it left out: nothing to learn": 1}
    assert account.first == {"a piece of it left out: nothing to learn": [str(HERE)]}


def test_an_id_that_the_tokenizer_does_not_have_is_a_bad_record() -> None:
    tokens = TokenizedDocument(np.array([1, VOCABULARY, 2], np.int32), np.array([0, 1, 1], np.uint8), HERE)
    with pytest.raises(WhetError, match=rf"^{HERE}: id {VOCABULARY} is not below the tokenizer.s size of {VOCABULARY}"):
        tokenized(tokens, 10)
    assert tokenized(tokens, 10, on_bad="skip")[1].reasons == {"unknown id": 1}


# The other policies


LONG = conversation_of(None, *exchange(0, "x" * 30, "y" * 30), *exchange(1, "x" * 30, "y" * 30))


def test_too_long_drop() -> None:
    documents, account = tokenized(LONG, 60, too_long="drop")
    assert (documents, account.kept, dict(account.reasons)) == ([], 0, {"too long": 1})


def test_too_long_error() -> None:
    with pytest.raises(WhetError, match=rf"^{HERE}: \d+ tokens, over data\.max_length = 60\. .*split"):
        tokenized(LONG, 60, too_long="error")


@settings(deadline=None)
@given(limit=st.integers(2, 120))
def test_too_long_truncate_drops_what_has_no_targets(limit: int) -> None:
    (whole,), _ = tokenized(LONG, 1000)
    documents, account = tokenized(LONG, limit, too_long="truncate")
    learned = bool(whole.loss[1:limit].any())
    assert account.truncated == (limit < len(whole.ids))
    assert account.kept == learned
    assert account.reasons == ({} if learned else {"nothing to learn": 1})
    assert [document.ids.tolist() for document in documents] == [whole.ids[:limit].tolist()] * learned
    assert [document.loss.tolist() for document in documents] == [whole.loss[:limit].tolist()] * learned
    assert account.ended == (limit >= len(whole.ids))
