"""The layout cache: which conversations share an entry, how many are kept, how often they are verified."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from typing import Any

import pytest

from whet.data.conversation import Conversation, Message, Origin, ToolCall
from whet.data.render import layout_cache
from whet.data.render.layout_cache import Layout, build_cached_layout
from whet.data.render.renderer import LayoutMismatchError, Renderer
from whet.tokenizer.chat_template import ChatTemplate
from whet.tokenizer.traced_strings import DataDependentError

from .render_helpers import conversation_of, tokenizer_with
from .template_families import CHATML, CHATML_TEMPLATE, tokenizer_of
from .trl_templates import TOOLS


class Counting(Renderer):
    """Counts the conversations that are rendered in full."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.renders = 0
        compute = self.layouts.compute

        def count(*arguments: Any) -> Layout:
            self.renders += 1
            return compute(*arguments)

        self.layouts.compute = count  # type: ignore[method-assign]


def dialogue(turns: int, text: str = "x") -> Conversation:
    return conversation_of(*[(("user", "assistant")[i % 2], f"{text}{i}") for i in range(turns)])


# Hits


@pytest.mark.parametrize("turns", [2, 8])
def test_few_of_a_thousand_conversations_with_the_same_structure_are_rendered(turns: int) -> None:
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
def test_texts_that_the_template_does_not_inspect_hit(text: str) -> None:
    renderer = Counting(tokenizer_of(CHATML), "assistant")
    for count in range(6):  # the first is added, some of the next are verified, the sixth is not
        renderer.layout(dialogue(4, "x" * count))
    renderer.renders = 0
    renderer.layout(dialogue(4, text))
    assert renderer.renders == 0


@pytest.mark.parametrize("text", [" a", "a\n", "\u3000a", "\U00040000"])
def test_texts_with_edge_whitespace_or_sentinels_miss(text: str) -> None:
    renderer = Renderer(tokenizer_of(CHATML), "assistant")
    renderer.layout(dialogue(2))
    assert renderer._layout_cache is not None
    assert renderer._layout_cache.get(conversation_of(("user", text), ("assistant", "b"))) is None
    assert renderer._layout_cache.get(conversation_of(("user", "b"), ("assistant", text))) is None


def test_a_first_conversation_with_edge_whitespace_does_not_block_its_key() -> None:
    renderer = Counting(tokenizer_with(CHATML_TEMPLATE.replace("m['content']", "m['content'].strip()")), "assistant")
    renderer.layout(dialogue(2, " "))
    for _ in range(6):
        renderer.layout(dialogue(2))
    renderer.renders = 0
    renderer.layout(dialogue(2))
    assert renderer.renders == 0


def test_a_first_conversation_with_a_constant_does_not_block_its_key() -> None:
    source = CHATML_TEMPLATE.replace("m['content']", "(m['content'][1:] if '!' in m['content'] else m['content'])")
    renderer = Renderer(tokenizer_with(source), "all")
    renderer.layout(conversation_of(("user", "a!"), ("assistant", "b")))
    renderer.layout(dialogue(2))
    assert renderer._layout_cache is not None
    assert renderer._layout_cache.get(dialogue(2, "y")) is not None


# Keys


def test_the_key_is_everything_but_the_texts() -> None:
    plain = conversation_of(("user", "a"), ("assistant", "b"))
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
    assert layout_cache._cache_key(plain) == layout_cache._cache_key(
        conversation_of(("user", "other"), ("assistant", "texts"))
    )
    assert layout_cache._cache_key(replace(plain, origin=Origin("elsewhere", 9))) == layout_cache._cache_key(plain)


@pytest.mark.parametrize(
    "message",
    [
        Message("assistant", "b", tool_calls=(ToolCall("f", {}),)),
        Message("tool", "b", tool_call_id="1"),
        Message("tool", "b", name="f"),
    ],
)
def test_tool_calls_have_no_key(message: Message) -> None:
    conversation = Conversation((Message("user", "a"), message), Origin("here", 1))
    assert layout_cache._cache_key(conversation) is None


def test_the_number_of_entries_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
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
    renderer = Counting(tokenizer_with(source), "assistant")
    for _ in range(6):
        assert "answer/thought<" in renderer.layout(conversation).text
    renderer.renders = 0
    other = replace(conversation, messages=(Message("user", "u"), Message("assistant", "A", reasoning="T")))
    text = renderer.layout(other).text
    assert "u/-<" in text
    assert "A/T<" in text
    assert renderer.renders == 0


# Verification


def test_verification_is_frequent_at_first_and_then_every_256th_hit() -> None:
    renderer = Renderer(tokenizer_of(CHATML), "assistant")
    assert renderer._layout_cache is not None
    conversation = dialogue(2)
    verified = [i for i in range(1, 1100) if renderer._layout_cache.should_verify(conversation)]
    assert verified == [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 768, 1024]
    assert renderer._layout_cache.should_verify(dialogue(4)), "every key is counted by itself"


def untraced(monkeypatch: pytest.MonkeyPatch, source: str) -> Renderer:
    """A renderer without tracing, so that only verification can find what the template does."""
    monkeypatch.setattr(layout_cache.LayoutCache, "_is_reusable", lambda *_: True)
    renderer = Renderer(tokenizer_with(source), "assistant")
    renderer.layout(conversation_of(("user", "1"), ("assistant", "2")))
    return renderer


def test_verification_finds_a_hidden_dependence_on_the_text(monkeypatch: pytest.MonkeyPatch) -> None:
    source = CHATML_TEMPLATE.replace("m['content']", "('#' if m['content'] | length > 5 else '') + m['content']")
    renderer = untraced(monkeypatch, source)
    for _ in range(2):
        renderer.layout(dialogue(2, "y"))
    assert "#" not in renderer.layout(dialogue(2, "long enough")).text, "this hit is not verified"
    with pytest.raises(LayoutMismatchError, match="here:1"):
        renderer.layout(dialogue(2, "long enough"))


def test_a_hit_that_must_be_refused_is_a_mismatch(monkeypatch: pytest.MonkeyPatch) -> None:
    renderer = untraced(monkeypatch, CHATML_TEMPLATE.replace("m['content']", "m['content'] | upper"))
    with pytest.raises(LayoutMismatchError):
        renderer.layout(dialogue(2, "lower"))


def test_inspecting_a_text_counts_even_if_the_template_catches_the_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def render_traced(chat: ChatTemplate, messages: Any, tools: Any = (), prompt: bool = False) -> str:
        with contextlib.suppress(DataDependentError):
            len(messages[0]["content"])
        return chat.render([{**m, "content": "".join([m["content"]])} for m in messages], tools, prompt)

    renderer = Renderer(tokenizer_of(CHATML), "assistant")
    monkeypatch.setattr(ChatTemplate, "render_traced", render_traced)
    renderer.layout(dialogue(2))
    assert renderer._layout_cache is not None
    assert [*renderer._layout_cache._entries.values()] == [None]


# Cached layouts


def test_a_cached_layout_is_filled_with_texts_of_other_lengths() -> None:
    text = "<u>Hi<a>Yes<e>"
    layout = build_cached_layout(text, [(3, 5, 0), (8, 11, 1)], [(8, 11, 14)])
    assert layout is not None
    assert layout.fill(["Hi", "Yes"]) == (text, ((8, 11, 14),))
    assert layout.fill(["", "a long one"]) == ("<u><a>a long one<e>", ((6, 16, 19),))


def test_texts_may_be_rendered_in_another_order() -> None:
    layout = build_cached_layout("[bb|a]", [(1, 3, 1), (4, 5, 0)], [(1, 3, 6)])
    assert layout is not None
    assert layout.fill(["A", "B"]) == ("[B|A]", ((1, 2, 5),))


@pytest.mark.parametrize("span", [(4, 11, 14), (8, 10, 14), (8, 9, 9)])
def test_a_turn_that_begins_or_ends_inside_a_text_has_no_skeleton(span: Any) -> None:
    assert build_cached_layout("<u>Hi<a>Yes<e>", [(3, 5, 0), (8, 11, 1)], [span]) is None
