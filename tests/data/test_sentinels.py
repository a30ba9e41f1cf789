"""Sentinels: where each character of a conversation goes, and what a template must not do with it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from whet.core.errors import BadRecordError
from whet.data.conversation import Conversation, Message, Origin, ToolCall
from whet.data.render.renderer import Rendered, Renderer
from whet.data.render.sentinels import SentinelMessages, map_texts, text_slots

from .render_helpers import supervised_text, tokenizer_with
from .template_families import CHATML_TEMPLATE

CALL = ToolCall("weather", {"city": "Rīga", "n": 3, "deep": {"list": ["x", "", None]}}, "id")
TALK = (
    Message("user", "Hi there"),
    Message("assistant", "Four", reasoning="two"),
    Message("user", "more"),
    Message("assistant", "<think>hm</think>Five", reasoning="three", tool_calls=(CALL,)),
)


def with_sentinels(messages: tuple[Message, ...] = TALK, constants: tuple[str, ...] | None = None) -> SentinelMessages:
    return SentinelMessages(messages, text_slots(messages), False, constants)


def plain(messages: tuple[Message, ...]) -> str:
    return "|".join(message.reasoning + message.content for message in messages)


def rendered_sentinels(sentinels: SentinelMessages) -> str:
    return "|".join(message.get("thinking", "") + message["content"] for message in sentinels.messages)


def reason(text: str, output: str, sentinels: SentinelMessages) -> str:
    with pytest.raises(BadRecordError) as refused:
        sentinels.verify(text, output)
    return refused.value.reason


def test_map_texts_visits_all_texts_of_a_message_and_nothing_else() -> None:
    visited: list[tuple[str, str]] = []
    changed = map_texts(TALK[3], lambda text, kind: visited.append((text, kind)) or text.upper())  # type: ignore[func-returns-value]
    assert visited == [
        ("three", "reasoning"), ("<think>hm</think>Five", "content"), ("weather", "name"), ("Rīga", "value"),
        ("x", "value"),
    ]  # fmt: skip
    assert changed.tool_calls[0].arguments == {"city": "RĪGA", "n": 3, "deep": {"list": ["X", "", None]}}
    assert (changed.tool_calls[0].id, changed.role) == ("id", "assistant")


def test_slots_know_what_may_be_dropped_or_repeated() -> None:
    earlier = Message("assistant", "<think>hm</think>Five", reasoning="three", tool_calls=(CALL,))
    slots = text_slots((Message("user", "a</think>b"), earlier, Message("user", "c"), TALK[3]))
    assert [(slot.message, slot.text, slot.droppable) for slot in slots if slot.droppable] == [
        (1, "three", 5),
        (1, "<think>hm</think>Five", len("<think>hm</think>")),
    ]
    assert [slot.text for slot in slots if slot.may_repeat] == ["weather", "weather"]


def test_reasoning_after_the_last_user_turn_must_not_be_dropped() -> None:
    use = (
        Message("user", "a"),
        Message("assistant", "", reasoning="r", tool_calls=(CALL,)),
        Message("tool", "t"),
        TALK[1],
    )
    assert all(slot.droppable == 0 for slot in text_slots(use))


def test_every_character_but_whitespace_has_its_own_sentinel() -> None:
    message = with_sentinels((Message("user", "a b\u3000a"),)).messages[0]["content"]
    assert [message[1], message[3]] == [" ", "\u3000"]
    assert len({*message}) == 5
    assert all(0x40000 <= ord(char) < 0xE0000 for char in message if not char.isspace())


def test_constants_and_quotes_are_kept_where_constants_are_given() -> None:
    [message] = with_sentinels((Message("user", "ab<think>'\\\"\x01c<think>"),), ("<think>",)).messages
    assert message["content"][2:13] == "<think>'\\\"\x01"
    assert message["content"].endswith("<think>")
    assert message["content"][0] != "a"


def test_a_faithful_rendering_locates_each_text() -> None:
    messages = TALK[:2]
    sentinels = with_sentinels(messages)
    rendering = sentinels.verify(f"[{plain(messages)}]", f"[{rendered_sentinels(sentinels)}]")
    assert rendering.message_span(0) == (1, 9)
    assert rendering.message_span(1) == (10, 17)
    assert sentinels.text_spans(rendering) == [(1, 9, 0), (10, 13, 1), (13, 17, 2)]
    assert rendering.end_of_previous_sentinel(10) == 9
    assert rendering.end_of_previous_sentinel(1) == 0
    assert not rendering.reasoning_dropped


@pytest.mark.parametrize(
    ("change", "wanted"),
    [
        (lambda output: output[:-1] + "x", "template rewrites"),
        (lambda output: output[1:], "template drops text"),
        (lambda output: output + output[0], "template repeats text"),
    ],
)
def test_changed_dropped_or_repeated_text_is_refused(change: Any, wanted: str) -> None:
    sentinels = with_sentinels(TALK[:1])
    output = change(rendered_sentinels(sentinels))
    text = change("Hi there") if wanted != "template rewrites" else "Hi there"
    assert reason(text, output, sentinels) == wanted
    with pytest.raises(BadRecordError, match=r"[Uu]se a template that writes it.*: data\.template=FILE\.jinja"):
        sentinels.verify(text, output)


def test_reordered_text_is_refused() -> None:
    sentinels = with_sentinels((Message("user", "ab"), Message("assistant", "cd")))
    a, c = (message["content"] for message in sentinels.messages)
    for output, turn in ((a[::-1] + c, 0), (a + c[::-1], 1), (c[0] + a + c[1], 1)):
        restored = "".join("abcd"[ord(char) - 0x40000] for char in output)
        with pytest.raises(BadRecordError) as refused:
            sentinels.verify(restored, output).message_span(turn)
        assert refused.value.reason == "template reorders text"
        assert "Use a template that writes it unchanged: data.template=FILE.jinja" in str(refused.value)


def test_earlier_reasoning_may_be_dropped_and_is_noted() -> None:
    sentinels = with_sentinels(TALK[:3])
    output = "|".join(message["content"] for message in sentinels.messages)
    assert sentinels.verify("Hi there|Four|more", output).reasoning_dropped
    last = with_sentinels(TALK[:2])
    assert reason("Hi there|Four", "|".join(m["content"] for m in last.messages), last) == "template drops text"


def test_only_the_inline_reasoning_of_an_earlier_content_may_be_dropped() -> None:
    messages = (Message("user", "a"), Message("assistant", "<think>hm</think>Five"), Message("user", "b"))
    sentinels = with_sentinels(messages, ("</think>",))
    contents = [message["content"] for message in sentinels.messages]
    kept = contents[1].split("</think>")[1]
    assert sentinels.verify("aFiveb", contents[0] + kept + contents[2]).reasoning_dropped
    assert reason("aiveb", contents[0] + kept[1:] + contents[2], sentinels) == "template drops text"


def test_whitespace_may_be_stripped() -> None:
    sentinels = with_sentinels((Message("user", " a "),))
    assert sentinels.verify("a", sentinels.messages[0]["content"].strip()).message_span(0) == (0, 1)


def test_a_text_in_pieces_has_no_span() -> None:
    sentinels = with_sentinels((Message("user", "ab"),))
    a, b = sentinels.messages[0]["content"]
    assert sentinels.text_spans(sentinels.verify("a-b", f"{a}-{b}")) is None
    spaced = with_sentinels((Message("user", " ab"),))
    assert spaced.text_spans(spaced.verify("ab", spaced.messages[0]["content"].strip())) is None


def test_an_empty_turn_has_no_span() -> None:
    sentinels = with_sentinels((Message("user", "a"), Message("assistant", " ")))
    with pytest.raises(BadRecordError) as refused:
        sentinels.verify("a ", sentinels.messages[0]["content"] + " ").message_span(1)
    assert refused.value.reason == "empty turn"


# Tool calls through a template

CALLING = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + ' ' + m.get('name', '') + '\n' + m['content'] }}"
    "{% for call in m.tool_calls or [] %}{{ '<call>' + call.function.name }}"
    "{% for key, value in call.function.arguments.items() %}{{ ' ' ~ key ~ '=' ~ (value | tojson) }}{% endfor %}"
    "{% if named %}{{ call.function.name }}{% endif %}{{ '</call>' }}{% endfor %}{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant \n' }}{% endif %}"
)
MARKERS = ("<|im_start|>", "<|im_end|>", "<call>", "</call>")


def use_of(arguments: dict[str, Any], content: str = "") -> Conversation:
    asked = Message("assistant", content, tool_calls=(ToolCall("weather", arguments, "id"),))
    result = Message("tool", "sunny", tool_call_id="id", name="weather")
    return Conversation((Message("user", "q"), asked, result, Message("assistant", "It is.")), Origin("here", 1))


def learned(source: str, conversation: Conversation) -> str:
    tokenizer = tokenizer_with(source, MARKERS)
    [rendered] = Renderer(tokenizer, "assistant").render_items([conversation])
    if not isinstance(rendered, Rendered):
        raise rendered
    return supervised_text(tokenizer, rendered)


@pytest.mark.parametrize("value", ["Rīga", "q\"uo'te\\", "two\nlines", "", 3, 2.5, None, True, [1, "x"], {"a": ["ā"]}])
def test_tool_calls_are_supervised_as_the_template_writes_them(value: Any) -> None:
    written = json.dumps(value, ensure_ascii=False)
    assert learned(CALLING, use_of({"v": value})) == f"<call>weather v={written}</call><|im_end|>¦It is.<|im_end|>"
    assert learned(CALLING, use_of({"v": value}, "So:")).startswith("So:<call>weather")


@pytest.mark.parametrize("value", ["Riga", "q\"uo'te\\", ["x", {"a": "y z"}], {"a": ["it's", 3, None]}])
def test_arguments_may_be_written_as_python_does_or_in_ascii(value: Any) -> None:
    """As in Llama 4's template for Python calls, and Reka's."""
    ascii_only = CALLING.replace("tojson", "tojson(ensure_ascii=True)")
    assert learned(ascii_only, use_of({"v": value})).startswith(f"<call>weather v={json.dumps(value)}</call><|im_end|>")
    python = CALLING.replace("| tojson", "| string")
    assert learned(python, use_of({"v": value})).startswith(f"<call>weather v={value}</call><|im_end|>")
    assert learned(python, use_of({"v": ["Rīga"]})).startswith("<call>weather v=['Rīga']</call><|im_end|>")
    with pytest.raises(BadRecordError, match="changes the text of a message"):
        learned(ascii_only, use_of({"v": "Rīga"}))


def test_the_name_of_a_tool_may_be_repeated_and_its_arguments_may_not() -> None:
    source = CALLING.replace("{% if named %}", "{% if true %}")
    assert learned(source, use_of({"v": "x"})).startswith('<call>weather v="x"weather</call><|im_end|>')
    with pytest.raises(BadRecordError) as refused:
        learned(
            source.replace("{{ call.function.name }}{% endif", "{{ call.function.arguments.v }}{% endif"),
            use_of({"v": "x"}),
        )
    assert refused.value.reason == "template repeats text"


def test_tool_calls_that_a_template_drops_are_refused() -> None:
    with pytest.raises(BadRecordError) as refused:
        learned(CHATML_TEMPLATE, use_of({"v": "x"}, "So:"))
    assert refused.value.reason == "template drops text"


def test_the_marker_that_closes_a_call_does_not_end_the_turn() -> None:
    source = CALLING.replace(
        "{{ '<|im_end|>\n' }}", "{{ '<|im_end|>\n' if m.role != 'assistant' or not m.tool_calls else '' }}"
    )
    with pytest.raises(BadRecordError) as refused:
        learned(source, use_of({"v": "x"}))
    assert refused.value.reason == "no end of turn"
