"""Traced strings: a cached layout is reused only for texts that the template treats alike.

The property is tested from outside: a renderer whose cache is filled with plain texts must treat every other text as
one that renders in full, whatever the template does with texts.
"""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from examples import examples
from whet.core.errors import BadRecordError
from whet.data.conversation import Conversation
from whet.data.render.layout_cache import Layout
from whet.data.render.renderer import Renderer
from whet.tokenizer.chat_template import ChatTemplate
from whet.tokenizer.traced_strings import DataDependentError, TracedStr, TraceGuards

from .render_helpers import conversation_of, tokenizer_with
from .template_families import CHATML_TEMPLATE

TOKENIZER = tokenizer_with(CHATML_TEMPLATE, ("<|im_start|>", "<|im_end|>", "<think>"))
PLAIN_TEXTS = [[("user", f"{mark}u"), ("assistant", f"{mark}a")] for mark in ("Hi", "Zo", "Ku")]


def template(expression: str, before: str = "") -> str:
    """ChatML that prints an expression of the content `c` in its place."""
    loop, rest = "{% for m in messages %}", "{% set c = m['content'] %}"
    return "{% set w = '<think>' %}{% macro echo(x) %}{{ x }}{% endmacro %}" + CHATML_TEMPLATE.replace(
        loop, loop + rest + before
    ).replace("m['content'] + '<|im", f"({expression}) + '<|im")


def layout_or_reason(renderer: Renderer, conversation: Conversation) -> Layout | str:
    try:
        return renderer.layout(conversation)
    except BadRecordError as error:
        return error.reason


def warmed_up(source: str) -> Renderer:
    """A renderer whose cache is filled with plain texts and never verified."""
    renderer = Renderer(TOKENIZER, "assistant", template=source)
    assert renderer._layout_cache is not None
    renderer._layout_cache.should_verify = lambda _: False  # type: ignore[method-assign]
    for turns in PLAIN_TEXTS:
        layout_or_reason(renderer, conversation_of(*turns))
    return renderer


def uses_render_cache(renderer: Renderer) -> bool:
    assert renderer._layout_cache is not None
    return any(known is not None for known in renderer._layout_cache._entries.values())


def agrees(source: str, *texts: str) -> bool:
    """Whether the cache is of no consequence; returns whether it was in use."""
    cold, warm = Renderer(TOKENIZER, "assistant", template=source, cached=False), warmed_up(source)
    for text in texts:
        for turns in ([("user", text), ("assistant", "zz")], [("user", "zz"), ("assistant", text)]):
            assert layout_or_reason(warm, conversation_of(*turns)) == layout_or_reason(cold, conversation_of(*turns)), (
                source,
                turns,
            )
    return uses_render_cache(warm)


# Operations that are guarded, each with a text that the guard must reject or that is harmless

IF = "('#' if {} else '') + c"
GUARDED = {
    "plain": ("c", "a"),
    "strip": ("c.strip()", " a"),
    "strip characters": ("c.strip('ab')", "b now"),
    "strip characters right": ("c.rstrip('ab')", "now b"),
    "trim characters": ("c | trim('ab')", "b now"),
    "a word in a variable": (IF.format("w in c"), "a <think> b"),
    "equal to a variable": (IF.format("c == w"), "<think>"),
    "unequal": (IF.format("'yes' != c"), "yes"),
    "equal to joined constants": (IF.format("c == 'ye' + 's'"), "yes"),
    "in a constant": (IF.format("c in 'yes no'"), "yes"),
    "not in a constant": (IF.format("c not in 'yes no'"), "yes"),
    "in a list": (IF.format("c in ['yes', 'no']"), "yes"),
    "test in": (IF.format("c is in 'yes no'"), "yes"),
    "selected by a test": (IF.format("messages | selectattr('content', 'in', 'yes no') | list"), "yes"),
    "selected by equality": (IF.format("messages | selectattr('content', 'equalto', 'yes') | list"), "yes"),
    "a word over a seam": (IF.format("w in '<' + c"), "think> b"),
    "a word over a seam behind": (IF.format("w in c + 'k>'"), "b <thin"),
    "a text inside a word": (IF.format("w in '<th' ~ c ~ 'k>'"), "in"),
    "starts with": (IF.format("c.startswith(w)"), "<think>b"),
    "starts with one of": (IF.format("c.startswith((w, 'b'))"), "b"),
    "ends with": (IF.format("c.endswith(w)"), "b<think>"),
    "removeprefix": ("c.removeprefix(w)", "<think>b"),
    "removesuffix": ("c.removesuffix(w)", "b<think>"),
    "split": ("c.split(w)[-1]", "a<think>b"),
    "number of parts": (IF.format("c.split(w) | length > 1"), "a<think>b"),
    "replace": ("c.replace('b', 'xy')", "abc"),
    "replace filter": ("c | replace('b', 'xy')", "abc"),
    "empty": (IF.format("c | trim | length == 0"), " "),
    "not empty": (IF.format("(c | length) > 0"), "a"),
    "concatenated": ("'' ~ c ~ ''", "a"),
    "joined": ("[c] | join('')", "a"),
    "joined by a method": ("''.join([c])", "a"),
    "by a macro": ("echo(c)", "a"),
    "macro and word": (IF.format("w in echo(c)"), "<think>"),
    "default": ("c | default('x')", "a"),
    "types": (IF.format("c is string and c is not mapping and c is iterable and c is sequence and c is defined"), "a"),
    "key of a text": (IF.format("c.text is defined"), "a"),
    "compared with itself": (IF.format("c == m['content']"), "a"),
}
REFUSED = {
    "escaped": ("c | e", "a & b"),
    "title": ("c | title", "hello you"),
    "upper": (IF.format("c | upper == c"), "A"),
    "lower method": (IF.format("c.lower() == c"), "A"),
    "int": (IF.format("c | int > 5"), "77"),
    "float": (IF.format("c | float > 0"), "7"),
    "length": (IF.format("c | length > 9"), "a very long text"),
    "length of a concatenation": (IF.format("(c ~ '') | length > 9"), "a very long text"),
    "length of a replacement": (IF.format("(c | replace('§', '')) | length > 9"), "a very long text"),
    "length of a format": (IF.format("'{}'.format(c) | length > 9"), "a very long text"),
    "length of a format filter": (IF.format("('%s' | format(c)) | length > 9"), "a very long text"),
    "length of a percent": (IF.format("('%s' % c) | length > 9"), "a very long text"),
    "length of a percent that is made": (IF.format("((w ~ '%s') % (c,)) | length > 16"), "a very long text"),
    "length of a percent of a tuple": (IF.format("('%s' % (c,)) | length > 9"), "a very long text"),
    "length of a join": (IF.format("([c] | join('')) | length > 9"), "a very long text"),
    "length of a join by a method": (IF.format("''.join([c]) | length > 9"), "a very long text"),
    "length of a list as text": (IF.format("([c] | string) | length > 9"), "a very long text"),
    "length of a macro": (IF.format("echo(c) | length > 9"), "a very long text"),
    "length in a sum": (IF.format("(c | length) + 1 > 9"), "a very long text"),
    "length printed": ("c ~ (c | length)", "abc"),
    "a character": (IF.format("c[0] == 'A'"), "A"),
    "a slice": (IF.format("c[:2] == 'ab'"), "abc"),
    "first": (IF.format("c | first == 'A'"), "A"),
    "list": (IF.format("c | list | length > 3"), "abcd"),
    "reversed": (IF.format("(c | reverse) == 'sey'"), "yes"),
    "words": (IF.format("c.split() | length > 3"), "a b c d"),
    "word count": (IF.format("c | wordcount > 3"), "a b c d"),
    "lines": (IF.format("c.splitlines() | length > 1"), "a\nb"),
    "count": (IF.format("c.count('l') > 1"), "all"),
    "find": (IF.format("c.find('l') > 0"), "all"),
    "order": (IF.format("c < 'b'"), "a"),
    "largest": (IF.format("([c, 'b'] | max) == 'b'"), "a"),
    "key": (IF.format("{'yes': 1}.get(c)"), "yes"),
    "key by subscript": (IF.format("{'yes': 1}[c] is defined"), "yes"),
    "json": ("c ~ ('' if (c | tojson) == '\"' ~ c ~ '\"' else '#')", 'a"b'),
    "nested json": ("c ~ ('#' if '\\\\' in ([{'a': c}] | tojson) else '')", 'a"b'),
    "equal texts": (IF.format("c == messages[0]['content']"), "zz"),
    "text in text": (IF.format("messages[0]['content'] in c"), "zz"),
    "in a constant by a method": (IF.format("'yes no'.startswith(c)"), "yes"),
    "replacement in a constant": (IF.format("'a-b'.replace('-', c) | length > 9"), "a very long text"),
    "stripped of a text": (IF.format("'zaz'.strip(c) == 'a'"), "z"),
    "tags": ("c | striptags", "a <b>x</b>"),
    "url": ("c | urlize", "http://a.bc"),
    "wrapped": ("c | wordwrap(12)", "a very long text indeed"),
    "centred": ("c | center(6)", "abcdefg"),
    "indented": ("c | indent", "a\nb"),
    "marked as safe": ("(('' | safe) + c) ~ ''", "a & b"),
    "is upper": (IF.format("c is upper"), "A"),
    "is a test": (IF.format("c is filter"), "upper"),
    "unique": (IF.format("([c, 'yes'] | unique | list | length) == 1"), "yes"),
    "grouped": (IF.format("(messages | groupby('content') | length) == 1"), "zz"),
    "joined by attribute": (IF.format("(messages | join('', attribute='content')) | length > 9"), "a very long text"),
}


@pytest.mark.parametrize("name", GUARDED)
def test_guarded_operations_use_the_cache_and_change_nothing(name: str) -> None:
    expression, text = GUARDED[name]
    assert agrees(template(expression), text, "other", f"x{text}x", text * 3), "the structure should be cached"


@pytest.mark.parametrize("name", REFUSED)
def test_a_template_that_inspects_texts_is_not_cached(name: str) -> None:
    expression, text = REFUSED[name]
    assert not agrees(template(expression), text, "other", f"x{text}x", text * 3), "the structure must not be cached"


@pytest.mark.parametrize(
    "before",
    [
        "{% set x %}{{ c }}{% endset %}",
        "{% set x = echo(c) %}",
        "{% set ns = namespace(x='') %}{% set ns.x = c ~ '' %}{% set x = ns.x %}",
        "{% set x %}{% for part in [c] %}{{ part }}{% endfor %}{% endset %}",
        "{% set x %}{% filter trim %}{{ c }}{% endfilter %}{% endset %}",
        "{% macro f() %}{{ caller() }}{% endmacro %}{% set x %}{% call f() %}{{ c }}{% endcall %}{% endset %}",
    ],
)
def test_texts_stay_traced_through_blocks_macros_and_namespaces(before: str) -> None:
    assert not agrees(template("('#' if x | length > 9 else '') + x", before), "a very long text", "a")
    assert agrees(template("('#' if w in x else '') + x", before), "a very long text", "<think>", "a<think>")


@pytest.mark.parametrize("loop", ["{% for x in c %}{% if x == 'l' %}{% set ns.n = 1 %}{% endif %}{% endfor %}"])
def test_a_loop_over_characters_is_not_cached(loop: str) -> None:
    source = template("c ~ ('#' if ns.n else '')", "{% set ns = namespace(n=0) %}" + loop)
    assert not agrees(source, "all", "other")


def test_a_generation_prompt_that_inspects_texts_is_not_cached() -> None:
    source = CHATML_TEMPLATE.replace(
        "assistant\n' }}", "assistant\n' }}{{ '<think>' if messages[-1]['content'] | length > 5 else '' }}"
    ).replace("+ m['content']", "+ ('<think>' if m['role'] == 'assistant' else '') + m['content']")
    assert not agrees(source, "a very long text", "a")


# Templates at random

WORDS = ["<think>", "</think>", "b", "ab", "\n", " ", "yes", "<", ""]


@st.composite
def expressions(draw: st.DrawFn, depth: int = 3) -> str:
    """Of the text `c`, a text."""
    if depth == 0:
        return "c"
    inner, word, other = draw(expressions(depth - 1)), draw(_WORD), draw(_WORD)
    return draw(
        st.sampled_from([
            inner, inner, f"({inner} ~ {word})", f"({word} + {inner})", f"{inner}.strip()", f"{inner}.strip({word})",
            f"({inner} | trim)", f"{inner}.lstrip({word})", f"{inner}.replace({word}, {other})",
            f"({inner} | replace({word}, {other}))", f"{inner}.split({word})[-1]", f"{inner}.split({word})[0]",
            f"echo({inner})", f"({inner} if {draw(conditions(depth - 1))} else {word} ~ {inner})",
            f"([{inner}, {word}] | join({other}))", f"({inner} | upper)", f"{inner}[1:]", f"({inner} | title)",
            f"{inner}.removeprefix({word})", f"({inner} | default({word}))", f"({inner} | string)",
        ])
    )  # fmt: skip


@st.composite
def conditions(draw: st.DrawFn, depth: int = 2) -> str:
    inner, word = draw(expressions(depth)), draw(_WORD)
    return draw(
        st.sampled_from([
            f"{word} in ({inner})", f"({inner}) in {word}", f"({inner}) == {word}", f"{word} != ({inner})",
            f"({inner}).startswith({word})", f"({inner}).endswith({word})", f"(({inner}) | length) > 0",
            f"(({inner}) | length) > 4", f"({inner}) in [{word}, 'b']", f"({inner})", f"({inner}) is string",
            f"(({inner}) ~ '') | wordcount > 1", f"({inner}).split({word}) | length > 1",
        ])
    )  # fmt: skip


_WORD = st.sampled_from([repr(word) for word in WORDS] + ["w", "m['role']"])
TEXTS = st.lists(st.sampled_from([*WORDS, "c", "user", "think>", "</", "X"]), min_size=1, max_size=3).map("".join)


@settings(
    max_examples=examples(120, 50), deadline=None, derandomize=True, database=None,
    suppress_health_check=list(HealthCheck),
)  # fmt: skip
@given(expressions(), st.lists(TEXTS, min_size=3, max_size=5))
@example("(w + c) if w in ('<' ~ c) else c", ["think>"])
def test_random_templates_render_the_same_with_and_without_the_cache(expression: str, texts: list[str]) -> None:
    agrees(template(expression), *texts)


# The pieces


def traced(text: str) -> tuple[TracedStr, TraceGuards]:
    guards = TraceGuards()
    return TracedStr(text, guards), guards


def test_every_string_method_is_traced_or_refused() -> None:
    """A method that a later Python brings must be refused until it is known."""
    answering = {
        "startswith", "endswith", "removeprefix", "removesuffix", "strip", "lstrip", "rstrip", "replace", "split",
    }  # fmt: skip
    for name in dir(str):
        if not name.startswith("_") and name != "maketrans":
            text, guards = traced("abc")
            arguments: tuple[Any, ...] = {"replace": ("x", "y")}.get(name, ("x",))
            if name in answering:
                getattr(text, name)(*arguments)
                assert not guards.is_data_dependent, name
            else:
                with pytest.raises(DataDependentError):
                    getattr(text, name)(*arguments)
                assert guards.is_data_dependent, name


@pytest.mark.parametrize(
    "look",
    [len, list, hash, repr, lambda t: t[0], lambda t: t[1:], lambda t: t < "b", lambda t: t >= "b", lambda t: t * 2,
     lambda t: t % (), lambda t: f"{t}", lambda t: t.split(), lambda t: t.startswith("a", 1),
     lambda t: t.replace("", "-"), lambda t: sorted([t, t])],
)  # fmt: skip
def test_inspecting_a_text_is_refused_and_recorded(look: Any) -> None:
    text, guards = traced("abc")
    with pytest.raises(DataDependentError):
        look(text)
    assert guards.is_data_dependent


def test_comparing_two_traced_strings_is_refused() -> None:
    guards = TraceGuards()
    a, b = TracedStr("a", guards), TracedStr("b", guards)
    for ask in (lambda: a == b, lambda: a in b, lambda: a.startswith(b), lambda: a.replace(b, ""), lambda: a.strip(b)):
        with pytest.raises(DataDependentError):
            ask()


def test_concatenation_and_stripping_stay_traced() -> None:
    text, guards = traced("abc")
    for kept in (str(text), text + "x", "x" + text, text.strip(), text.replace("x", "y"), *text.split("x")):
        assert type(kept) is TracedStr
    assert bool(text)
    assert not bool(traced("")[0])
    assert not guards.is_data_dependent


def test_the_predicate_rejects_texts_that_touch_a_constant() -> None:
    text, guards = traced("abc")
    assert "<think>" not in text
    text.strip("*")
    is_safe = guards.predicate()
    assert all(map(is_safe, ["abc", "a <thin b", "a* b", "think", "é"][:3]))
    refused = ["a<think>b", "<think>", "think", "k> a", "a <th", "*a", "a*", " a", "a\n", "\u3000a"]
    assert [text for text in refused if is_safe(text)] == []


def test_empty_constants_are_ignored() -> None:
    text, guards = traced("abc")
    assert text != ""
    assert guards.predicate()("abc")


def test_tracing_renders_as_the_template_does() -> None:
    for expression, text in GUARDED.values():
        chat = ChatTemplate(template(expression), {})
        plain = [{"role": "user", "content": text}, {"role": "assistant", "content": "x"}]
        guards = TraceGuards()
        marked = [{**message, "content": TracedStr(message["content"], guards)} for message in plain]
        assert "".join([chat.render_traced(marked)]) == chat.render(plain)
