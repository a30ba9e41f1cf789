"""The `where` of a source: an expression over a record's fields, parsed by `ast` and never executed as Python.

Names are fields of the record; `meta.lang` and `meta["lang"]` are nested fields. `record` is the whole record, `turns`
the number of messages, `characters` the length of their texts. Supported are literals, lists, comparisons, `and`, `or`,
`not`, `in`, `+ - * / // %` on numbers, `+` on strings, `len(x)` and `lower(x)`. A record without a field that the
expression reads is a bad record: a misspelled name would otherwise keep or drop everything. For optional fields, write
`"lang" in record and lang == "de"`.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Mapping
from typing import Any

from whet.core.errors import BadRecordError, WhetError
from whet.data.read.record_fields import closest_key, describe_type, shorten

_MAX_CHARACTERS = 2000
_COMPUTED_NAMES = ("turns", "characters")

Variables = Mapping[str, Any]
Expression = Callable[[Variables], Any]

_COMPARISONS: dict[type[ast.cmpop], Callable[[Any, Any], bool]] = {
    ast.Eq: operator.eq, ast.NotEq: operator.ne, ast.Lt: operator.lt, ast.LtE: operator.le, ast.Gt: operator.gt,
    ast.GtE: operator.ge, ast.In: lambda a, b: a in b, ast.NotIn: lambda a, b: a not in b,
    ast.Is: lambda a, b: a is b, ast.IsNot: lambda a, b: a is not b,
}  # fmt: skip
_ARITHMETIC: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv, ast.Mod: operator.mod,
}  # fmt: skip
_FUNCTIONS: dict[str, Callable[[Any], Any]] = {"len": len, "lower": str.lower}


class RecordFilter:
    """A compiled filter; errors in the expression are raised by the constructor."""

    def __init__(self, text: str) -> None:
        self._text = text
        self.needs_parsed_record = False
        """Whether it reads turns or characters, so that the record must be parsed first."""
        if len(text) > _MAX_CHARACTERS:
            raise WhetError(f"data.sources: where: longer than {_MAX_CHARACTERS} characters; filter the file instead")
        try:
            self._predicate = self._compile(ast.parse(text.replace("\n", " ").strip(), mode="eval").body)
        except SyntaxError as error:
            raise self._error(f"{error.msg} at column {error.offset or len(text) + 1}") from None
        except (ValueError, RecursionError, MemoryError) as error:
            raise self._error(str(error) or "too deeply nested") from None

    def __call__(self, record: Any, turns: int = 0, characters: int = 0) -> bool:
        """Whether to keep a record; raises BadRecordError if the expression cannot be evaluated on it."""
        values = {**record} if isinstance(record, dict) else {}
        try:
            return bool(self._predicate({**values, "record": record, "turns": turns, "characters": characters}))
        except (TypeError, ValueError, ArithmeticError, IndexError) as error:
            raise BadRecordError("where", f"where: {self._text} cannot be evaluated: {error}") from None

    def _error(self, fault: str) -> WhetError:
        return WhetError(
            f"data.sources: where: {self._text!r}: {fault}. Write, for example: turns <= 6 and lang == 'de'"
        )

    def _unsupported(self, node: ast.expr | ast.keyword, what: str) -> WhetError:
        return self._error(f"{what} at column {node.col_offset + 1} is not supported in a filter")

    def _compile(self, node: ast.expr) -> Expression:
        match node:
            case ast.Constant(value=str() | int() | float() | bool() | None):
                return lambda _, value=node.value: value  # type: ignore[misc]
            case ast.Name(id=name):
                return self._name(name)
            case ast.Attribute(value=inner, attr=name):
                return self._lookup(inner, lambda _: name)
            case ast.Subscript(value=inner, slice=index):
                return self._lookup(inner, self._compile(index))
            case ast.List(elts=items) | ast.Tuple(elts=items):
                terms = [self._compile(item) for item in items]
                return lambda values: [term(values) for term in terms]
            case ast.BoolOp(op=op, values=parts):
                terms, how = [self._compile(part) for part in parts], all if isinstance(op, ast.And) else any
                return lambda values: how(term(values) for term in terms)
            case ast.UnaryOp(op=ast.Not(), operand=operand):
                inner_term = self._compile(operand)
                return lambda values: not inner_term(values)
            case ast.UnaryOp(op=ast.USub(), operand=operand):
                inner_term = self._compile(operand)
                return lambda values: -_require_number(inner_term(values))
            case ast.BinOp(left=left, op=op, right=right) if type(op) in _ARITHMETIC:
                return _binary_operation(type(op), self._compile(left), self._compile(right))
            case ast.Compare():
                return self._comparison(node)
            case ast.Call(func=ast.Name(id=name), args=[argument], keywords=[]) if name in _FUNCTIONS:
                function, inner_term = _FUNCTIONS[name], self._compile(argument)
                return lambda values: function(inner_term(values))
            case ast.Call(func=ast.Name(id=name)):
                raise self._unsupported(node, f"{name}(…)")
            case _:
                raise self._unsupported(node, shorten(ast.unparse(node)))

    def _name(self, name: str) -> Expression:
        self.needs_parsed_record = self.needs_parsed_record or name in _COMPUTED_NAMES

        def value(values: Variables) -> Any:
            if name not in values:
                raise _missing_field(name, "record", values["record"])
            return values[name]

        return value

    def _lookup(self, inner: ast.expr, index: Expression) -> Expression:
        outer = self._compile(inner)

        def value(values: Variables) -> Any:
            whole, key = outer(values), index(values)
            if isinstance(whole, dict):
                if key not in whole:
                    raise _missing_field(key, ast.unparse(inner), whole)
                return whole[key]
            if isinstance(whole, list) and isinstance(key, int):
                return whole[key]
            raise TypeError(f"{ast.unparse(inner)} is {describe_type(whole)} and has no {shorten(key)}")

        return value

    def _comparison(self, node: ast.Compare) -> Expression:
        first, others = self._compile(node.left), [self._compile(other) for other in node.comparators]
        compare = [_COMPARISONS[type(op)] for op in node.ops]

        def compare_all(values: Variables) -> bool:
            left = first(values)
            for how, other in zip(compare, others, strict=True):
                right = other(values)
                if not how(left, right):
                    return False
                left = right
            return True

        return compare_all


def _missing_field(name: Any, whole: str, value: Any) -> BadRecordError:
    near = closest_key([str(name)], value) if isinstance(value, dict) else None
    hint = "" if near is None else f" Did you mean {near}?"
    return BadRecordError(
        "where",
        f"where: the record has no field {shorten(name)}.{hint} If it is optional, write: {name!r} in {whole} and …",
    )


def _require_number(value: Any) -> Any:
    if not isinstance(value, (int, float)):
        raise TypeError(f"{shorten(value)} is {describe_type(value)}, not a number")
    return value


def _binary_operation(op: type[ast.operator], left: Expression, right: Expression) -> Expression:
    """Arithmetic on numbers, and `+` on strings; `%` and `*` on strings could fill the memory."""

    def value(values: Variables) -> Any:
        a, b = left(values), right(values)
        if op is ast.Add and isinstance(a, str) and isinstance(b, str):
            return a + b
        return _ARITHMETIC[op](_require_number(a), _require_number(b))

    return value
