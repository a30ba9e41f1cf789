"""Templates: rendered as transformers renders them."""

from __future__ import annotations

import datetime
from typing import Any

import pytest

from whet.core.errors import BadRecordError, WhetError
from whet.tokenizer.chat_template import ChatTemplate

from .template_families import CHATML_TEMPLATE, DATED, FAMILIES, Family, small_tokenizer, tokenizer_of
from .test_trl_templates import SOME, full
from .trl_templates import FIXED, TRL_TEMPLATES, TrlTemplate

TALK = [{"role": "user", "content": ' "Hi"\n'}, {"role": "assistant", "content": "Ā <b>&\\"}]


@pytest.mark.parametrize("prompt", [False, True])
@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_a_family_is_rendered_as_transformers_renders_it(family: Family, prompt: bool) -> None:
    tokenizer = tokenizer_of(family)
    messages = TALK[:1] if prompt else TALK
    wanted = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=prompt)
    assert ChatTemplate(family.template, tokenizer.special_tokens_map).render(messages, prompt=prompt) == wanted


@pytest.mark.skipif(not TRL_TEMPLATES, reason="trl, whose chat templates are tried, is not installed")
@SOME
def test_a_shipped_template_is_rendered_as_transformers_renders_it(template: TrlTemplate) -> None:
    renderer = full(template, "assistant")  # whose dates are answered
    for conversation in FIXED.values():
        outcomes: list[str] = []
        for render, messages in (
            (renderer.text.apply, conversation.messages),
            (renderer.text.render, renderer.text.as_dicts(conversation.messages)),
        ):
            try:
                outcomes.append(render(messages, tools=conversation.tools))
            except BadRecordError as error:
                outcomes.append(error.reason)
        assert outcomes[0] == outcomes[1]


JSON: list[Any] = [{"ā": 'q"\\\n', "b": [1, 2.5, None, True], "c": {"<": "&'"}}, "tēxt", [], 3]


@pytest.mark.parametrize(
    "options", ["", "(indent=2)", "(ensure_ascii=true)", "(sort_keys=true)", "(separators=(',',':'))"]
)
def test_json_is_written_as_transformers_writes_it(options: str) -> None:
    source = f"{{% for m in messages %}}{{{{ m['content'] | tojson{options} }}}}{{% endfor %}}"
    tokenizer = small_tokenizer(source, ())
    messages = [{"role": "user", "content": value} for value in JSON]
    wanted = tokenizer.apply_chat_template(messages, tokenize=False)
    assert ChatTemplate(source, {}).render(messages) == wanted
    assert "&" in wanted, "nothing is escaped as in a web page"


@pytest.mark.parametrize("tag", ["{% break %}", "{% continue %}", "{% generation %}x{% endgeneration %}"])
def test_the_tags_of_transformers_are_supported(tag: str) -> None:
    source = f"{{% for m in messages %}}a{tag}b{{% endfor %}}"
    wanted = small_tokenizer(source, ()).apply_chat_template(TALK, tokenize=False)
    assert ChatTemplate(source, {}).render(TALK) == wanted


def test_tools_documents_and_special_tokens_are_there() -> None:
    source = "{{ tools is none }}{{ documents is none }}{{ bos_token }}{{ eos_token is defined }}"
    assert ChatTemplate(source, {"bos_token": "<s>"}).render(TALK) == "TrueTrue<s>False"
    assert ChatTemplate("{{ tools[0].a }}", {}).render(TALK, [{"a": 5}]) == "5"


@pytest.mark.parametrize(
    "call", ["strftime_now('%d %b %Y')", 'strftime_now( "%d %b %Y" )', "strftime_now(format='%d %b %Y')"]
)
def test_a_date_is_rendered_at_construction(call: str) -> None:
    chat = ChatTemplate(f"{{{{ {call} }}}}|{{{{ strftime_now('%Y') }}}}", {}, "2001-02-03")
    assert chat.render([]) == "03 Feb 2001|2001"
    assert "strftime_now" not in chat.source
    assert chat.today == "2001-02-03"


def test_without_a_date_given_it_is_todays() -> None:
    today = datetime.date.today()
    assert today.strftime("%d %b %Y") in ChatTemplate(DATED.template, {"bos_token": ""}).render(TALK)


def test_a_template_may_test_whether_strftime_now_is_defined() -> None:
    source = "{% if strftime_now is defined %}{{ strftime_now('%Y') }}{% endif %}"
    assert ChatTemplate(source, {}, "2001-02-03").render([]) == "2001"


def test_a_date_format_that_is_not_constant_is_refused() -> None:
    with pytest.raises(BadRecordError) as refused:
        ChatTemplate("{% set f = '%Y' %}{{ strftime_now(f) }}", {}).render([])
    assert refused.value.reason == "template refuses"
    assert "Write it there, such as strftime_now('%d %b %Y')" in str(refused.value)


def test_constants_are_what_a_template_compares_with_or_searches_for() -> None:
    source = (
        "{% if '</think>' in c and c != 'a' %}{{ 'printed' }}{{ c.split('b')[0] | replace('d', 'e') }}{% endif %}"
        "{% if c is equalto 'f' %}{% endif %}{{ c.strip(' ') }}"
    )
    assert ChatTemplate(source, {}).constants() == ("</think>", "a", "b", "d", "e", "f")


def test_constants_in_variables_and_loops_are_compared_with_too() -> None:
    source = (
        "{% set tag = '<a>' %}{% set tags = ['<b>', {'x': '<c>'}] %}{% if c[:3] == tag %}{% endif %}"
        "{% for each in ('<d>', '<e>') %}{% if each in c %}{% endif %}{% endfor %}"
        "{% set text = '<printed>' ~ c %}"
    )
    assert ChatTemplate(source, {}).constants() == ("<a>", "<b>", "<c>", "<d>", "<e>", "x")


def test_what_a_generation_block_sets_is_not_set_behind_it() -> None:
    template = "{% set x = 'a' %}{% generation %}{% set x = 'b' %}{{ x }}{% endgeneration %}{{ x }}"
    text = small_tokenizer(template, ()).apply_chat_template(TALK, tokenize=False)
    assert ChatTemplate(template, {}).render(TALK) == text == "ba"


def test_invalid_jinja_is_an_error_and_a_failing_template_a_bad_record() -> None:
    with pytest.raises(WhetError, match="not valid Jinja"):
        ChatTemplate("{% if %}", {})
    with pytest.raises(BadRecordError, match="alternate"):
        ChatTemplate("{{ raise_exception('must alternate') }}", {}).render([])
    with pytest.raises(BadRecordError):
        ChatTemplate("{{ messages[0].content.__class__.__mro__ }}", {}).render(TALK)


def test_templates_may_not_change_what_they_are_given() -> None:
    with pytest.raises(BadRecordError):
        ChatTemplate("{% set _ = messages.append(1) %}", {}).render([*TALK])
    assert ChatTemplate(CHATML_TEMPLATE, {}).render(TALK).startswith("<|im_start|>user")
