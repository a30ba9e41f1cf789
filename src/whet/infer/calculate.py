"""A pocket calculator for expressions that a model writes: a parser of its own, so that no text is ever run as code.

    sum      = product { (+ | -) product }
    product  = signed { (* | / | //) signed }
    signed   = { + | - } atom
    atom     = number | ( sum )
    count    = "text" . count ( "text" )                also in single quotes; alone, not inside a sum

Numbers are exact fractions. Commas between digits are left out, × ÷ − are read as * / -.
"""

from __future__ import annotations

import re
from fractions import Fraction

_LONGEST = 256
"""Characters: what is longer is no sum that anybody asked for."""
_DEEPEST = 32
_DIGITS = 12
_TOKEN = re.compile(r"\s*(\d+\.\d*|\.\d+|\d+|//|[-+*/()])")
_COUNT = re.compile(r"""\s*(?:"([^"]*)"|'([^']*)')\s*\.\s*count\s*\(\s*(?:"([^"]*)"|'([^']*)')\s*\)\s*""")
_SIGNS = str.maketrans({"×": "*", "÷": "/", "−": "-", ",": None})


class _NoSum(Exception):  # noqa: N818
    """The text is not an expression."""


def calculate(expression: str) -> str | None:
    """The value as a person would write it, rounded to 12 digits if it has no end; None where there is none."""
    if len(expression) > _LONGEST:
        return None
    counted = _COUNT.fullmatch(expression)
    if counted is not None:
        double, single, wanted, other = counted.groups()
        return str((single if double is None else double).count(other if wanted is None else wanted))
    try:
        parts = _parts(expression.translate(_SIGNS))
        value = _sum(parts, 0)
        return None if parts else _written(value)
    except (_NoSum, ZeroDivisionError):
        return None


def _parts(text: str) -> list[str]:
    """Numbers and signs, the last first."""
    parts, at, text = [], 0, text.rstrip()
    while at < len(text):
        found = _TOKEN.match(text, at)
        if found is None:
            raise _NoSum
        parts.append(found.group(1))
        at = found.end()
    return parts[::-1]


def _sum(parts: list[str], depth: int) -> Fraction:
    value = _product(parts, depth)
    while parts and parts[-1] in ("+", "-"):
        sign = parts.pop()
        other = _product(parts, depth)
        value = value + other if sign == "+" else value - other
    return value


def _product(parts: list[str], depth: int) -> Fraction:
    value = _signed(parts, depth)
    while parts and parts[-1] in ("*", "/", "//"):
        sign = parts.pop()
        other = _signed(parts, depth)
        value = value * other if sign == "*" else value / other if sign == "/" else Fraction(value // other)
    return value


def _signed(parts: list[str], depth: int) -> Fraction:
    negative = False
    while parts and parts[-1] in ("+", "-"):
        negative ^= parts.pop() == "-"
    value = _atom(parts, depth)
    return -value if negative else value


def _atom(parts: list[str], depth: int) -> Fraction:
    if not parts or depth > _DEEPEST:
        raise _NoSum
    part = parts.pop()
    if part == "(":
        value = _sum(parts, depth + 1)
        if not parts or parts.pop() != ")":
            raise _NoSum
        return value
    if part in ("+", "-", "*", "/", "//", ")"):
        raise _NoSum
    return Fraction(part)


def _written(value: Fraction) -> str:
    if value.denominator == 1:
        return str(value.numerator)
    rounded = round(value, _DIGITS)
    whole, rest = divmod(abs(rounded.numerator) * 10**_DIGITS // rounded.denominator, 10**_DIGITS)
    digits = f"{rest:0{_DIGITS}}".rstrip("0")
    return f"{'-' if rounded < 0 else ''}{whole}{'.' if digits else ''}{digits}"
