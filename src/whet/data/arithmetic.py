"""`builtin:arithmetic`: sums of several steps, worked out in text or with the calculator."""

from __future__ import annotations

import random
from collections.abc import Iterator

from whet.data.calculator import SCHEMA, Step, with_calls
from whet.data.conversation import Message
from whet.data.sample import Sample, split_of

_ASK = (
    "What is {task}?",
    "Calculate {task}.",
    "Please work out {task}.",
    "{task} = ?",
    "Can you tell me what {task} is?",
)
_SIGNS = {"+": "+", "-": "−", "*": "×", "/": "÷"}


def arithmetic(split: str, calculator: str = "remove") -> Iterator[Sample]:
    """One to four steps, from left to right, whole numbers throughout. The same numbers are never in both splits."""
    generator = random.Random(f"arithmetic/{split}")
    while True:
        start = generator.randint(2, 999)
        steps = _steps(generator, start, generator.randint(1, 4))
        if split_of(" ".join(map(str, sorted([start, *(number for _, number, _ in steps)])))) != split:
            continue
        task = generator.choice(_ASK).format(task=_written(start, steps))
        if calculator == "calls":
            yield Sample((Message("user", task), *_called(start, steps)), (SCHEMA,))
        else:
            yield Sample((Message("user", task), Message("assistant", _told(start, steps))))


def _steps(generator: random.Random, value: int, count: int) -> list[tuple[str, int, int]]:
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


def _written(start: int, steps: list[tuple[str, int, int]]) -> str:
    """With the parentheses that its order needs."""
    text, loose = str(start), False  # loose: it ends with a sum, which × and ÷ would tear apart
    for operation, number, _ in steps:
        text = f"({text})" if loose and operation in "*/" else text
        text, loose = f"{text} {_SIGNS[operation]} {number}", operation in "+-"
    return text


def _told(value: int, steps: list[tuple[str, int, int]]) -> str:
    lines = []
    for operation, number, result in steps:
        lines.append(f"{value} {_SIGNS[operation]} {number} = {result}")
        value = result
    return "\n".join((*lines, f"#### {value}"))


def _called(value: int, steps: list[tuple[str, int, int]]) -> tuple[Message, ...]:
    calls, before = [], ""
    for operation, number, result in steps:
        text = f"{before}{value} {_SIGNS[operation]} {number} = "
        calls.append(Step(text, f"{value}{operation}{number}", str(result)))
        value, before = result, f"{result}\n"
    return with_calls(calls, f"{value}\n#### {value}")
