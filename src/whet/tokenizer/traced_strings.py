"""Strings that record what a chat template does with them.

The layout cache reuses a rendering for other texts, which is right only if the template treats them alike. A template
that prints a text, concatenates, strips and splits it and searches it for constants does the same for every text that
contains none of these constants and none of the stripped characters at its ends. `TracedStr` records the constants and
the stripped characters in `TraceGuards`, whose predicate tells for which other texts the rendering holds.

Every other operation that could distinguish texts (length, case, single characters, encodings) is refused. This is an
allow list: what is not known to be harmless raises `DataDependentError`. Operations are recorded as they happen, so it
does not matter how a template computes the constants that it searches for.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NoReturn, SupportsIndex

from jinja2 import nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

_MAX_SEARCHED = 1000
"""Characters of a constant: the guard holds all its prefixes and suffixes."""


class DataDependentError(Exception):
    """The template depends on a text in a way that has no guard, so its rendering must not be reused."""


class TraceGuards:
    """What a template did with the texts of a conversation, as conditions on other texts."""

    def __init__(self) -> None:
        self.is_data_dependent = False
        self.searched: set[str] = set()
        self.stripped: set[str] = set()

    def predicate(self) -> Callable[[str], bool]:
        """Whether the template treats a text the same: no searched constant is in it, overlaps its ends or contains it.

        Overlaps count because a template may search a text that it has concatenated with others.
        """
        constants = tuple(sorted(constant for constant in self.searched if constant))
        starts = (*sorted({constant[i:] for constant in constants for i in range(1, len(constant))} | self.stripped),)
        ends = (*sorted({constant[:i] for constant in constants for i in range(1, len(constant))} | self.stripped),)

        def is_safe(text: str) -> bool:
            return not (
                text[:1].isspace()
                or text[-1:].isspace()
                or text.startswith(starts)
                or text.endswith(ends)
                or any(constant in text or text in constant for constant in constants)
            )

        return is_safe


class TracedStr(str):
    """A string that records the constants it is compared with and searched for, and refuses unknown operations."""

    __slots__ = ("_guards",)
    _guards: TraceGuards

    def __new__(cls, text: str, guards: TraceGuards) -> TracedStr:
        traced = str.__new__(cls, text)
        traced._guards = guards
        return traced

    def _derive(self, text: str) -> TracedStr:
        return TracedStr(text, self._guards)

    def _record(self, constant: Any) -> None:
        if constant is self:
            return
        if isinstance(constant, TracedStr) or (isinstance(constant, str) and len(constant) > _MAX_SEARCHED):
            _refuse(self)
        if isinstance(constant, str):
            self._guards.searched.add(constant)

    def __str__(self) -> str:
        return self

    def __bool__(self) -> bool:
        return str.__len__(self) > 0

    def __iter__(self) -> Iterator[str]:  # being iterable reveals nothing; iterating does
        return map(_refuse, (self,))

    def __getitem__(self, key: Any) -> NoReturn:
        if isinstance(key, str):
            raise TypeError("string indices must be integers")
        _refuse(self)

    def __add__(self, other: str) -> TracedStr:
        return self._derive(str.__add__(self, other))

    def __radd__(self, other: str) -> TracedStr:
        return self._derive(str.__add__(other, self))

    def __eq__(self, other: object) -> bool:
        self._record(other)
        return str.__eq__(self, other)

    def __ne__(self, other: object) -> bool:
        self._record(other)
        return str.__ne__(self, other)

    def __contains__(self, constant: str) -> bool:  # type: ignore[override]
        self._record(constant)
        return str.__contains__(self, constant)

    def startswith(self, constant: str | tuple[str, ...], *bounds: Any) -> bool:
        return self._test_edge(str.startswith, constant, bounds)

    def endswith(self, constant: str | tuple[str, ...], *bounds: Any) -> bool:
        return self._test_edge(str.endswith, constant, bounds)

    def _test_edge(self, test: Callable[..., bool], constant: str | tuple[str, ...], bounds: tuple[Any, ...]) -> bool:
        if bounds:
            _refuse(self)
        for each in constant if isinstance(constant, tuple) else (constant,):
            self._record(each)
        return test(self, constant)

    def removeprefix(self, constant: str) -> TracedStr:
        self._record(constant)
        return self._derive(str.removeprefix(self, constant))

    def removesuffix(self, constant: str) -> TracedStr:
        self._record(constant)
        return self._derive(str.removesuffix(self, constant))

    def strip(self, chars: str | None = None) -> TracedStr:
        return self._stripped(str.strip, chars)

    def lstrip(self, chars: str | None = None) -> TracedStr:
        return self._stripped(str.lstrip, chars)

    def rstrip(self, chars: str | None = None) -> TracedStr:
        return self._stripped(str.rstrip, chars)

    def _stripped(self, strip: Callable[..., str], chars: str | None) -> TracedStr:
        if isinstance(chars, TracedStr):
            _refuse(self)
        self._guards.stripped.update(chars or "")
        return self._derive(strip(self, chars))

    def replace(self, old: str, new: str, count: SupportsIndex = -1) -> TracedStr:
        self._record(old)
        if old == "":  # matches between all characters
            _refuse(self)
        return self._derive(str.replace(self, old, new, count))

    def split(self, sep: str | None = None, maxsplit: SupportsIndex = -1) -> list[str]:
        if sep is None:
            _refuse(self)
        self._record(sep)
        return [self._derive(part) for part in str.split(self, sep, maxsplit)]


def _refuse(text: TracedStr, *_: Any, **__: Any) -> NoReturn:
    text._guards.is_data_dependent = True
    raise DataDependentError


_INHERITED_ATTRIBUTES = (
    "__class__",
    "__getattribute__",
    "__init__",
    "__setattr__",
    "__dir__",
    "__doc__",
    "__reduce_ex__",
)
for _name in sorted(set(dir(str)) - set(vars(TracedStr)) - set(_INHERITED_ATTRIBUTES)):
    setattr(TracedStr, _name, _refuse)
TracedStr.__hash__ = _refuse  # type: ignore[assignment, method-assign]
TracedStr.__rmod__ = _refuse  # type: ignore[attr-defined]


def _traced_in(value: Any) -> Iterator[TracedStr]:
    if isinstance(value, TracedStr):
        yield value
    elif isinstance(value, dict):
        yield from _traced_in(list(value.values()))
    elif isinstance(value, list | tuple):
        for part in value:
            yield from _traced_in(part)


def _refuse_traced_in(*values: Any) -> None:
    for text in _traced_in(values):
        _refuse(text)


def _concat_traced(parts: Iterable[str]) -> str:
    parts = list(parts)
    text = "".join(parts)
    return next((part._derive(text) for part in parts if isinstance(part, TracedStr)), text)


class _TracedLength:
    """The length of a traced string. Only whether it is 0 may be tested."""

    def __init__(self, text: TracedStr) -> None:
        self._text = text

    def __bool__(self) -> bool:
        return bool(self._text)

    def _is_empty(self, other: object) -> bool:
        if other != 0:
            _refuse(self._text)
        return not self._text

    def __eq__(self, other: object) -> bool:
        return self._is_empty(other)

    def __ne__(self, other: object) -> bool:
        return not self._is_empty(other)

    def __gt__(self, other: object) -> bool:
        return not self._is_empty(other)

    def _refuse_use(self, *_: object) -> NoReturn:
        _refuse(self._text)

    __hash__ = __str__ = __lt__ = __le__ = __ge__ = __int__ = __index__ = __getattr__ = _refuse_use
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __mod__ = __floordiv__ = __truediv__ = _refuse_use


def _traced_length(value: Any) -> Any:
    return _TracedLength(value) if isinstance(value, TracedStr) else len(value)


class _SearchedStr:
    """A plain string that records being searched for a traced one: `content in 'constant'`."""

    def __init__(self, text: str) -> None:
        self._text = text

    def __contains__(self, item: Any) -> bool:
        if isinstance(item, TracedStr):
            item._record(self._text)
        return item in self._text


def _searched(value: Any) -> Any:
    return _SearchedStr(value) if isinstance(value, str) and not isinstance(value, TracedStr) else value


class _TracingCodeGenerator(CodeGenerator):
    """Routes `~` and `in` through the environment, which keeps them traced."""

    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:  # noqa: N802
        self.write("environment.concat(map(str, (")
        for part in node.nodes:
            self.visit(part, frame)
            self.write(", ")
        self.write(")))")

    def visit_Operand(self, node: nodes.Operand, frame: Frame) -> None:  # noqa: N802
        if node.op not in ("in", "notin"):
            super().visit_Operand(node, frame)
            return
        self.write(" in environment.searched(" if node.op == "in" else " not in environment.searched(")
        self.visit(node.expr, frame)
        self.write(")")


class TracingEnvironment(ImmutableSandboxedEnvironment):
    """Jinja whose filters, tests and calls accept a traced string only if they are known to keep it traced."""

    code_generator_class = _TracingCodeGenerator
    intercepted_binops = frozenset({"%"})
    concat = staticmethod(_concat_traced)
    searched = staticmethod(_searched)

    def guard_filters(self) -> None:
        """Guard all filters and tests registered so far."""
        for name, function in self.filters.items():
            if name not in _PASS_THROUGH_FILTERS:
                self.filters[name] = _reject_traced_arguments(function, name in _METHOD_FILTERS)
        self.filters |= {
            "join": _join_traced,
            "length": _traced_length,
            "count": _traced_length,
            **dict.fromkeys(_MARKUP_FILTERS, _refuse_markup),
        }
        self.tests["in"] = lambda value, values: value in _searched(values)
        is_sequence = self.tests["sequence"]
        self.tests["sequence"] = lambda value: isinstance(value, str) or is_sequence(value)
        self.tests["sameas"] = _reject_traced_arguments(self.tests["sameas"], False)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        _refuse_traced_in(left, right)
        return super().call_binop(context, operator, left, right)

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805
        owner = getattr(__obj, "__self__", None)
        if isinstance(owner, str) and not isinstance(owner, TracedStr):
            if getattr(__obj, "__name__", "") == "join" and len(args) == 1:
                return _join_traced(args[0], owner)
            own = ("_loop_vars", "_block_vars")  # Jinja adds these to every call
            _refuse_traced_in(args, [value for name, value in kwargs.items() if name not in own])
        return super().call(__context, __obj, *args, **kwargs)


_PASS_THROUGH_FILTERS = (
    "attr", "batch", "count", "d", "default", "dictsort", "first", "groupby", "items", "last", "length", "list", "map",
    "max", "min", "reject", "rejectattr", "reverse", "select", "selectattr", "slice", "sort", "string", "unique",
)  # fmt: skip
"""Filters that pass values through or use only their methods, which record."""

_MARKUP_FILTERS = ("e", "escape", "forceescape", "safe", "urlize", "xmlattr")
"""Filters that return Markup, which escapes every string concatenated to it and compares without recording."""

_METHOD_FILTERS = ("trim", "replace")
"""Filters that call the string method of the same name, which records."""


def _refuse_markup(*_: Any, **__: Any) -> NoReturn:
    raise DataDependentError


def _reject_traced_arguments(function: Callable[..., Any], keeps_first: bool) -> Callable[..., Any]:
    """Refuse traced strings as arguments; with `keeps_first`, the filtered value itself may be one."""
    first = 1 + hasattr(function, "jinja_pass_arg") if keeps_first else 0

    @functools.wraps(function)
    def guarded(*args: Any, **kwargs: Any) -> Any:
        _refuse_traced_in(args[first:], kwargs)
        return function(*args, **kwargs)

    return guarded


def _join_traced(values: Iterable[Any], separator: str = "", attribute: Any = None) -> str:
    if attribute is not None:
        raise DataDependentError
    parts = list(values)
    return _concat_traced(
        str(part) for i, value in enumerate(parts) for part in ((separator, value) if i else (value,))
    )
