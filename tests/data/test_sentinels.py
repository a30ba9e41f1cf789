"""Dye: what became of each character of a conversation, and what a template may not do with it."""

from __future__ import annotations

from typing import Any

import pytest

from whet.core.errors import BadRecordError
from whet.data.conversation import Conversation, Message, Origin, ToolCall
from whet.data.render.renderer import Rendered, Renderer
from whet.data.render.sentinels import SentinelMessages, map_texts, text_slots

from .families import CHATML_TEMPLATE
from .test_render import learned_text, with_template

CALL = ToolCall("weather", {"city": "Rīga", "n": 3, "deep": {"list": ["x", "", None]}}, "id")
TALK = (
    Message("user", "Hi there"),
    Message("assistant", "Four", reasoning="two"),
    Message("user", "more"),
    Message("assistant", "<think>hm</think>Five", reasoning="three", tool_calls=(CALL,)),
)


def dyed(messages: tuple[Message, ...] = TALK, words: tuple[str, ...] | None = None) -> SentinelMessages:
    return SentinelMessages(messages, text_slots(messages), False, words)


def plain(messages: tuple[Message, ...]) -> str:
    return "|".join(message.reasoning + message.content for message in messages)


def printed(dye: SentinelMessages) -> str:
    return "|".join(message.get("thinking", "") + message["content"] for message in dye.messages)


def reason(text: str, output: str, dye: SentinelMessages) -> str:
    with pytest.raises(BadRecordError) as refused:
        dye.check(text, output)
    return refused.value.reason


def test_all_texts_of_a_message_are_met_and_nothing_else() -> None:
    met: list[tuple[str, str]] = []
    changed = map_texts(TALK[3], lambda text, kind: met.append((text, kind)) or text.upper())  # type: ignore[func-returns-value]
    assert met == [
        ("three", "reasoning"), ("<think>hm</think>Five", "content"), ("weather", "name"), ("Rīga", "value"),
        ("x", "value"),
    ]  # fmt: skip
    assert changed.tool_calls[0].arguments == {"city": "RĪGA", "n": 3, "deep": {"list": ["X", "", None]}}
    assert (changed.tool_calls[0].id, changed.role) == ("id", "assistant")


def test_slots_say_what_may_vanish_and_what_may_be_repeated() -> None:
    earlier = Message("assistant", "<think>hm</think>Five", reasoning="three", tool_calls=(CALL,))
    slots = text_slots((Message("user", "a</think>b"), earlier, Message("user", "c"), TALK[3]))
    assert [(slot.turn, slot.text, slot.may_vanish) for slot in slots if slot.may_vanish] == [
        (1, "three", 5),
        (1, "<think>hm</think>Five", len("<think>hm</think>")),
    ]
    assert [slot.text for slot in slots if slot.may_repeat] == ["weather", "weather"]


def test_reasoning_after_the_last_question_may_not_vanish() -> None:
    use = (
        Message("user", "a"),
        Message("assistant", "", reasoning="r", tool_calls=(CALL,)),
        Message("tool", "t"),
        TALK[1],
    )
    assert all(slot.may_vanish == 0 for slot in text_slots(use))


def test_every_character_has_a_dye_of_its_own_but_whitespace() -> None:
    message = dyed((Message("user", "a b\u3000a"),)).messages[0]["content"]
    assert [message[1], message[3]] == [" ", "\u3000"]
    assert len({*message}) == 5
    assert all(0x40000 <= ord(char) < 0xE0000 for char in message if not char.isspace())


def test_with_words_they_and_quotes_stay_as_they_are() -> None:
    [message] = dyed((Message("user", "ab<think>'\\\"\x01c<think>"),), ("<think>",)).messages
    assert message["content"][2:13] == "<think>'\\\"\x01"
    assert message["content"].endswith("<think>")
    assert message["content"][0] != "a"


def test_a_faithful_rendering_shows_where_each_text_went() -> None:
    messages = TALK[:2]
    dye = dyed(messages)
    rendering = dye.check(f"[{plain(messages)}]", f"[{printed(dye)}]")
    assert rendering.extent(0) == (1, 9)
    assert rendering.extent(1) == (10, 17)
    assert dye.extents(rendering) == [(1, 9, 0), (10, 13, 1), (13, 17, 2)]
    assert rendering.before(10) == 9
    assert rendering.before(1) == 0
    assert not rendering.reasoning_dropped


@pytest.mark.parametrize(
    ("change", "wanted"),
    [
        (lambda output: output[:-1] + "x", "template rewrites"),
        (lambda output: output[1:], "template drops text"),
        (lambda output: output + output[0], "template repeats text"),
    ],
)
def test_what_is_changed_dropped_or_repeated_is_refused(change: Any, wanted: str) -> None:
    dye = dyed(TALK[:1])
    output = change(printed(dye))
    text = change("Hi there") if wanted != "template rewrites" else "Hi there"
    assert reason(text, output, dye) == wanted


def test_what_is_reordered_is_refused() -> None:
    dye = dyed((Message("user", "ab"), Message("assistant", "cd")))
    a, c = (message["content"] for message in dye.messages)
    for output, turn in ((a[::-1] + c, 0), (a + c[::-1], 1), (c[0] + a + c[1], 1)):
        washed = "".join("abcd"[ord(char) - 0x40000] for char in output)
        with pytest.raises(BadRecordError) as refused:
            dye.check(washed, output).extent(turn)
        assert refused.value.reason == "template reorders text"


def test_earlier_reasoning_may_vanish_and_this_is_noted() -> None:
    dye = dyed(TALK[:3])
    output = "|".join(message["content"] for message in dye.messages)
    assert dye.check("Hi there|Four|more", output).reasoning_dropped
    last = dyed(TALK[:2])
    assert reason("Hi there|Four", "|".join(m["content"] for m in last.messages), last) == "template drops text"


def test_only_the_thoughts_of_an_earlier_content_may_vanish() -> None:
    messages = (Message("user", "a"), Message("assistant", "<think>hm</think>Five"), Message("user", "b"))
    dye = dyed(messages, ("</think>",))
    contents = [message["content"] for message in dye.messages]
    kept = contents[1].split("</think>")[1]
    assert dye.check("aFiveb", contents[0] + kept + contents[2]).reasoning_dropped
    assert reason("aiveb", contents[0] + kept[1:] + contents[2], dye) == "template drops text"


def test_whitespace_may_be_stripped() -> None:
    dye = dyed((Message("user", " a "),))
    assert dye.check("a", dye.messages[0]["content"].strip()).extent(0) == (0, 1)


def test_a_text_in_pieces_has_no_extents() -> None:
    dye = dyed((Message("user", "ab"),))
    a, b = dye.messages[0]["content"]
    assert dye.extents(dye.check("a-b", f"{a}-{b}")) is None
    spaced = dyed((Message("user", " ab"),))
    assert spaced.extents(spaced.check("ab", spaced.messages[0]["content"].strip())) is None


def test_an_empty_turn_has_no_extent() -> None:
    dye = dyed((Message("user", "a"), Message("assistant", " ")))
    with pytest.raises(BadRecordError) as refused:
        dye.check("a ", dye.messages[0]["content"] + " ").extent(1)
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
    tokenizer = with_template(source, MARKERS)
    [rendered] = Renderer(tokenizer, "assistant").render_items([conversation])
    if not isinstance(rendered, Rendered):
        raise rendered
    return learned_text(tokenizer, rendered)


@pytest.mark.parametrize("value", ["Rīga", "q\"uo'te\\", "two\nlines", "", 3, 2.5, None, True, [1, "x"], {"a": ["ā"]}])
def test_calls_are_learned_as_the_template_writes_them(value: Any) -> None:
    import json

    written = json.dumps(value, ensure_ascii=False)
    assert learned(CALLING, use_of({"v": value})) == f"<call>weather v={written}</call><|im_end|>¦It is.<|im_end|>"
    assert learned(CALLING, use_of({"v": value}, "So:")).startswith("So:<call>weather")


def test_the_name_of_a_tool_may_be_repeated_and_its_arguments_may_not() -> None:
    source = CALLING.replace("{% if named %}", "{% if true %}")
    assert learned(source, use_of({"v": "x"})).startswith('<call>weather v="x"weather</call><|im_end|>')
    with pytest.raises(BadRecordError) as refused:
        learned(
            source.replace("{{ call.function.name }}{% endif", "{{ call.function.arguments.v }}{% endif"),
            use_of({"v": "x"}),
        )
    assert refused.value.reason == "template repeats text"


def test_calls_that_a_template_leaves_out_are_refused() -> None:
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
