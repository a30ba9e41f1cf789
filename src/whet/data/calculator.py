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
    """Text, then an expression for the calculator, then its result."""

    text: str
    expression: str
    result: str


def calculator_messages(steps: Sequence[CalculatorStep], rest: str, calls_before: int = 0) -> tuple[Message, ...]:
    """For each step an assistant message with a call and the tool's result; then an assistant message with `rest`.
    `calls_before`: calls earlier in the conversation."""
    messages = []
    for number, step in enumerate(steps, calls_before + 1):
        call_id = f"call{number:05}"  # 9 characters: Mistral's templates require exactly that
        call = ToolCall("calculator", {"expression": step.expression}, call_id)
        messages.append(Message("assistant", step.text, tool_calls=(call,)))
        messages.append(Message("tool", step.result, tool_call_id=call_id, name="calculator"))
    return (*messages, Message("assistant", rest))
