"""Chat templates: compiled once, rendered as transformers renders them.

`apply_chat_template` costs more than the template itself and copies every string, so that nothing can be traced. This
sets up the same Jinja environment directly. The renderer compares both results for every conversation that the layout
cache (`whet.data.render.layout_cache`) does not serve.
"""

from __future__ import annotations

import datetime
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any, NoReturn

from jinja2 import Environment, Template, TemplateError, nodes, pass_environment
from jinja2.ext import Extension, loopcontrols
from jinja2.filters import make_attrgetter
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from whet.core.errors import BadRecordError, WhetError
from whet.core.limits import limited
from whet.tokenizer.traced_strings import TracingEnvironment

_MAX_SECONDS = 5.0
"""To compile a template, or to render one conversation; either takes milliseconds."""
_MAX_CHARACTERS, _MAX_GROWTH = 2**22, 16
"""A rendered text may have 4 million characters, or 16 times as many as its messages and tools."""


def template_limits() -> limited:
    """For whatever runs a chat template, a foreign program: an error if it takes too much time or memory."""
    return limited(_MAX_SECONDS, _unusable_template)


def _unusable_template(reason: str) -> WhetError:
    return WhetError(
        f"the chat template is not usable: {reason}. Use the model's original template, or another one: "
        "data.template=FILE.jinja"
    )


def template_refusal(error: Exception) -> BadRecordError:
    """The error of a chat template: of raise_exception, or its own."""
    if type(error) is TemplateError:
        return BadRecordError("template refuses", f"the chat template refuses it: {error}")
    explanation = f"the chat template fails: {error}. If the record is right, correct a copy of the template"
    return BadRecordError("template refuses", f"{explanation}: data.template=COPY.jinja")


def check_rendered_length(text: str, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]) -> str:
    """`text`, unless a template made it of almost nothing: encoding it would take minutes and fill the memory."""
    if len(text) > _MAX_CHARACTERS and len(text) > _MAX_GROWTH * len(repr((messages, tools))):
        raise _unusable_template(f"it turns a short conversation into {len(text):,} characters")
    return text


class _GenerationTag(Extension):
    """`{% generation %}…{% endgeneration %}` marks the assistant's text; whet computes masks without it."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        # a scope, as in transformers: what is set inside is not set behind it
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _refuse_computed_date(*_: Any, **__: Any) -> NoReturn:
    raise TemplateError(
        "the format of its date is not written in the call, so the date cannot be fixed. Write it there, such as "
        "strftime_now('%d %b %Y'): data.template=COPY.jinja"
    )


def _tojson(
    value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: Any = None, sort_keys: bool = False
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


@pass_environment
def _sum(environment: Environment, values: Iterable[Any], attribute: str | int | None = None, start: Any = 0) -> Any:
    """Jinja's `sum` as a loop in Python, which a time limit can end: adding up lists takes quadratic time."""
    total, read = start, None if attribute is None else make_attrgetter(environment, attribute)
    for value in values:
        total = total + (value if read is None else read(value))
    return total


def _make_environment(
    kind: type[ImmutableSandboxedEnvironment] = ImmutableSandboxedEnvironment,
) -> ImmutableSandboxedEnvironment:
    environment = kind(trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols])
    environment.filters["tojson"] = _tojson
    environment.filters["sum"] = _sum
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _refuse_computed_date  # calls with a constant are replaced by the date
    return environment


@lru_cache(maxsize=256)
def _compile(source: str) -> tuple[nodes.Template, Template]:
    """A template's tree and its compiled form. Compiling takes up to 100 ms, and one template is used by many."""
    environment = _make_environment()
    return environment.parse(source), environment.from_string(source)


@lru_cache(maxsize=256)
def _compile_tracing(source: str) -> Template:
    environment = _make_environment(TracingEnvironment)
    assert isinstance(environment, TracingEnvironment)
    environment.guard_filters()
    return environment.from_string(source)


class ChatTemplate:
    """A template with the special tokens and the date that it may use."""

    def __init__(self, source: str, special: Mapping[str, str], today: str | None = None) -> None:
        self.today = (today or datetime.date.today().isoformat()) if _STRFTIME_CALL.search(source) else None
        try:
            with template_limits():
                self.source = _with_fixed_date(source, self.today) if self.today else source
                self._tree, self._compiled = _compile(self.source)
        except (
            TemplateError,
            SyntaxError,
            ValueError,
            RecursionError,
        ) as error:  # all but the first: Python's compiler
            raise WhetError(
                f"the chat template is not valid Jinja: {error}. Fix it, or give another one: data.template=FILE.jinja"
            ) from None
        self._special = dict(special)

    def render(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] = (), prompt: bool = False
    ) -> str:
        """The rendered messages; with `prompt`, followed by the generation prompt."""
        return check_rendered_length(self._render(self._compiled, messages, tools, prompt), messages, tools)

    def render_traced(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] = (), prompt: bool = False
    ) -> str:
        """Like `render`, for traced strings (`whet.tokenizer.traced_strings`)."""
        with template_limits():
            compiled = _compile_tracing(self.source)
        return self._render(compiled, messages, tools, prompt)

    def _render(
        self,
        template: Template,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]],
        prompt: bool,
    ) -> str:
        try:
            with template_limits():
                return template.render(
                    messages=messages,
                    tools=tools or None,
                    documents=None,
                    add_generation_prompt=prompt,
                    **self._special,
                )
        except WhetError:
            raise
        except Exception as error:  # a template is a foreign program: it can fail in any way
            raise template_refusal(error) from None

    def constants(self) -> tuple[str, ...]:
        """Every string that the template compares with or searches for, such as `</think>`, or names in a variable."""
        with template_limits():
            named = [assign.node for assign in self._tree.find_all(nodes.Assign)]
            looped = [loop.iter for loop in self._tree.find_all(nodes.For)]
            places: list[nodes.Node] = [value for value in (*named, *looped) if isinstance(value, nodes.Literal)]
            for kind in (nodes.Compare, nodes.Call, nodes.Filter, nodes.Test):
                places += self._tree.find_all(kind)
            constants = (each for place in places for each in (place, *place.find_all(nodes.Const)))
            found = {each.value for each in constants if isinstance(each, nodes.Const) and isinstance(each.value, str)}
        return tuple(sorted(constant for constant in found if constant.strip()))


_STRFTIME_CALL = re.compile(r"""strftime_now\(\s*(?:format\s*=\s*)?(?P<quote>['"])(?P<format>[^'"]*)(?P=quote)\s*\)""")


def _with_fixed_date(template: str, today: str) -> str:
    """The template with calls of strftime_now replaced by a fixed date, so that a resumed run renders the same text."""
    date = datetime.datetime.fromisoformat(today)
    return _STRFTIME_CALL.sub(lambda call: f"'{date.strftime(call['format'])}'", template)
