"""Where an answer starts and ends in templates of awkward kinds, and what a refusal tells to do.

Kinds: a prompt that is always or never appended, one that goes on beyond the conversation or prefills reasoning, no end
after the last answer, tools that are required, arguments of calls that are concatenated.
"""

from __future__ import annotations

import re
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from whet.core.errors import BadRecordError
from whet.data.conversation import Conversation, Message, Origin, ToolCall
from whet.data.read.records.messages import parse_messages
from whet.data.render.renderer import PREFILL_MISSING, PROMPT_DIFFERS, Rendered, Renderer
from whet.data.render.template_text import PROBE_TOOL

from .render_helpers import conversation_of, supervised_text
from .template_families import CHATML_TEMPLATE, small_tokenizer

TURNS = [("user", "Hi"), ("assistant", "Yes"), ("user", "More?"), ("assistant", "No.")]
PROMPT = "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
NAMES = {"messages": "messages", "role": "role", "content": "content", "tools": "tools"}
TURNS_ONLY = CHATML_TEMPLATE.removesuffix(PROMPT)
assert TURNS_ONLY != CHATML_TEMPLATE


def tokenizer_with(template: str, *markers: str, eos: str | None = "<|im_end|>") -> PreTrainedTokenizerFast:
    return small_tokenizer(template, ("<|im_start|>", "<|im_end|>", *markers), eos=eos)


def rendered(tokenizer: PreTrainedTokenizerFast, conversation: Conversation, stops: tuple[str, ...] = ()) -> Rendered:
    renderer = Renderer(tokenizer, "assistant", [tokenizer.convert_tokens_to_ids(stop) for stop in stops])
    first, second = renderer.render_items([conversation, conversation])
    if isinstance(first, BadRecordError):
        raise first
    assert isinstance(second, Rendered)
    assert second.loss.tolist() == first.loss.tolist(), "the cache changes the mask"
    assert first.ids.tolist() == renderer.text.reference_ids(conversation)
    assert second.notes == first.notes
    return first


def learned(tokenizer: PreTrainedTokenizerFast, *turns: tuple[str, str], stops: tuple[str, ...] = ()) -> str:
    return supervised_text(tokenizer, rendered(tokenizer, conversation_of(*turns), stops))


def refusal(tokenizer: PreTrainedTokenizerFast, *turns: tuple[str, str], stops: tuple[str, ...] = ()) -> BadRecordError:
    with pytest.raises(BadRecordError) as caught:
        learned(tokenizer, *turns, stops=stops)
    return caught.value


# The generation prompt is always appended, or never


@pytest.mark.parametrize("system", ["", "{{ '<|im_start|>system\nBe kind.<|im_end|>\n' }}"], ids=["plain", "system"])
@pytest.mark.parametrize("eos", ["<|im_end|>", None], ids=["known", "unknown"])
@pytest.mark.parametrize("count", [2, 4])
def test_a_prompt_that_is_always_appended_is_not_learned(system: str, eos: str | None, count: int) -> None:
    tokenizer = tokenizer_with(system + TURNS_ONLY + "{{ '<|im_start|>assistant\n' }}", eos=eos)
    assert learned(tokenizer, *TURNS[:count]) == "¦".join(["Yes<|im_end|>", "No.<|im_end|>"][: count // 2])
    assert Renderer(tokenizer, "assistant").end_of_turn() == tokenizer.convert_tokens_to_ids("<|im_end|>")


@pytest.mark.parametrize("eos", ["<|im_end|>", None], ids=["known", "unknown"])
@pytest.mark.parametrize("count", [2, 4])
def test_a_part_of_the_prompt_that_is_always_appended_is_not_learned(eos: str | None, count: int) -> None:
    """As in Command A's template, whose flag adds only the last marker of the prompt."""
    part = "{{ '<|im_start|>assistant\n' }}{% if add_generation_prompt %}{{ '<think>\n' }}{% endif %}"
    tokenizer = tokenizer_with(TURNS_ONLY + part, eos=eos)
    assert learned(tokenizer, *TURNS[:count]) == "¦".join(["Yes<|im_end|>", "No.<|im_end|>"][: count // 2])


def test_a_marker_that_closes_the_conversation_is_not_learned_as_the_end_of_a_turn() -> None:
    closed = CHATML_TEMPLATE.replace("{% endif %}", "{% else %}{{ '<|closed|>' }}{% endif %}")
    tokenizer = tokenizer_with(closed, "<|closed|>", eos=None)
    assert learned(tokenizer, *TURNS[:2]) == "Yes<|im_end|>"
    assert learned(tokenizer, *TURNS) == "Yes<|im_end|>¦No.<|im_end|>"


def test_a_prompt_that_is_always_appended_is_no_end_of_turn() -> None:
    template = "{% for m in messages %}{{ '<|' + m.role + '|>' + m.content }}{% endfor %}{{ '<|assistant|>' }}"
    tokenizer = tokenizer_with(template, "<|user|>", "<|assistant|>")
    for count in (2, 4):
        assert refusal(tokenizer, *TURNS[:count]).reason == "no end of turn"


def test_without_a_generation_prompt_the_model_writes_the_header_and_the_renderer_says_so() -> None:
    tokenizer = tokenizer_with(TURNS_ONLY)
    header = "<|im_start|>assistant\n"
    assert learned(tokenizer, *TURNS) == f"{header}Yes<|im_end|>¦{header}No.<|im_end|>"
    assert Renderer(tokenizer, "assistant").layouts.supervised_header() == header
    assert Renderer(tokenizer_with(CHATML_TEMPLATE), "assistant").layouts.supervised_header() == ""
    always = tokenizer_with(TURNS_ONLY + "{{ '<|im_start|>assistant\n' }}")
    assert Renderer(always, "assistant").layouts.supervised_header() == ""


# The prompt goes on beyond the conversation


@pytest.mark.parametrize("more", ["Answer: ", "\n", "<|b|>", "Let me think:\n"])
def test_a_prompt_that_goes_on_beyond_the_conversation_is_refused(more: str) -> None:
    tokenizer = tokenizer_with(CHATML_TEMPLATE.replace("assistant\n' }}", f"assistant\n{more}' }}}}"), "<|b|>")
    error = refusal(tokenizer, *TURNS)
    assert error.reason == "no common header"
    assert f"which has {more!r} where the message has 'Yes'. Make them the same in a copy of the tem" in str(error)


def test_a_template_that_writes_nothing_before_an_answer_is_refused() -> None:
    tokenizer = tokenizer_with(
        "{% for m in messages %}{{ m.content }}{% endfor %}{{ '<|im_end|>' if not add_generation_prompt }}"
    )
    error = refusal(tokenizer, *TURNS[:2])
    assert (error.reason, "writes nothing before message 2" in str(error)) == ("no common header", True)


def test_the_remedy_for_a_template_that_names_no_speaker_works() -> None:
    renderer = Renderer(
        tokenizer_with("{% for m in messages %}{{ m.content }}{% endfor %}", eos="<|im_end|>"), "assistant"
    )
    [error] = renderer.render_items([conversation_of(*TURNS)])
    assert isinstance(error, BadRecordError)
    found = re.search(r"such as (\{%.*endif %\}): data\.template=FILE\.jinja", str(error))
    assert found
    assert learned(tokenizer_with(found[1], eos="<|im_end|>"), *TURNS) == "Yes<|im_end|>¦No.<|im_end|>"


@pytest.mark.parametrize("asks", ["messages[-1].role == 'user'", "true"], ids=["nothing", "another header"])
def test_two_answers_in_a_row_are_to_be_joined_where_the_second_has_no_prompt(asks: str) -> None:
    header = "{{ '<|im_start|>' + m.role + '\n' if loop.first or m.role != loop.previtem.role }}"
    end = "{{ '<|im_end|>\n' if m.role == 'user' or not add_generation_prompt }}"
    prompt = f"{{% if add_generation_prompt and {asks} %}}{{{{ '<|im_start|>assistant\n' }}}}{{% endif %}}"
    tokenizer = tokenizer_with(f"{{% for m in messages %}}{header}{{{{ m.content }}}}{end}{{% endfor %}}{prompt}")
    error = refusal(tokenizer, *TURNS[:2], ("assistant", "No."))
    assert error.reason == "no common header"
    assert str(error).endswith(". Join it with message 2, which is the assistant's, too")
    assert learned(tokenizer, TURNS[0], ("assistant", "Yes\n\nNo.")) == "Yes\n\nNo.<|im_end|>"


def test_what_the_prompt_gives_is_not_learned_where_the_answer_begins_with_it() -> None:
    tokenizer = tokenizer_with(CHATML_TEMPLATE.replace("assistant\n' }}", "assistant\nAnswer:' }}"))
    assert learned(tokenizer, ("user", "Hi"), ("assistant", "Answer: 42")) == " 42<|im_end|>"


@pytest.mark.parametrize("prompt", ["\n<|im_start|>assistant\n", "<|im_start|> assistant\n"], ids=["before", "within"])
def test_a_prompt_with_other_whitespace_is_the_header_and_noted(prompt: str) -> None:
    """As in Llama 4's template for JSON calls and in Hermes' after a tool's result."""
    tokenizer = tokenizer_with(CHATML_TEMPLATE.replace("'<|im_start|>assistant\n' }}", f"{prompt!r} }}}}"))
    result = rendered(tokenizer, conversation_of(*TURNS))
    assert (supervised_text(tokenizer, result), result.notes) == ("Yes<|im_end|>¦No.<|im_end|>", (PROMPT_DIFFERS,))


# The prompt prefills reasoning

THINKING = CHATML_TEMPLATE.replace("assistant\n' }}", "assistant\n<think>\n' }}")


@pytest.mark.parametrize("marker", [(), ("<think>", "</think>")], ids=["text", "tokens"])
def test_reasoning_that_the_prompt_opens_is_learned_without_its_tag(marker: tuple[str, ...]) -> None:
    tokenizer = tokenizer_with(THINKING, *marker)
    turns = [("user", "Hi"), ("assistant", "<think>\nhm\n</think>\n\nFour.")]
    assert learned(tokenizer, *turns) == "hm\n</think>\n\nFour.<|im_end|>"
    assert PREFILL_MISSING not in rendered(tokenizer, conversation_of(*turns)).notes


def test_a_template_may_drop_reasoning_of_the_last_answer_if_it_is_empty() -> None:
    """As in data that were generated without thinking, and DeepSeek-R1's templates."""
    tokenizer = tokenizer_with(CHATML_TEMPLATE.replace("m['content']", "m['content'].split('</think>')[-1].strip()"))
    assert learned(tokenizer, TURNS[0], ("assistant", "<think>\n\n</think>\n\nFour.")) == "Four.<|im_end|>"
    assert refusal(tokenizer, TURNS[0], ("assistant", "<think>\nhm\n</think>Four.")).reason == "template drops text"
    assert refusal(tokenizer, ("user", "<think></think>Hi"), TURNS[1]).reason == "template drops text"


def test_the_cache_knows_answers_that_begin_with_the_prefill() -> None:
    tokenizer = tokenizer_with(THINKING)
    renderer = Renderer(tokenizer, "assistant")
    plain, thinks = conversation_of(*TURNS[:2]), conversation_of(TURNS[0], ("assistant", "<think>\nhm</think>Yes"))
    for conversation, wanted, noted in [(plain, "Yes", True), (thinks, "hm</think>Yes", False), (plain, "Yes", True)]:
        [result] = renderer.render_items([conversation])
        assert isinstance(result, Rendered)
        assert supervised_text(tokenizer, result) == f"{wanted}<|im_end|>"
        assert (PREFILL_MISSING in result.notes) == noted


CALL = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content }}"
    "{% for c in m.tool_calls or [] %}{{ '<tool_call>' + c.function.name + '</tool_call>' }}{% endfor %}"
    "{{ '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n<think>\n' }}{% endif %}"
)


@pytest.mark.parametrize("markers", [(), ("<think>", "<tool_call>", "</tool_call>")], ids=["text", "tokens"])
def test_a_call_begins_where_the_prefill_does(markers: tuple[str, ...]) -> None:
    """`<think>` of the prompt and `<tool_call>` have `<t` in common."""
    tokenizer = tokenizer_with(CALL, *markers)
    call = Message("assistant", "", tool_calls=(ToolCall("look", {}),))
    result = rendered(tokenizer, Conversation((Message("user", "Hi"), call), Origin("here", 1)))
    assert supervised_text(tokenizer, result) == "<tool_call>look</tool_call><|im_end|>"
    assert result.notes == (PREFILL_MISSING,)


def test_a_call_may_have_its_id_only_where_the_result_follows() -> None:
    """As in Apriel's templates. The next turn does not end it."""
    ids = CALL.replace("<think>\n", "").replace("{% for c", "{% set last = loop.last %}{% for c")
    ids = ids.replace("c.function.name", "c.function.name + ('' if last else ' as ' ~ c.id)")
    call = Message("assistant", "", tool_calls=(ToolCall("look", {}, "c1"),))
    messages = (Message("user", "Hi"), call, Message("tool", "7", tool_call_id="c1"), Message("assistant", "Seven."))
    tokenizer = tokenizer_with(ids, "<tool_call>", "</tool_call>")
    result = rendered(tokenizer, Conversation(messages, Origin("here", 1), (PROBE_TOOL,)))
    assert supervised_text(tokenizer, result) == "<tool_call>look as c1</tool_call><|im_end|>¦Seven.<|im_end|>"
    open_ended = ids.replace("{{ '<|im_end|>\n' }}", "{{ '<|im_end|>\n' if last or m.role != 'assistant' }}")
    with pytest.raises(BadRecordError, match="no end-of-turn token after message 2"):
        rendered(tokenizer_with(open_ended, "<tool_call>", "</tool_call>"), Conversation(messages, Origin("here", 1)))


@pytest.mark.parametrize("prefill", ["<think>", "<|START_THINKING|><|END_THINKING|>", "<|channel>thought\n<channel|>"])
def test_a_turn_that_begins_with_another_marker_than_the_prefill_is_learned_from_there(prefill: str) -> None:
    template = CHATML_TEMPLATE.replace("assistant\n' }}", f"assistant\n{prefill}' }}}}")
    template = template.replace("m['content']", "('<|START_TEXT|>' if m.role == 'assistant' else '') + m['content']")
    markers = ("<think>", "</think>", "<|START_THINKING|>", "<|END_THINKING|>", "<|START_TEXT|>", "<|channel>")
    tokenizer = tokenizer_with(template, *markers)
    assert learned(tokenizer, *TURNS[:2]) == "<|START_TEXT|>Yes<|im_end|>"


@pytest.mark.parametrize(
    ("split", "thought"),
    [
        ("m.thinking, m.content", Message("assistant", "", reasoning="hm")),
        ("m.thinking, m.content | trim", Message("assistant", "\n\n", reasoning="hm")),
        ("m.thinking, m.content[0].text", Message("assistant", "", reasoning="hm")),
        ("(m.content.split('</think>')[0].split('<think>')[1], '') if '</think>' in m.content else ('', m.content)",
         Message("assistant", "<think>hm</think>")),
    ],
    ids=["empty", "blank", "parts", "inline"],
)  # fmt: skip
def test_the_marker_that_closes_reasoning_does_not_end_the_turn(split: str, thought: Message) -> None:
    template = (
        f"{{% for m in messages %}}{{% set thought, text = {split} %}}{{{{ '<|im_start|>' + m.role + '\n' }}}}"
        "{{ '<think>' + thought + '</think>' if thought else '' }}{{ text + '<|im_end|>' if text else '' }}{{ '\n' }}"
        "{% endfor %}"
    ) + PROMPT
    tokenizer = tokenizer_with(template, "<think>", "</think>")
    with pytest.raises(BadRecordError) as refused:
        rendered(tokenizer, Conversation((Message("user", "Hi"), thought), Origin("here", 1)))
    assert refused.value.reason == "no end of turn"


@pytest.mark.parametrize("eos", ["<|im_end|>", "<|endoftext|>"])
def test_other_whitespace_before_the_end_of_an_earlier_turn_is_learned_with_it(eos: str) -> None:
    """As in Nemotron Nano's template, which writes the last call on a way of its own."""
    template = CHATML_TEMPLATE.replace("m['content'] +", "m['content'] + ('' if loop.last else '\n') +")
    assert learned(tokenizer_with(template, eos=eos), *TURNS) == "Yes\n<|im_end|>¦No.<|im_end|>"


# No end after the last answer: the refusal tells what to do, and that works

GLM = (
    "{% for m in messages %}{{ '<|' + ('observation' if m.role == 'tool' else m.role) + '|>\n' + m.content }}"
    "{% for c in m.tool_calls or [] %}{{ '<tool_call>' + c.function.name + '</tool_call>' }}{% endfor %}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}\n"
)
GLM_MARKERS = ("<|user|>", "<|assistant|>", "<|observation|>", "<tool_call>", "</tool_call>", "<|endoftext|>")
GLM_STOPS = ("<|user|>", "<|observation|>")
APERTUS = (
    "{% for m in messages %}{{ ('<|end|>' if m.role == 'user' and loop.index0 else '') + '<|' + m.role + '|>' }}"
    "{{ m.content + ('<|end_user|>' if m.role == 'user' else '') }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def appended(error: BadRecordError) -> str:
    [line] = re.findall(r"Append (.*) to a copy of the template, and use that: data\.template=COPY\.jinja", str(error))
    return str(line)


@pytest.mark.parametrize(
    ("template", "markers", "eos", "stops", "end"),
    [
        (GLM, GLM_MARKERS, "<|endoftext|>", GLM_STOPS, "<|user|>"),
        (APERTUS, ("<|user|>", "<|assistant|>", "<|end|>", "<|end_user|>"), "<|end|>", (), "<|end|>"),
    ],
    ids=["glm", "apertus"],
)
def test_the_remedy_for_a_last_answer_without_end_works(
    template: str, markers: tuple[str, ...], eos: str, stops: tuple[str, ...], end: str
) -> None:
    before = tokenizer_with(template, *markers, eos=eos)
    for count in (2, 4):
        error = refusal(before, *TURNS[:count], stops=stops)
        assert error.reason == "no end of turn"
        assert f"after message {count}" in str(error)
        after = tokenizer_with(template + appended(error), *markers, eos=eos)
        answers = ["Yes", "No."][: count // 2]
        assert learned(after, *TURNS[:count], stops=stops) == "¦".join(answer + end for answer in answers)
        messages = [Message(role, text) for role, text in TURNS[:1]]
        prompts = [Renderer(each, "assistant").prompt_ids(messages) for each in (before, after)]
        assert prompts[0] == prompts[1]


def test_with_that_remedy_a_call_ends_with_the_stop_token_that_follows_it() -> None:
    tokenizer = tokenizer_with(GLM + "{%- if not add_generation_prompt %}{{ '<|user|>' }}{% endif %}", *GLM_MARKERS)
    messages = (
        Message("user", "Hi"), Message("assistant", "", tool_calls=(ToolCall("look", {}),)),
        Message("tool", "7"), Message("assistant", "Seven."),
    )  # fmt: skip
    result = rendered(tokenizer, Conversation(messages, Origin("here", 1)), GLM_STOPS)
    assert supervised_text(tokenizer, result) == "<tool_call>look</tool_call><|observation|>¦Seven.<|user|>"
    assert result.supervises_end


def test_the_remedy_for_answers_without_any_end_works() -> None:
    template = (
        "{% for m in messages %}{{ m.role + ': ' + m.content + '\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
    )
    error = refusal(tokenizer_with(template), *TURNS)
    assert "Write <|im_end|> after each answer and call in a copy of the template" in str(error)
    better = template.replace("m.content", "m.content + ('<|im_end|>' if m.role == 'assistant' else '')")
    assert [part.strip() for part in learned(tokenizer_with(better), *TURNS).split("¦")] == [
        "Yes<|im_end|>", "No.<|im_end|>",
    ]  # fmt: skip


def test_the_remedy_for_an_end_of_turn_that_is_no_token_works() -> None:
    with pytest.raises(BadRecordError) as caught:
        learned(small_tokenizer(CHATML_TEMPLATE, ("</s>",), eos="</s>"), *TURNS)
    assert "It writes <|im_end|>, which is not a token: add it with model.add_tokens" in str(caught.value)
    tokenizer = small_tokenizer(CHATML_TEMPLATE, ("</s>", "<|im_end|>"), eos="</s>")
    assert learned(tokenizer, *TURNS) == "Yes<|im_end|>¦No.<|im_end|>"


# Tools that the template requires

NEEDS_TOOLS = "{{ '<|im_start|>system\n' + (tools | length) | string + ' tools<|im_end|>\n' }}" + CALL.replace(
    "<think>\n", ""
)


def test_a_template_that_requires_tools_is_tried_with_those_of_the_conversation() -> None:
    tokenizer = tokenizer_with(NEEDS_TOOLS, "<tool_call>", "</tool_call>", eos=None)
    call = Message("assistant", "", tool_calls=(ToolCall("look", {}),))
    messages = (Message("user", "Hi"), call, Message("tool", "7"), Message("assistant", "Seven."))
    result = rendered(tokenizer, Conversation(messages, Origin("here", 1), (PROBE_TOOL,)))
    assert supervised_text(tokenizer, result) == "<tool_call>look</tool_call><|im_end|>¦Seven.<|im_end|>"
    assert result.notes == ()
    assert Renderer(tokenizer, "assistant").end_of_turn() == tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert refusal(tokenizer, *TURNS).reason == "template refuses"


def test_content_parts_are_found_out_with_tools_where_the_template_requires_them() -> None:
    template = "{{ (tools | length) | string }}" + CHATML_TEMPLATE.replace("m['content']", "m['content'][0]['text']")
    tokenizer = tokenizer_with(template)
    result = rendered(tokenizer, Conversation(conversation_of(*TURNS).messages, Origin("here", 1), (PROBE_TOOL,)))
    assert supervised_text(tokenizer, result) == "Yes<|im_end|>¦No.<|im_end|>"


# Calls without content: null, as records have it, or an empty text for templates that cannot take null


@pytest.mark.parametrize(
    ("content", "written"),
    [
        ("('' if m.content is none else m.content + '<|im_end|>')", ""),
        ("m.content", ""),
        ("m.content ~ '.'", "."),
    ],
    ids=["told apart", "concatenated", "printed"],
)
@pytest.mark.parametrize("record", [{"content": None}, {}], ids=["null", "absent"])
def test_a_call_without_content(content: str, written: str, record: dict[str, Any]) -> None:
    """DeepSeek's templates write an empty answer beside a call whose content is an empty text."""
    tokenizer = tokenizer_with(CALL.replace("m.content", content).replace("<think>\n", ""), "<tool_call>")
    call = {"role": "assistant", "tool_calls": [{"function": {"name": "look", "arguments": {}}}], **record}
    conversation = parse_messages([{"role": "user", "content": "Hi"}, call], NAMES, Origin("here", 1))
    result = rendered(tokenizer, conversation)
    assert supervised_text(tokenizer, result) == f"{written}<tool_call>look</tool_call><|im_end|>"


# Arguments of calls as text

WRITTEN = '{"city":"Rīga \\"x\\"", "days": 3}'


def call_record(arguments: Any) -> Conversation:
    call = {"function": {"name": "look", "arguments": arguments}}
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "", "tool_calls": [call]}]
    return parse_messages({"messages": messages}, NAMES, Origin("here", 1))


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (WRITTEN, WRITTEN),
        ({"city": 'Rīga "x"', "days": 3}, '{"city": "Rīga \\"x\\"", "days": 3}'),
        ('{"days":3}', '{"days":3}'),
        ({}, "{}"),
        ("", ""),
    ],
    ids=["written", "object", "number", "none", "blank"],
)
@pytest.mark.parametrize(
    "printed", ["c.function.name + c.function.arguments", "c.function.name ~ c.function.arguments"]
)
def test_a_template_that_prints_arguments_gets_them_as_written(printed: str, arguments: Any, text: str) -> None:
    tokenizer = tokenizer_with(CALL.replace("c.function.name", printed).replace("<think>\n", ""), "<tool_call>")
    if text == "" and "~" in printed:
        text = "{}"  # an object without arguments is printed the same in Python and JSON
    result = rendered(tokenizer, call_record(arguments))
    assert supervised_text(tokenizer, result) == f"<tool_call>look{text}</tool_call><|im_end|>"


def test_a_template_that_takes_objects_still_gets_them() -> None:
    source = CALL.replace("c.function.name", "c.function.name ~ c.function.arguments | tojson").replace("<think>\n", "")
    tokenizer = tokenizer_with(source, "<tool_call>")
    result = rendered(tokenizer, call_record(WRITTEN))
    wanted = '<tool_call>look{"city": "Rīga \\"x\\"", "days": 3}</tool_call><|im_end|>'
    assert supervised_text(tokenizer, result) == wanted
    quoted = call_record({"days": 3})
    messages = (Message("user", "Is it {'days': 3}?"), quoted.messages[1])
    result = rendered(tokenizer, Conversation(messages, Origin("here", 1)))
    assert supervised_text(tokenizer, result) == '<tool_call>look{"days": 3}</tool_call><|im_end|>'


def test_the_first_error_is_told_where_text_does_not_help() -> None:
    source = CALL.replace("c.function.name", "c.function.name + m.nothing").replace("<think>\n", "")
    with pytest.raises(BadRecordError, match="nothing"):
        rendered(tokenizer_with(source), call_record(WRITTEN))
