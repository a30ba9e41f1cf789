"""The calculator tool: its JSON schema, and assistant turns that call it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from whet.data.conversation import Message, ToolCall

CALCULATOR_SCHEMA: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "calculator",
        "description": "Evaluates an arithmetic expression.",
        "parameters": {
            "type": "object",
            "properties": {"expression": {"type": "string", "description": "Such as 48/2."}},
            "required": ["expression"],
        },
    },
}


class CalculatorStep(NamedTuple):
    """Text, and the sum that follows it."""

    text: str
    expression: str
    result: str


def calculator_messages(steps: Sequence[CalculatorStep], rest: str) -> tuple[Message, ...]:
    """The assistant's turns: each text with its call, the calculator's answer, and what is said after the last one."""
    messages = []
    for number, step in enumerate(steps, 1):
        identity = f"call{number:05}"  # nine characters, as Mistral's templates demand
        call = ToolCall("calculator", {"expression": step.expression}, identity)
        messages.append(Message("assistant", step.text, tool_calls=(call,)))
        messages.append(Message("tool", step.result, tool_call_id=identity, name="calculator"))
    return (*messages, Message("assistant", rest))
