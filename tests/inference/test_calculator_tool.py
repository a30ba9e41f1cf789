"""The parser evaluates expressions, and results of calls are inserted into completions."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tool_template import TOOL_TEMPLATE

from whet.core.errors import WhetError
from whet.data.conversation import CALCULATOR_SCHEMA, Message, ToolCall
from whet.data.render.renderer import Renderer
from whet.inference.calculator_tool import (
    FunctionCallCalculator,
    InlineCalculator,
    calculate,
    make_calculator,
    parse_calculator_call,
)
from whet.model.config import ModelConfig
from whet.model.load.tokenizer import load_tokenizer
from whet.tokenizer.named_templates import INLINE_CALL_TOKENS


def renderer(markers: bool = False, template: str | None = None) -> Renderer:
    tokenizer = load_tokenizer(ModelConfig(path="builtin:tiny"))
    if markers:
        tokenizer.add_special_tokens({"additional_special_tokens": list(INLINE_CALL_TOKENS)})
    if template:
        tokenizer.chat_template = template
    return Renderer(tokenizer, "assistant")


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("48/2", "24"), ("2+3*4", "14"), ("(2+3)*4", "20"), ("-3 - -4", "1"), ("1,234 + 1", "1235"), ("7//2", "3"),
        ("-7//2", "-4"), ("1/3", "0.333333333333"), ("-1/3", "-0.333333333333"), ("0.1+0.2", "0.3"), (".5*4.", "2"),
        ("12 × 3 ÷ 4 − 1", "8"), ("2/3*3", "2"), ("'strawberry'.count('r')", "3"), ('"a b".count(" ")', "1"),
        ("1/1000", "0.001"), ("-0.25", "-0.25"),
    ],
)  # fmt: skip
def test_values_in_decimal_notation(expression: str, value: str) -> None:
    assert calculate(expression) == value


@pytest.mark.parametrize(
    "expression",
    [
        "", "1/0", "2**9", "2 3", "(1", "1)", "1+", "__import__('os')", "open('x')", "a+1", "1e9", "[1]", "'a'.upper()",
        "'a'.count('a').real", "'a'.count(x)", "(" * 40 + "1" + ")" * 40, "1+" * 200 + "1", "lambda: 1", "0x10", "7//0",
    ],
)  # fmt: skip
def test_an_invalid_expression_has_no_value(expression: str) -> None:
    assert calculate(expression) is None


def test_no_expression_takes_long() -> None:
    began = time.process_time()
    calculate("9" * 80 + "*" + "9" * 80 + "/" + "7" * 80)
    calculate("*".join(["99"] * 85))
    calculate("-" * 250 + "1")
    assert time.process_time() - began < 0.5


@given(st.lists(st.tuples(st.integers(0, 999), st.sampled_from("+-*")), min_size=1, max_size=8))
def test_integer_arithmetic_is_python_s(parts: list[tuple[int, str]]) -> None:
    text = "".join(f"{number} {sign} " for number, sign in parts) + "3"
    assert calculate(text) == str(eval(text))


def test_an_inline_calculation_is_followed_by_its_value() -> None:
    renderer_ = renderer(markers=True)
    calculator = make_calculator(renderer_)
    assert isinstance(calculator, InlineCalculator)
    opening, closing, output, end = renderer_.tokenizer.convert_tokens_to_ids(list(INLINE_CALL_TOKENS))
    digits = renderer_.tokenizer.encode("48/2", add_special_tokens=False)
    state = calculator.new_state()
    assert [list(state.observe(token)) for token in (5, opening, *digits)] == [[]] * (2 + len(digits))
    assert list(state.observe(closing)) == [output, *renderer_.tokenizer.encode("24", add_special_tokens=False), end]
    assert list(state.observe(closing)) == []  # no calculation is open
    bad = calculator.new_state()
    assert not any(
        bad.observe(token) for token in (opening, *renderer_.tokenizer.encode("no", add_special_tokens=False), closing)
    )


@pytest.mark.parametrize("opening", ["\n", " "])
def test_a_function_call_is_followed_by_the_tool_s_turn_and_a_new_one(opening: str) -> None:
    template = TOOL_TEMPLATE.replace("m['role'] + '\n'", f"m['role'] + '{opening}'")
    renderer_ = renderer(template=template.replace("assistant\n", f"assistant{opening}"))
    calculator = make_calculator(renderer_)
    assert isinstance(calculator, FunctionCallCalculator)
    call = ToolCall("calculator", {"expression": "48/2"})
    question = [Message("user", "Half of 48?")]
    called = Message("assistant", "Well, ", tool_calls=(call,))
    answered = Message("tool", "24")
    prompt = renderer_.prompt_ids(question, tools=[CALCULATOR_SCHEMA])
    expected = renderer_.prompt_ids([*question, called, answered], tools=[CALCULATOR_SCHEMA])
    assert expected[: len(prompt)] == prompt
    end = renderer_.end_of_turn()
    assert end is not None
    turn = expected[len(prompt) : expected.index(end, len(prompt)) + 1]
    state = calculator.new_state()
    inserted = [list(state.observe(token)) for token in turn]
    assert not any(inserted[:-1])
    assert [*prompt, *turn, *inserted[-1]] == expected
    assert not any(state.observe(token) for token in inserted[-1])
    assert list(state.observe(end)) == []  # no call: the answer may end
    final = renderer_.tokenizer.encode("It is 24.", add_special_tokens=False)
    assert calculator.visible_answer([*turn, *inserted[-1], *final]) == final
    assert calculator.visible_answer(final) == final
    assert calculator.visible_answer([*turn, *inserted[-1], *turn, *inserted[-1], *final]) == final


def test_a_model_that_cannot_call_the_calculator_is_an_error() -> None:
    with pytest.raises(WhetError, match="calculator: the model's chat template"):
        make_calculator(renderer())
    with pytest.raises(WhetError, match=r"no token <\|python_start"):
        InlineCalculator(renderer())


@pytest.mark.parametrize(
    ("text", "expression"),
    [
        ('<tool_call>\n{"name": "calculator", "arguments": {"expression": "1+1"}}\n</tool_call>', "1+1"),
        ('{"name": "calculator", "parameters": {"expression": "2"}}', "2"),
        ('{x} {"name": "calculator", "arguments": {"expression": "3"}}', "3"),
        ('{"name": "weather", "arguments": {"expression": "3"}}', None),
        ('{"name": "calculator", "arguments": {"expression": 3}}', None),
        ('{"name": "calculator", "arguments"', None),
        ("no call", None),
    ],
)
def test_the_expression_of_a_call_is_parsed(text: str, expression: str | None) -> None:
    assert parse_calculator_call(text) == expression
