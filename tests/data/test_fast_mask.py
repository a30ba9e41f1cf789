"""Masks from special tokens equal those from offsets, or fall back to them."""

from __future__ import annotations

import re

import numpy as np
import pytest
from tokenizers import AddedToken

from whet.data.conversation import Conversation, Message, Origin
from whet.data.render.layout_cache import CachedLayout, FastMask, SpecialTokenSpan, build_fast_mask
from whet.data.render.renderer import CONTROL_TOKENS_IN_TEXT, Rendered, Renderer

from .template_families import CHATML, small_tokenizer, tokenizer_of

MARKERS = re.compile("<A>|<B>")
IS_SPECIAL = np.array([True, True, False, False, False, False])  # <A> is 0, <B> is 1, other tokens are text


def encode(text: str) -> list[int]:
    return [ord(char) for char in text]


def test_a_turn_is_located_by_the_special_tokens_around_it() -> None:
    layout = CachedLayout(("<A>u", "<B><A>ab", "<B>\n"), (0, 1), (((1, 8), (2, 0), (2, 3)),))
    assert build_fast_mask(layout, MARKERS, ("<A>", "<B>"), encode) == FastMask(
        (SpecialTokenSpan(2, (ord("a"), ord("b")), 3, True),), 4
    )


def test_an_end_that_is_not_supervised_is_excluded() -> None:
    layout = CachedLayout(("<A>", "<B>"), (0,), (((0, 3), (1, 0), (1, 0)),))
    assert build_fast_mask(layout, MARKERS, ("<A>", "<B>"), encode) == FastMask((SpecialTokenSpan(0, (), 1, False),), 2)


@pytest.mark.parametrize(
    "layout",
    [
        CachedLayout(("u", "<B>"), (0,), (((0, 1), (1, 0), (1, 3)),)),  # no special token before it
        CachedLayout(("<A>", "!<B>"), (0,), (((0, 3), (1, 0), (1, 1)),)),  # it ends with another text
    ],
)
def test_a_turn_without_special_tokens_around_it_has_no_fast_mask(layout: CachedLayout) -> None:
    assert build_fast_mask(layout, MARKERS, ("<A>", "<B>"), encode) is None


def test_tokens_between_header_and_end_are_supervised() -> None:
    mask = FastMask((SpecialTokenSpan(1, (2,), 2, True),), 3)
    ids = np.array([0, 5, 1, 2, 4, 4, 1, 3], dtype=np.int32)
    loss = mask.compute(ids, IS_SPECIAL)
    assert loss is not None
    assert loss.tolist() == [0, 0, 0, 0, 1, 1, 1, 0]


@pytest.mark.parametrize(
    "ids", [[0, 5, 1, 3, 4, 1], [0, 5, 1, 2, 4, 1, 0], [0, 5, 1, 2, 4]], ids=["header", "more", "less"]
)
def test_unexpected_tokens_fall_back_to_offsets(ids: list[int]) -> None:
    assert FastMask((SpecialTokenSpan(1, (2,), 2, True),), 3).compute(np.array(ids, dtype=np.int32), IS_SPECIAL) is None


def conversation_of(question: str, answer: str) -> Conversation:
    return Conversation((Message("user", question), Message("assistant", answer)), Origin("a", 1))


def rendered(renderer: Renderer, conversation: Conversation) -> Rendered:
    found = renderer.render_items([conversation])[0]
    assert isinstance(found, Rendered)
    return found


@pytest.mark.parametrize("question", ["Hi", "write <|im_end|> here", "<|im_start|>assistant", "Ω"])
def test_text_with_special_tokens_is_masked_as_without_a_cache_and_noted(question: str) -> None:
    tokenizer = tokenizer_of(CHATML)
    warm, cold = Renderer(tokenizer, "assistant"), Renderer(tokenizer, "assistant", cached=False)
    rendered(warm, conversation_of("Hello", "Yes"))
    assert warm.layout(conversation_of(question, "No")).fast_mask is not None
    ours, full = rendered(warm, conversation_of(question, "No")), rendered(cold, conversation_of(question, "No"))
    assert ours.ids.tolist() == full.ids.tolist()
    assert ours.loss.tolist() == full.loss.tolist()
    assert ours.notes == full.notes == ((CONTROL_TOKENS_IN_TEXT,) if "<|" in question else ())


def test_a_header_that_merges_with_the_answer_falls_back_to_offsets() -> None:
    """` the` is one token: the answer's first word swallows the header's last space."""
    template = CHATML.template.replace("assistant\n", "assistant ").replace("m['role'] + '\n'", "m['role'] + ' '")
    tokenizer = small_tokenizer(template, CHATML.markers, eos="<|im_end|>")
    warm, cold = Renderer(tokenizer, "assistant"), Renderer(tokenizer, "assistant", cached=False)
    for answer in ("this", "the answer", "?"):
        rendered(warm, conversation_of("Hello", answer))
        assert (
            rendered(warm, conversation_of("Hi", answer)).loss.tolist()
            == rendered(cold, conversation_of("Hi", answer)).loss.tolist()
        )


@pytest.mark.parametrize("answer", ["[e~", "Yes [e~", "[e", "[", "Yes["])
def test_text_that_forms_a_marker_with_the_template_falls_back_to_offsets(answer: str) -> None:
    """`[e~` and the end of turn `[e~[` are the token `[e~[`, then `e~[`: as many special tokens as without."""
    template = CHATML.template.replace("<|im_start|>", "]~b]").replace("<|im_end|>", "[e~[")
    tokenizer = small_tokenizer(template, ("]~b]", "[e~["), eos="[e~[")
    warm, cold = Renderer(tokenizer, "assistant"), Renderer(tokenizer, "assistant", cached=False)
    for _ in range(3):
        rendered(warm, conversation_of("Hello", "Yes"))
    assert warm.layout(conversation_of("Hi", "No")).fast_mask is not None
    [ours], [full] = (renderer.render_items([conversation_of("Hi", answer)]) for renderer in (warm, cold))
    if isinstance(full, Rendered):
        assert isinstance(ours, Rendered)
        assert ours.loss.tolist() == full.loss.tolist()
    else:
        assert str(ours) == str(full)
    assert isinstance(full, Rendered) == (not answer.endswith("[e~"))


def test_a_token_that_contains_the_end_of_turn_and_is_not_special_falls_back_to_offsets() -> None:
    """Texts with as many special tokens as the longer ones hide must not take their place."""
    tokenizer = small_tokenizer(CHATML.template, CHATML.markers, eos="<|im_end|>")
    tokenizer.add_tokens([AddedToken("<|im_end|>\n", normalized=False)])
    warm, cold = Renderer(tokenizer, "assistant"), Renderer(tokenizer, "assistant", cached=False)
    rendered(warm, conversation_of("Hello", "Yes"))
    text = conversation_of("a<|im_end|>b", "c<|im_end|>d")
    ours, full = rendered(warm, text), rendered(cold, text)
    assert ours.loss.tolist() == full.loss.tolist()
    assert tokenizer.decode(ours.ids[ours.loss == 1]) == "c<|im_end|>d<|im_end|>\n"
