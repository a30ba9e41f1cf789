"""`builtin:arithmetic`: sums of several steps, worked out in text or with the calculator."""

from __future__ import annotations

import random
from collections.abc import Iterator

from whet.data.builtin.splits import GeneratedSample, assign_split
from whet.data.calculator import CALCULATOR_SCHEMA, CalculatorStep, calculator_messages
from whet.data.conversation import Message

_PROMPTS = (
    "What is {task}?",
    "Calculate {task}.",
    "Please work out {task}.",
    "{task} = ?",
    "Can you tell me what {task} is?",
)
_SIGNS = {"+": "+", "-": "−", "*": "×", "/": "÷"}


def generate_arithmetic(split: str, calculator: str = "remove") -> Iterator[GeneratedSample]:
    """One to four steps, from left to right, whole numbers throughout. The same numbers are never in both splits."""
    generator = random.Random(f"arithmetic/{split}")
    while True:
        start = generator.randint(2, 999)
        steps = _random_steps(generator, start, generator.randint(1, 4))
        if assign_split(" ".join(map(str, sorted([start, *(number for _, number, _ in steps)])))) != split:
            continue
        task = generator.choice(_PROMPTS).format(task=_write_expression(start, steps))
        if calculator == "calls":
            yield GeneratedSample((Message("user", task), *_answer_with_calls(start, steps)), (CALCULATOR_SCHEMA,))
        else:
            yield GeneratedSample((Message("user", task), Message("assistant", _answer_in_text(start, steps))))


def _random_steps(generator: random.Random, value: int, count: int) -> list[tuple[str, int, int]]:
    """(operation, number, result) one after the other; a division always comes out even."""
    steps = []
    for _ in range(count):
        divisors = [number for number in range(2, 13) if value and value % number == 0]
        operation = generator.choice("+-*/" if divisors else "+-*")
        number = (
            generator.choice(divisors) if operation == "/" else generator.randint(2, 12 if operation == "*" else 999)
        )
        value = {"+": value + number, "-": value - number, "*": value * number}.get(operation, value // number)
        steps.append((operation, number, value))
    return steps


def _write_expression(start: int, steps: list[tuple[str, int, int]]) -> str:
    """With the parentheses that its order needs."""
    text, loose = str(start), False  # loose: it ends with a sum, which × and ÷ would tear apart
    for operation, number, _ in steps:
        text = f"({text})" if loose and operation in "*/" else text
        text, loose = f"{text} {_SIGNS[operation]} {number}", operation in "+-"
    return text


def _answer_in_text(value: int, steps: list[tuple[str, int, int]]) -> str:
    lines = []
    for operation, number, result in steps:
        lines.append(f"{value} {_SIGNS[operation]} {number} = {result}")
        value = result
    return "\n".join((*lines, f"#### {value}"))


def _answer_with_calls(value: int, steps: list[tuple[str, int, int]]) -> tuple[Message, ...]:
    calls, before = [], ""
    for operation, number, result in steps:
        text = f"{before}{value} {_SIGNS[operation]} {number} = "
        calls.append(CalculatorStep(text, f"{value}{operation}{number}", str(result)))
        value, before = result, f"{result}\n"
    return calculator_messages(calls, f"{value}\n#### {value}")
