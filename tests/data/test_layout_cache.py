"""Shapes: which conversations share a skeleton, how many are kept, how often they are checked, what it saves."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from typing import Any

import pytest

from whet.data.conversation import Conversation, Message, Origin, ToolCall
from whet.data.render import layout_cache
from whet.data.render.layout_cache import build_cached_layout
from whet.data.render.renderer import Layout, LayoutMismatchError, Renderer
from whet.tokenizer.chat_template import ChatTemplate
from whet.tokenizer.traced_strings import DataDependentError

from .families import CHATML, CHATML_TEMPLATE, tokenizer_of
from .shipped import TOOLS
from .test_render import talk, with_template


class Counting(Renderer):
    """Counts the conversations that are rendered in full."""

    renders = 0

    def _compute_layout(self, conversation: Conversation, train_on: str) -> Layout:
        self.renders += 1
        return super()._compute_layout(conversation, train_on)


def dialogue(turns: int, text: str = "x") -> Conversation:
    return talk(*[(("user", "assistant")[i % 2], f"{text}{i}") for i in range(turns)])


# What it saves


@pytest.mark.parametrize("turns", [2, 8])
def test_of_a_thousand_conversations_of_a_shape_few_are_rendered(turns: int) -> None:
    renderer = Counting(tokenizer_of(CHATML), "assistant")
    for i in range(1000):
        renderer.layout(dialogue(turns, f"{i} and "))
    assert renderer.renders == 1 + 8 + 3, "the first, then 1, 2, 4 … 128, then every 256th"


def test_without_the_cache_all_are_rendered() -> None:
    renderer = Counting(tokenizer_of(CHATML), "assistant", cached=False)
    for i in range(10):
        renderer.layout(dialogue(2, str(i)))
    assert renderer.renders == 10


@pytest.mark.parametrize("text", ["a" * 5000, "é語😀", 'quotes " and \\', "user", "<|im_end|>", "two\n\nlines", "7"])
def test_texts_that_the_template_does_not_ask_about_are_served(text: str) -> None:
    renderer = Counting(tokenizer_of(CHATML), "assistant")
    for count in range(6):  # the first is learned, some of the next are checked, the sixth is not
        renderer.layout(dialogue(4, "x" * count))
    renderer.renders = 0
    renderer.layout(dialogue(4, text))
    assert renderer.renders == 0


@pytest.mark.parametrize("text", [" a", "a\n", "\u3000a", "\U00040000"])
def test_texts_that_any_template_may_treat_otherwise_are_not_served(text: str) -> None:
    renderer = Renderer(tokenizer_of(CHATML), "assistant")
    renderer.layout(dialogue(2))
    assert renderer._layout_cache is not None
    assert renderer._layout_cache.get(talk(("user", text), ("assistant", "b"))) is None
    assert renderer._layout_cache.get(talk(("user", "b"), ("assistant", text))) is None


def test_a_first_conversation_with_edge_whitespace_does_not_spoil_its_shape() -> None:
    renderer = Counting(with_template(CHATML_TEMPLATE.replace("m['content']", "m['content'].strip()")), "assistant")
    renderer.layout(dialogue(2, " "))
    for _ in range(6):
        renderer.layout(dialogue(2))
    renderer.renders = 0
    renderer.layout(dialogue(2))
    assert renderer.renders == 0


def test_a_first_conversation_with_a_word_does_not_spoil_its_shape() -> None:
    source = CHATML_TEMPLATE.replace("m['content']", "(m['content'][1:] if '!' in m['content'] else m['content'])")
    renderer = Renderer(with_template(source), "all")
    renderer.layout(talk(("user", "a!"), ("assistant", "b")))
    renderer.layout(dialogue(2))
    assert renderer._layout_cache is not None
    assert renderer._layout_cache.get(dialogue(2, "y")) is not None


# Shapes


def test_the_shape_is_all_but_the_texts() -> None:
    plain = talk(("user", "a"), ("assistant", "b"))
    first, second = plain.messages
    others = [
        replace(plain, messages=(first, replace(second, train=False))),
        replace(plain, messages=(first, replace(second, reasoning="c"))),
        replace(plain, messages=(first, replace(second, content=""))),
        replace(plain, messages=(replace(first, role="system"), second)),
        replace(plain, messages=(first, second, first)),
        replace(plain, tools=TOOLS),
    ]
    assert len({layout_cache._cache_key(plain), *map(layout_cache._cache_key, others)}) == 7
    assert layout_cache._cache_key(plain) == layout_cache._cache_key(talk(("user", "other"), ("assistant", "texts")))
    assert layout_cache._cache_key(replace(plain, origin=Origin("elsewhere", 9))) == layout_cache._cache_key(plain)


@pytest.mark.parametrize(
    "message",
    [
        Message("assistant", "b", tool_calls=(ToolCall("f", {}),)),
        Message("tool", "b", tool_call_id="1"),
        Message("tool", "b", name="f"),
    ],
)
def test_calls_have_no_shape(message: Message) -> None:
    conversation = Conversation((Message("user", "a"), message), Origin("here", 1))
    assert layout_cache._cache_key(conversation) is None


def test_no_more_shapes_are_kept_than_there_is_room_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layout_cache, "_MAX_ENTRIES", 3)
    renderer = Renderer(tokenizer_of(CHATML), "assistant")
    for turns in range(2, 14, 2):
        assert renderer.layout(dialogue(turns)) == renderer.layout(dialogue(turns))
    assert renderer._layout_cache is not None
    assert len(renderer._layout_cache._entries) == 3


def test_reasoning_and_content_are_filled_in_where_they_belong() -> None:
    source = CHATML_TEMPLATE.replace("m['content']", "m['content'] + '/' + m.get('thinking', '-')")
    conversation = Conversation(
        (Message("user", "q"), Message("assistant", "answer", reasoning="thought")), Origin("here", 1)
    )
    renderer = Counting(with_template(source), "assistant")
    for _ in range(6):
        assert "answer/thought<" in renderer.layout(conversation).text
    renderer.renders = 0
    other = replace(conversation, messages=(Message("user", "u"), Message("assistant", "A", reasoning="T")))
    text = renderer.layout(other).text
    assert "u/-<" in text
    assert "A/T<" in text
    assert renderer.renders == 0


# Checks


def test_checks_are_frequent_at_first_and_then_every_256th() -> None:
    renderer = Renderer(tokenizer_of(CHATML), "assistant")
    assert renderer._layout_cache is not None
    conversation = dialogue(2)
    due = [i for i in range(1, 1100) if renderer._layout_cache.should_verify(conversation)]
    assert due == [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 768, 1024]
    assert renderer._layout_cache.should_verify(dialogue(4)), "every shape is counted by itself"


def uneven(monkeypatch: pytest.MonkeyPatch, source: str) -> Renderer:
    """One whose tracing is blind, so that only the check can find what the template does."""
    monkeypatch.setattr(layout_cache.LayoutCache, "_is_reusable", lambda *_: True)
    renderer = Renderer(with_template(source), "assistant")
    renderer.layout(talk(("user", "1"), ("assistant", "2")))
    return renderer


def test_a_hidden_dependence_is_found_by_the_check(monkeypatch: pytest.MonkeyPatch) -> None:
    source = CHATML_TEMPLATE.replace("m['content']", "('#' if m['content'] | length > 5 else '') + m['content']")
    renderer = uneven(monkeypatch, source)
    for _ in range(2):
        renderer.layout(dialogue(2, "y"))
    assert "#" not in renderer.layout(dialogue(2, "long enough")).text, "not due: the mistake goes unseen"
    with pytest.raises(LayoutMismatchError, match="here:1"):
        renderer.layout(dialogue(2, "long enough"))


def test_a_conversation_that_must_be_refused_is_a_dependence_too(monkeypatch: pytest.MonkeyPatch) -> None:
    renderer = uneven(monkeypatch, CHATML_TEMPLATE.replace("m['content']", "m['content'] | upper"))
    with pytest.raises(LayoutMismatchError):
        renderer.layout(dialogue(2, "lower"))


def test_a_look_into_a_text_counts_although_the_template_swallows_its_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    def trace(chat: ChatTemplate, messages: Any, tools: Any = (), prompt: bool = False) -> str:
        with contextlib.suppress(DataDependentError):
            len(messages[0]["content"])
        return chat.render([{**m, "content": "".join([m["content"]])} for m in messages], tools, prompt)

    renderer = Renderer(tokenizer_of(CHATML), "assistant")
    monkeypatch.setattr(ChatTemplate, "trace", trace)
    renderer.layout(dialogue(2))
    assert renderer._layout_cache is not None
    assert [*renderer._layout_cache._entries.values()] == [None]


# Skeletons


def test_a_skeleton_is_filled_with_texts_of_other_lengths() -> None:
    text = "<u>Hi<a>Yes<e>"
    skeleton = build_cached_layout(text, [(3, 5, 0), (8, 11, 1)], [(8, 11, 14)])
    assert skeleton is not None
    assert skeleton.fill(["Hi", "Yes"]) == (text, ((8, 11, 14),))
    assert skeleton.fill(["", "a long one"]) == ("<u><a>a long one<e>", ((6, 16, 19),))


def test_texts_in_another_order_than_they_are_given_find_their_places() -> None:
    skeleton = build_cached_layout("[bb|a]", [(1, 3, 1), (4, 5, 0)], [(1, 3, 6)])
    assert skeleton is not None
    assert skeleton.fill(["A", "B"]) == ("[B|A]", ((1, 2, 5),))


@pytest.mark.parametrize("span", [(4, 11, 14), (8, 10, 14), (8, 9, 9)])
def test_a_turn_that_begins_or_ends_inside_a_text_has_no_skeleton(span: Any) -> None:
    assert build_cached_layout("<u>Hi<a>Yes<e>", [(3, 5, 0), (8, 11, 1)], [span]) is None
