"""The calculator tool: an expression parser, and the code that inserts its results into an answer during generation."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from fractions import Fraction
from typing import Any, Protocol

from whet.core.errors import BadRecordError, WhetError
from whet.data.calculator import CALCULATOR_SCHEMA
from whet.data.render.renderer import Renderer

# A pocket calculator for expressions that a model writes: a parser of its own, so that no text is ever run as code.
#
# sum      = product { (+ | -) product }
# product  = signed { (* | / | //) signed }
# signed   = { + | - } atom
# atom     = number | ( sum )
# count    = "text" . count ( "text" )                also in single quotes; alone, not inside a sum
#
# Numbers are exact fractions. Commas between digits are left out, × ÷ − are read as * / -.

_MAX_CHARACTERS = 256
"""Characters: what is longer is no sum that anybody asked for."""
_MAX_DEPTH = 32
_MAX_DECIMALS = 12
_TOKEN_PATTERN = re.compile(r"\s*(\d+\.\d*|\.\d+|\d+|//|[-+*/()])")
_COUNT_PATTERN = re.compile(r"""\s*(?:"([^"]*)"|'([^']*)')\s*\.\s*count\s*\(\s*(?:"([^"]*)"|'([^']*)')\s*\)\s*""")
_OPERATOR_ALIASES = str.maketrans({"×": "*", "÷": "/", "−": "-", ",": None})


class _InvalidExpression(Exception):  # noqa: N818
    """The text is not an expression."""


def calculate(expression: str) -> str | None:
    """The value as a person would write it, rounded to 12 digits if it has no end; None where there is none."""
    if len(expression) > _MAX_CHARACTERS:
        return None
    counted = _COUNT_PATTERN.fullmatch(expression)
    if counted is not None:
        double, single, wanted, other = counted.groups()
        return str((single if double is None else double).count(other if wanted is None else wanted))
    try:
        parts = _tokenize_expression(expression.translate(_OPERATOR_ALIASES))
        value = _parse_sum(parts, 0)
        return None if parts else _format_number(value)
    except (_InvalidExpression, ZeroDivisionError):
        return None


def _tokenize_expression(text: str) -> list[str]:
    """Numbers and signs, the last first."""
    parts, at, text = [], 0, text.rstrip()
    while at < len(text):
        found = _TOKEN_PATTERN.match(text, at)
        if found is None:
            raise _InvalidExpression
        parts.append(found.group(1))
        at = found.end()
    return parts[::-1]


def _parse_sum(parts: list[str], depth: int) -> Fraction:
    value = _parse_product(parts, depth)
    while parts and parts[-1] in ("+", "-"):
        sign = parts.pop()
        other = _parse_product(parts, depth)
        value = value + other if sign == "+" else value - other
    return value


def _parse_product(parts: list[str], depth: int) -> Fraction:
    value = _parse_signed(parts, depth)
    while parts and parts[-1] in ("*", "/", "//"):
        sign = parts.pop()
        other = _parse_signed(parts, depth)
        value = value * other if sign == "*" else value / other if sign == "/" else Fraction(value // other)
    return value


def _parse_signed(parts: list[str], depth: int) -> Fraction:
    negative = False
    while parts and parts[-1] in ("+", "-"):
        negative ^= parts.pop() == "-"
    value = _parse_atom(parts, depth)
    return -value if negative else value


def _parse_atom(parts: list[str], depth: int) -> Fraction:
    if not parts or depth > _MAX_DEPTH:
        raise _InvalidExpression
    part = parts.pop()
    if part == "(":
        value = _parse_sum(parts, depth + 1)
        if not parts or parts.pop() != ")":
            raise _InvalidExpression
        return value
    if part in ("+", "-", "*", "/", "//", ")"):
        raise _InvalidExpression
    return Fraction(part)


def _format_number(value: Fraction) -> str:
    if value.denominator == 1:
        return str(value.numerator)
    rounded = round(value, _MAX_DECIMALS)
    whole, rest = divmod(abs(rounded.numerator) * 10**_MAX_DECIMALS // rounded.denominator, 10**_MAX_DECIMALS)
    digits = f"{rest:0{_MAX_DECIMALS}}".rstrip("0")
    return f"{'-' if rounded < 0 else ''}{whole}{'.' if digits else ''}{digits}"


# Tools that a model uses in the middle of an answer: what they say is put into it, token by token.


class ToolState(Protocol):
    """Sees one answer grow."""

    def see(self, token: int) -> Sequence[int]:
        """Told of every token, its own ones too; gives the tokens that must follow now, or none. Where it gives some,
        a token that would end the answer does not."""


class Tool(Protocol):
    """What `generate(..., tools=...)` takes."""

    def watch(self) -> ToolState:
        """A watcher for a new answer."""

    def said(self, answer: Sequence[int]) -> Sequence[int]:
        """Of a whole answer what is said to the user, calls and results aside."""


CALCULATOR_TOKENS = ("<|python_start|>", "<|python_end|>", "<|output_start|>", "<|output_end|>")
"""nanochat's: an expression between the first two, its value between the last two."""


def has_calculator_tokens(renderer: Renderer) -> bool:
    """Whether the calculator can be called without being offered first."""
    vocabulary = renderer.tokenizer.get_vocab()
    return all(name in vocabulary for name in CALCULATOR_TOKENS)


def make_calculator(renderer: Renderer) -> Tool:
    """The calculator as this model calls it: between markers, if its tokenizer has them, else by its chat template."""
    return InlineCalculator(renderer) if has_calculator_tokens(renderer) else FunctionCallCalculator(renderer)


def tool_schemas(calculator: Tool | None) -> list[dict[str, Any]]:
    """What a prompt says of it."""
    return [CALCULATOR_SCHEMA] if isinstance(calculator, FunctionCallCalculator) else []


class InlineCalculator:
    """Sums between markers are worked out where they stand: … <|python_start|>48/2<|python_end|> is followed by
    <|output_start|>24<|output_end|>. What cannot be worked out is followed by nothing."""

    def __init__(self, renderer: Renderer, markers: Sequence[str] = CALCULATOR_TOKENS) -> None:
        self.tokenizer = renderer.tokenizer
        vocabulary = self.tokenizer.get_vocab()
        missing = [name for name in markers if name not in vocabulary]
        if missing:
            raise WhetError(
                f"calculator: the tokenizer has no token {missing[0]}, so the model cannot call it this way"
            )
        self.open, self.close, self.output, self.end = (vocabulary[name] for name in markers)

    def watch(self) -> ToolState:
        return _InlineCalculatorState(self)

    def said(self, answer: Sequence[int]) -> Sequence[int]:
        return answer  # sums stand in the middle of it, as the model was taught to write them


class _InlineCalculatorState:
    def __init__(self, calculator: InlineCalculator) -> None:
        self._calculator = calculator
        self._expression: list[int] | None = None

    def see(self, token: int) -> Sequence[int]:
        its = self._calculator
        if token == its.open:
            self._expression = []
        elif self._expression is not None and token == its.close:
            result = calculate(its.tokenizer.decode(self._expression))
            self._expression = None
            if result is not None:
                return [its.output, *its.tokenizer.encode(result, add_special_tokens=False), its.end]
        elif self._expression is not None:
            self._expression.append(token)
        return ()


_RESULT_SENTINEL = "\N{SNOWMAN}7319\N{SNOWMAN}"
"""Stands for a result while the template is asked what comes around it."""


class FunctionCallCalculator:
    """Calls as the chat template writes them: at the end of a turn that calls the calculator, the tool's turn and the
    beginning of the next one are put into the answer, so that the model goes on. Prompts are rendered with
    `tools=[SCHEMA]`."""

    def __init__(self, renderer: Renderer) -> None:
        self.tokenizer = renderer.tokenizer
        self.backend = renderer.tokenizer.backend_tokenizer
        end = renderer.end_of_turn()
        call = {"name": "calculator", "arguments": {"expression": "31+52"}}
        said: list[dict[str, Any]] = [
            {"role": "user", "content": "Hi"},
            {
                "role": "assistant",
                "content": "",
                "tool_calls": [{"id": "call00001", "type": "function", "function": call}],
            },
            {"role": "tool", "content": _RESULT_SENTINEL, "tool_call_id": "call00001", "name": "calculator"},
        ]
        try:
            text = renderer.apply_chat_template(said, add_generation_prompt=True, tools=[CALCULATOR_SCHEMA])
        except BadRecordError as error:
            raise WhetError(f"calculator: the model's chat template has no place for it: {error}") from None
        at, answered = text.rfind("31+52"), text.rfind(_RESULT_SENTINEL)
        marker = None if end is None else self.tokenizer.convert_ids_to_tokens(end)
        closed = -1 if marker is None else text.find(marker, at, answered)
        if at < 0 or answered < at or closed < 0:
            raise WhetError(
                "calculator: the model's chat template does not write calls, results, and an end of turn between them, "
                "so the model cannot call it. Ask it without --calculator"
            )
        assert end is not None
        self.end = end
        self.before, self.after = text[closed + len(str(marker)) : answered], text[answered + len(_RESULT_SENTINEL) :]

    def watch(self) -> ToolState:
        return _FunctionCallState(self)

    def said(self, answer: Sequence[int]) -> Sequence[int]:
        """Its last turn."""
        opening = self.backend.encode(self.after, add_special_tokens=False).ids
        starts = range(len(answer) - len(opening), -1, -1)
        at = next((i for i in starts if list(answer[i : i + len(opening)]) == opening), None)
        return answer if at is None else answer[at + len(opening) :]


class _FunctionCallState:
    def __init__(self, calculator: FunctionCallCalculator) -> None:
        self._calculator = calculator
        self._turn: list[int] = []
        self._own = 0

    def see(self, token: int) -> Sequence[int]:
        if self._own:  # a token that was put there
            self._own -= 1
            return ()
        its = self._calculator
        if token != its.end:
            self._turn.append(token)
            return ()
        expression = parse_calculator_call(its.tokenizer.decode(self._turn))
        self._turn = []
        if expression is None:
            return ()
        result = calculate(expression) or "error: not a sum"
        ids = its.backend.encode(f"{its.before}{result}{its.after}", add_special_tokens=False).ids
        self._own = len(ids)
        return list(ids)


def parse_calculator_call(text: str) -> str | None:
    """What a turn asks the calculator: of the last JSON object in it that names it."""
    found = None
    decoder = json.JSONDecoder()
    at = text.find("{")
    while at >= 0:
        try:
            value, end = decoder.raw_decode(text, at)
        except ValueError:
            at = text.find("{", at + 1)
            continue
        asked = _expression_argument(value)
        found = asked if asked is not None else found
        at = text.find("{", end)
    return found


def _expression_argument(value: Any) -> str | None:
    if not isinstance(value, dict) or value.get("name") != "calculator":
        return None
    given = value.get("arguments", value.get("parameters"))
    expression = given.get("expression") if isinstance(given, dict) else None
    return expression if isinstance(expression, str) else None
