"""A chat template is a foreign program: it gets seconds and gigabytes, then an error that says what to do."""

from __future__ import annotations

import collections
import itertools
import re
import resource
import signal
import time

import pytest

from whet.core.errors import BadRecordError, WhetError
from whet.core.limits import limited
from whet.data.conversation import Message
from whet.data.render.renderer import Renderer
from whet.tokenizer import chat_template
from whet.tokenizer.chat_template import ChatTemplate
from whet.tokenizer.traced_strings import DataDependentError, TracedStr, TraceGuards

from .render_helpers import conversation_of, tokenizer_with
from .template_families import CHATML_TEMPLATE, small_tokenizer

TALK = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes"}]
DOUBLED = "{% set ns = namespace(x='ab') %}{% for i in range(60) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}"
ENDLESS = {
    "nested loops": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "macros": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "recursive loop": "{% for i in [1] recursive %}{{ loop([1, 1]) if loop.depth < 60 }}{% endfor %}",
    "an integer": "{{ (7 ** (10 ** 9)) % 2 }}",
    "filters": "{{ range(99999) | map('string') | map('list') | list | sum(start=[]) | length }}",
}
HUGE = {
    "a repeated text": "{{ 'a' * 10**10 }}",
    "a repeated list": "{{ ([0] * 10**10) | length }}",
    "doubling": DOUBLED + "{{ ns.x | length }}",
    "nested lists": "{% set ns = namespace(x=[1]) %}{% for i in range(60) %}{% set ns.x = [ns.x, ns.x] %}{% endfor %}"
    "{{ ns.x | tojson }}",
    "a width": "{{ '%9999999999d' % 1 }}",
    "a format": "{{ '{:>9999999999}'.format(1) }}",
    "padding": "{{ 'a'.ljust(9999999999) }}",
    "centering": "{{ 'a' | center(9999999999) }}",
    "indentation": "{{ ('a\n' * 9) | indent(9999999999) }}",
    "a separator": "{{ range(99999) | join('a' * 10**6) }}",
    "replacing": "{{ ('a' * 10**6).replace('a', 'b' * 10**6) }}",
    "words": "{{ lipsum(n=99999999) }}",
}


@pytest.fixture(autouse=True)
def short_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_template, "_MAX_SECONDS", 0.1)


@pytest.mark.parametrize("source", [*ENDLESS.values(), *HUGE.values()], ids=[*ENDLESS, *HUGE])
def test_a_template_without_end_is_ended(source: str) -> None:
    began, memory = time.monotonic(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises((WhetError, BadRecordError), match="the chat template"):
        ChatTemplate(source, {}).render(TALK)
    assert time.monotonic() - began < 20
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - memory < 3 * 2**20, "KiB"


@pytest.mark.parametrize(
    "source",
    [
        "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
        "{% if 1 %}" * 99 + "{% endif %}" * 99,
        "{{ " + "9" * 5000 + " }}",
        "{{ strftime_now('\ud800') }}",
    ],
    ids=["parentheses", "blocks", "a long number", "a date that cannot be encoded"],
)
def test_a_template_that_python_cannot_compile_is_refused(source: str) -> None:
    with pytest.raises(WhetError, match=r"not valid Jinja: .*data\.template=FILE\.jinja"):
        ChatTemplate(source, {})


def test_a_template_that_compiles_without_end_is_ended() -> None:
    with pytest.raises(WhetError, match=r"ran for more than 0\.1 s.*data\.template=FILE\.jinja"):
        ChatTemplate("{{ messages }}" * 100_000, {})


def test_a_text_made_of_nothing_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_template, "_MAX_SECONDS", 5)  # it is its size that is refused
    with pytest.raises(WhetError, match=r"it turns a short conversation into 9,000,000 characters"):
        ChatTemplate("{{ 'a' * 9000000 }}", {}).render(TALK)
    long = [{"role": "user", "content": "a" * 9_000_000}]
    assert len(ChatTemplate("{{ messages[0].content * 2 }}", {}).render(long)) == 18_000_000


def test_a_long_constant_is_not_cached_with_all_its_prefixes() -> None:
    guards = TraceGuards()
    with pytest.raises(DataDependentError):
        _ = "a" * 100_000 in TracedStr("Hi", guards)
    assert guards.is_data_dependent


def test_the_engine_of_transformers_is_limited_too() -> None:
    tokenizer = small_tokenizer("{% for m in messages %}{{ m.content }}{% endfor %}", ())
    renderer = Renderer(tokenizer, "assistant")
    renderer.text.source = ENDLESS["nested loops"]
    with pytest.raises(WhetError, match="ran for more than"):
        renderer.text.apply([Message(**turn) for turn in TALK])


def test_limits_end_with_the_block() -> None:
    def state() -> tuple[object, ...]:
        return resource.getrlimit(resource.RLIMIT_DATA), signal.getsignal(signal.SIGALRM), signal.getitimer(0)

    before = state()
    with limited(0.05, ValueError):
        inside = state()
        with pytest.raises(ZeroDivisionError), limited(5, TypeError):
            _ = 1 / 0
        assert inside[:2] == state()[:2]
    assert state() == before != inside
    for endless in ((i for i in itertools.count()), (bytes(2**33) for _ in range(9))):
        with pytest.raises(ValueError, match=r"it ran for more than|it needs more than"), limited(0.05, ValueError):
            collections.deque(map(bool, endless), maxlen=0)
        assert state() == before


def test_an_inner_block_reports_memory_itself() -> None:
    with limited(9.0, ValueError), pytest.raises(TypeError, match="it needs more than 2 GiB"), limited(9.0, TypeError):
        _ = bytes(2**33)


def test_waiting_is_not_running() -> None:
    with limited(0.05, ValueError):
        time.sleep(0.3)


def test_the_time_starts_anew_in_each_inner_block() -> None:
    def spin() -> None:
        began = time.thread_time()
        while time.thread_time() - began < 0.03:
            pass

    with limited(0.05, ValueError):
        for _ in range(3):
            with limited(0.05, ValueError):
                spin()


def test_time_that_runs_out_while_garbage_is_collected_ends_the_block_in_silence(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Garbage:
        def __del__(self) -> None:
            spin(0.3)

    def spin(seconds: float) -> None:
        began = time.thread_time()
        while time.thread_time() - began < seconds:
            pass

    reported: list[object] = []
    monkeypatch.setattr("sys.unraisablehook", reported.append)
    with pytest.raises(WhetError, match=r"ran for more than 0\.1 s"), limited(0.1, WhetError):
        spin(60 if Garbage() else 0)
    assert reported == []


@pytest.mark.parametrize(
    ("raised", "advice"),
    [
        ("{{ raise_exception('roles must alternate') }}", "refuses it: roles must alternate"),
        ("{{ messages[9].content }}", "correct a copy of the template: data.template=COPY.jinja"),
        ("{{ 'a' + 1 }}", "correct a copy of the template: data.template=COPY.jinja"),
    ],
)
def test_an_error_of_the_template_itself_says_to_correct_it(raised: str, advice: str) -> None:
    renderer = Renderer(tokenizer_with(raised + CHATML_TEMPLATE), "assistant")
    with pytest.raises(BadRecordError, match=re.escape(advice)):
        renderer.layout(conversation_of(("user", "Hi"), ("assistant", "Yes")))
    with pytest.raises(BadRecordError, match=re.escape(advice)):
        renderer.text.render([{"role": "user", "content": "Hi"}])
