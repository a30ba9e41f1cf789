"""The calculator tool: an expression parser, and the code that inserts its results into a completion."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from fractions import Fraction
from typing import Any, Protocol

from whet.core.errors import BadRecordError, WhetError
from whet.data.conversation import CALCULATOR_SCHEMA, CalculatorStep, Message, calculator_messages
from whet.data.render.renderer import Renderer
from whet.data.render.template_text import Tools
from whet.tokenizer.named_templates import INLINE_CALL_TOKENS

# The parser of expressions that a model writes. It evaluates them itself; no text is ever executed as code.
#
# sum      = product { (+ | -) product }
# product  = signed { (* | / | //) signed }
# signed   = { + | - } atom
# atom     = number | ( sum )
# count    = "text" . count ( "text" )        also in single quotes; not inside a sum
#
# Numbers are exact fractions. Commas are ignored; × ÷ − mean * / -.

_MAX_CHARACTERS = 256  # of an expression; longer ones have no value
_MAX_DEPTH = 32
_MAX_DECIMALS = 12
_MAX_BRACES = 1000
"""Opening braces of a turn at which no JSON object starts; each may cost a scan of the whole turn."""
_TOKEN_PATTERN = re.compile(r"\s*(\d+\.\d*|\.\d+|\d+|//|[-+*/()])")
_COUNT_PATTERN = re.compile(r"""\s*(?:"([^"]*)"|'([^']*)')\s*\.\s*count\s*\(\s*(?:"([^"]*)"|'([^']*)')\s*\)\s*""")
_OPERATOR_ALIASES = str.maketrans({"×": "*", "÷": "/", "−": "-", ",": None})


class _InvalidExpression(Exception):  # noqa: N818
    """The text is not an expression."""


def calculate(expression: str) -> str | None:
    """The value in decimal notation, rounded to 12 decimals; None if the expression is invalid."""
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
    """Numbers and operators, in reverse order."""
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


# Tools that run during generation: the engine forces the tokens of their result into the completion.


class ToolState(Protocol):
    """A tool's view of one completion in progress."""

    def observe(self, token: int) -> Sequence[int]:
        """Called with every token of the completion, including those it inserted; returns the tokens to insert next.

        If it returns any, a stop token does not end the completion.
        """


class Tool(Protocol):
    """What `generate(..., tool=...)` accepts."""

    def new_state(self) -> ToolState:
        """The state for a new completion."""

    def visible_answer(self, ids: Sequence[int]) -> Sequence[int]:
        """The part of a completion that answers the user, without calls and results."""


def calls_inline(renderer: Renderer) -> bool:
    """Whether the model calls the calculator inside its turn, which needs no tool schema in the prompt: its tokenizer
    has the tokens, and its chat template has no other form for calls."""
    vocabulary = renderer.tokenizer.get_vocab()
    if not all(name in vocabulary for name in INLINE_CALL_TOKENS):
        return False
    return renderer.text.calls_inline or _probe_tool_form(renderer) is None


def make_calculator(renderer: Renderer) -> Tool:
    """The calculator as this model calls it."""
    return InlineCalculator(renderer) if calls_inline(renderer) else FunctionCallCalculator(renderer)


def with_tool_schema(tools: Tools, calculator: Tool | None) -> Tools:
    """The tools of a conversation for its prompt, and the calculator if the model calls it as a tool."""
    called = [CALCULATOR_SCHEMA] if isinstance(calculator, FunctionCallCalculator) else []
    return [*tools, *(schema for schema in called if schema not in tools)]


class InlineCalculator:
    """Evaluates expressions between special tokens: inserts <|output_start|>24<|output_end|> after
    <|python_start|>48/2<|python_end|>, and nothing after an invalid expression."""

    def __init__(self, renderer: Renderer) -> None:
        self.tokenizer = renderer.tokenizer
        vocabulary = self.tokenizer.get_vocab()
        missing = [name for name in INLINE_CALL_TOKENS if name not in vocabulary]
        if missing:
            raise WhetError(
                f"calculator: the tokenizer has no token {missing[0]}, so the model cannot call the calculator inline"
            )
        self.open, self.close, self.output, self.end = (vocabulary[name] for name in INLINE_CALL_TOKENS)

    def new_state(self) -> ToolState:
        return _InlineCalculatorState(self)

    def visible_answer(self, ids: Sequence[int]) -> Sequence[int]:
        return ids  # calculations are part of the text, as in training

    def split_reply(self, text: str, calls_before: int = 0) -> tuple[Message, ...]:
        """The messages of a reply in which calculations stand between the markers, as training data has them."""
        steps, at = [], 0
        for found in _INLINE_CALL.finditer(text):
            steps.append(CalculatorStep(text[at : found.start()], *found.groups()))
            at = found.end()
        return calculator_messages(steps, text[at:], calls_before)


_INLINE_CALL = re.compile("{}(.*?){}{}(.*?){}".format(*map(re.escape, INLINE_CALL_TOKENS)), re.DOTALL)


class _InlineCalculatorState:
    def __init__(self, calculator: InlineCalculator) -> None:
        self._calculator = calculator
        self._expression: list[int] | None = None

    def observe(self, token: int) -> Sequence[int]:
        calculator = self._calculator
        if token == calculator.open:
            self._expression = []
        elif self._expression is not None and token == calculator.close:
            result = calculate(calculator.tokenizer.decode(self._expression))
            self._expression = None
            if result is not None:
                return [
                    calculator.output,
                    *calculator.tokenizer.encode(result, add_special_tokens=False),
                    calculator.end,
                ]
        elif self._expression is not None:
            self._expression.append(token)
        return ()


_RESULT_SENTINEL = "\N{SNOWMAN}7319\N{SNOWMAN}"
"""Placeholder for a result, to find out what the chat template puts around one."""


def _probe_tool_form(renderer: Renderer) -> tuple[int, str, str] | None:
    """How the chat template writes function calls: the id that ends the turn with the call, and what stands before and
    after the result. None if it has no form for them."""
    end = renderer.end_of_turn()
    called, result, _ = calculator_messages([CalculatorStep("", "31+52", _RESULT_SENTINEL)], "")
    try:
        text = renderer.prompt_text([Message("user", "Hi"), called, result], [CALCULATOR_SCHEMA])
    except BadRecordError:
        return None
    call_at, result_at = text.rfind("31+52"), text.rfind(_RESULT_SENTINEL)
    end_token = None if end is None else renderer.tokenizer.convert_ids_to_tokens(end)
    end_at = -1 if end_token is None else text.find(end_token, call_at, result_at)
    if end is None or call_at < 0 or result_at < call_at or end_at < 0:
        return None
    return end, text[end_at + len(str(end_token)) : result_at], text[result_at + len(_RESULT_SENTINEL) :]


class FunctionCallCalculator:
    """Function calls as the chat template writes them. At the end of a turn with a call, it inserts the tool's turn and
    the start of the next assistant turn. Prompts must be rendered with `tools=[CALCULATOR_SCHEMA]`."""

    def __init__(self, renderer: Renderer) -> None:
        self.tokenizer = renderer.tokenizer
        self.encode_prompt = renderer.encode_prompt
        form = _probe_tool_form(renderer)
        if form is None:
            raise WhetError(
                "calculator: the model's chat template does not write tool calls, results, and an end of turn between "
                "them, so the model cannot call the calculator. Remove --calculator, or calculator: true"
            )
        self.end, self.before, self.after = form

    def new_state(self) -> ToolState:
        return _FunctionCallState(self)

    def visible_answer(self, ids: Sequence[int]) -> Sequence[int]:
        """The last turn."""
        opening = self.encode_prompt(self.after)
        starts = range(len(ids) - len(opening), -1, -1)
        start = next((i for i in starts if list(ids[i : i + len(opening)]) == opening), None)
        return ids if start is None else ids[start + len(opening) :]


class _FunctionCallState:
    def __init__(self, calculator: FunctionCallCalculator) -> None:
        self._calculator = calculator
        self._turn: list[int] = []
        self._inserted = 0

    def observe(self, token: int) -> Sequence[int]:
        if self._inserted:  # a token of the last result
            self._inserted -= 1
            return ()
        calculator = self._calculator
        if token != calculator.end:
            self._turn.append(token)
            return ()
        expression = parse_calculator_call(calculator.tokenizer.decode(self._turn))
        self._turn = []
        if expression is None:
            return ()
        result = calculate(expression) or "error: not a sum"
        ids = calculator.encode_prompt(f"{calculator.before}{result}{calculator.after}")
        self._inserted = len(ids)
        return ids


def parse_calculator_call(text: str) -> str | None:
    """The expression of the last calculator call in a turn, written as a JSON object; None without a call."""
    found = None
    decoder = json.JSONDecoder()
    at, failures = text.find("{"), 0
    while at >= 0 and failures < _MAX_BRACES:
        try:
            value, end = decoder.raw_decode(text, at)
        except (ValueError, RecursionError):
            at, failures = text.find("{", at + 1), failures + 1
            continue
        expression = _expression_argument(value)
        found = expression if expression is not None else found
        at = text.find("{", end)
    return found


def _expression_argument(value: Any) -> str | None:
    if not isinstance(value, dict) or value.get("name") != "calculator":
        return None
    arguments = value.get("arguments", value.get("parameters"))
    expression = arguments.get("expression") if isinstance(arguments, dict) else None
    return expression if isinstance(expression, str) else None
