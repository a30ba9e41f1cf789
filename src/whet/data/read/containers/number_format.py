"""Numbers as a spreadsheet shows them: 0.25 in the format `0%` is 25%."""

from __future__ import annotations

import re
from decimal import ROUND_HALF_UP, Decimal

_TOKEN = re.compile(
    r"""(?P<literal>"[^"]*"|\\.)|(?P<space>_.|\*.|\[(?:black|blue|cyan|green|magenta|red|white|yellow|color\s*\d+)\])"""
    r"""|\[\$(?P<currency>[^\]-]*)[^\]]*\]|(?P<digits>[0\#?][0\#?,]*(?:\.[0\#?]*)?|\.[0\#?]+|general)(?P<scale>,*)"""
    r"""|(?P<other>[^A-Za-z\[\]"\\@*_\#?0.,;/])""",
    re.IGNORECASE,
)
_MOST_DIGITS = 15
"""More are rounding errors of binary floats, which a spreadsheet does not show."""
_SECTION = re.compile(r'((?:"[^"]*"|\\.|[^;"\\])*)(?:;|\Z)')


def format_number(value: float, code: str) -> str:
    """The text of a number in a cell with this format; formats that are not known (fractions, exponents, conditions)
    count as General. Decimal point and thousands separator are those of the format: the point and the comma."""
    if code in ("General", "@") or abs(value) >= 10**_MOST_DIGITS:
        return _format_general(value)
    sections = [found[1] for found in _SECTION.finditer(code)][:4]
    own = 1 if value < 0 else 2 if value == 0 else 0  # positive; negative; zero
    number = own if own < len(sections) and sections[own] else 0
    text = _fill(abs(value), sections[number])
    if not text:  # `;;;` hides it
        return _format_general(value)
    is_negative = value < 0 and number == 0 and any(digit in "123456789" for digit in text)
    return ("-" if is_negative else "") + text.strip()


def _format_general(value: float) -> str:
    return str(int(value)) if float(value).is_integer() else format(value, f".{_MOST_DIGITS}g")


def _fill(value: float, section: str) -> str | None:
    """A section of a format, filled with a number; None if it is not known."""
    tokens, place = list[re.Match[str]](), 0
    while place < len(section):
        token = _TOKEN.match(section, place)
        if token is None:
            return None
        tokens.append(token)
        place = token.end()
    if sum(token["digits"] is not None for token in tokens) > 1:
        return None
    percent = sum(token["other"] == "%" for token in tokens)
    texts = []
    for token in tokens:
        if token["digits"] is not None:
            exact = Decimal(repr(value)).scaleb(2 * percent - 3 * len(token["scale"]))
            texts.append(_fill_digits(exact, token["digits"]))
        else:
            literal = token["literal"] or ""
            texts.append(literal.strip('"') if literal[:1] == '"' else literal[1:])
            texts.append(token["currency"] or token["other"] or "")
    return "".join(texts)


def _fill_digits(value: Decimal, pattern: str) -> str:
    """`#,##0.0#`: 0 is a digit that is always shown, # and ? only if it is needed."""
    if pattern.lower() == "general":
        return _format_general(float(value))
    whole, point, fraction = pattern.partition(".")
    scale = len(whole) - len(whole.rstrip(","))
    rounded = value.scaleb(-3 * scale).quantize(Decimal(1).scaleb(-len(fraction)), ROUND_HALF_UP)
    digits, _, decimals = f"{rounded:f}".partition(".")
    shown = fraction.rfind("0") + 1
    decimals = decimals[:shown] + decimals[shown:].rstrip("0")
    digits = digits.lstrip("0").rjust(whole.count("0"), "0")
    if "," in whole.rstrip(","):
        digits = re.sub(r"(?<=\d)(?=(?:\d{3})+$)", ",", digits)
    return digits + (point if decimals or not fraction else "") + decimals
