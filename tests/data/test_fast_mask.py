"""Masks by counting control tokens: the same as by offsets, or left to them."""

from __future__ import annotations

import re

import numpy as np
import pytest

from whet.data.conversation import Conversation, Message, Origin
from whet.data.render.layout_cache import CachedLayout, ControlTokenSpan, FastMask, build_fast_mask
from whet.data.render.renderer import CONTROL_TOKENS_IN_TEXT, Rendered, Renderer

from .families import CHATML, small_tokenizer, tokenizer_of

CONTROL = re.compile("<A>|<B>")
IS_CONTROL = np.array([True, True, False, False, False, False])  # <A> is 0, <B> is 1, other tokens are text


def encode(text: str) -> list[int]:
    return [ord(char) for char in text]


def test_a_turn_is_found_by_the_control_tokens_around_it() -> None:
    skeleton = CachedLayout(("<A>u", "<B><A>ab", "<B>\n"), (0, 1), (((1, 8), (2, 0), (2, 3)),))
    assert build_fast_mask(skeleton, CONTROL, encode) == FastMask(
        (ControlTokenSpan(2, (ord("a"), ord("b")), 3, True),), 4
    )


def test_an_end_that_is_not_learned_is_left_out() -> None:
    skeleton = CachedLayout(("<A>", "<B>"), (0,), (((0, 3), (1, 0), (1, 0)),))
    assert build_fast_mask(skeleton, CONTROL, encode) == FastMask((ControlTokenSpan(0, (), 1, False),), 2)


@pytest.mark.parametrize(
    "skeleton",
    [
        CachedLayout(("u", "<B>"), (0,), (((0, 1), (1, 0), (1, 3)),)),  # no control token before it
        CachedLayout(("<A>", "!<B>"), (0,), (((0, 3), (1, 0), (1, 1)),)),  # it ends with another text
    ],
)
def test_a_turn_without_control_tokens_around_it_has_no_quick_way(skeleton: CachedLayout) -> None:
    assert build_fast_mask(skeleton, CONTROL, encode) is None


def test_what_lies_between_header_and_end_is_learned() -> None:
    quick = FastMask((ControlTokenSpan(1, (2,), 2, True),), 3)
    ids = np.array([0, 5, 1, 2, 4, 4, 1, 3], dtype=np.int32)
    loss = quick.compute(ids, IS_CONTROL)
    assert loss is not None
    assert loss.tolist() == [0, 0, 0, 0, 1, 1, 1, 0]


@pytest.mark.parametrize(
    "ids", [[0, 5, 1, 3, 4, 1], [0, 5, 1, 2, 4, 1, 0], [0, 5, 1, 2, 4]], ids=["header", "more", "less"]
)
def test_where_tokens_are_not_as_expected_offsets_must_tell(ids: list[int]) -> None:
    assert FastMask((ControlTokenSpan(1, (2,), 2, True),), 3).compute(np.array(ids, dtype=np.int32), IS_CONTROL) is None


def talk(question: str, answer: str) -> Conversation:
    return Conversation((Message("user", question), Message("assistant", answer)), Origin("a", 1))


def rendered(renderer: Renderer, conversation: Conversation) -> Rendered:
    found = renderer.render_items([conversation])[0]
    assert isinstance(found, Rendered)
    return found


@pytest.mark.parametrize("question", ["Hi", "write <|im_end|> here", "<|im_start|>assistant", "Ω"])
def test_text_with_control_tokens_is_masked_as_without_a_cache_and_noted(question: str) -> None:
    tokenizer = tokenizer_of(CHATML)
    warm, cold = Renderer(tokenizer, "assistant"), Renderer(tokenizer, "assistant", cached=False)
    rendered(warm, talk("Hello", "Yes"))
    assert warm.layout(talk(question, "No")).fast_mask is not None
    ours, full = rendered(warm, talk(question, "No")), rendered(cold, talk(question, "No"))
    assert ours.ids.tolist() == full.ids.tolist()
    assert ours.loss.tolist() == full.loss.tolist()
    assert ours.notes == full.notes == ((CONTROL_TOKENS_IN_TEXT,) if "<|" in question else ())


def test_a_header_that_merges_with_the_answer_is_left_to_offsets() -> None:
    """` the` is one token: the answer's first word swallows the header's last space."""
    template = CHATML.template.replace("assistant\n", "assistant ").replace("m['role'] + '\n'", "m['role'] + ' '")
    tokenizer = small_tokenizer(template, CHATML.markers, eos="<|im_end|>")
    warm, cold = Renderer(tokenizer, "assistant"), Renderer(tokenizer, "assistant", cached=False)
    for answer in ("this", "the answer", "?"):
        rendered(warm, talk("Hello", answer))
        assert rendered(warm, talk("Hi", answer)).loss.tolist() == rendered(cold, talk("Hi", answer)).loss.tolist()
