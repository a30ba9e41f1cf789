"""Parsed records: conversations, plain text, marked text, tokenized documents, and records that cannot be used;
and calls of the calculator as messages."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


ROLES = ("system", "developer", "user", "assistant", "tool")


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a record was read: a file and a line (in a table, a row), counted from 1."""

    source: str
    line: int

    def __str__(self) -> str:
        return f"{self.source}:{self.line}"


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A function call by the assistant."""

    name: str
    arguments: dict[str, Any] | str
    id: str | None = None
    written: str | None = field(default=None, compare=False, repr=False)
    """The arguments as the record has them, where that is a string."""

    def as_dict(self) -> dict[str, Any]:
        call: dict[str, Any] = {"type": "function", "function": {"name": self.name, "arguments": self.arguments}}
        return call if self.id is None else {"id": self.id, **call}


@dataclass(frozen=True, slots=True)
class Message:
    """One turn of a conversation."""

    role: str
    content: str
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    train: bool | None = None
    """False: never supervised (`weight: 0` or `train: false` in the record). None: data.train_on decides."""
    tool_call_id: str | None = None
    """For role `tool`: the id of the call it answers."""
    name: str | None = None
    """For role `tool`: the name of the tool."""
    null_content: bool = field(default=False, compare=False, repr=False)
    """It calls tools and has no content: null, which some templates tell from an empty text."""
    part_lengths: tuple[int, ...] = field(default=(), compare=False, repr=False)
    """The record has the content as several text parts of these lengths, and the template gets them as such."""

    @property
    def parts(self) -> list[dict[str, str]]:
        """The content as a list of parts."""
        edges = itertools.accumulate(self.part_lengths, initial=0)
        texts = [self.content[a:b] for a, b in itertools.pairwise(edges)] or [self.content]
        return [{"type": "text", "text": text} for text in texts]

    def as_dict(self, in_parts: bool = False) -> dict[str, Any]:
        """The dict that chat templates take. Templates read reasoning from `reasoning_content` or `thinking`, so both
        are set. Templates of multimodal models take the content as a list of parts (`in_parts`)."""
        content: Any = self.parts if in_parts or self.part_lengths else self.content
        if self.null_content and not in_parts:
            content = None
        turn: dict[str, Any] = {"role": self.role, "content": content}
        if self.reasoning:
            turn |= {"reasoning_content": self.reasoning, "thinking": self.reasoning}
        if self.tool_calls:
            turn["tool_calls"] = [call.as_dict() for call in self.tool_calls]
        if self.tool_call_id is not None:
            turn["tool_call_id"] = self.tool_call_id
        if self.name is not None:
            turn["name"] = self.name
        return turn


def with_system(messages: Sequence[Message], system: str | None) -> Sequence[Message]:
    """The messages, after a system message if they have none."""
    if not system or (messages and messages[0].role in ("system", "developer")):
        return messages
    return [Message("system", system), *messages]


@dataclass(frozen=True, slots=True)
class Conversation:
    """The messages of one conversation, and the tools the assistant may call (OpenAI schema)."""

    messages: tuple[Message, ...]
    origin: Origin
    tools: tuple[dict[str, Any], ...] = ()

    def with_empty_content(self) -> Conversation:
        """Itself with an empty text for content that is null."""
        return replace(self, messages=tuple(replace(message, null_content=False) for message in self.messages))

    def with_joined_parts(self) -> Conversation:
        """Itself with each content as one text."""
        return replace(self, messages=tuple(replace(message, part_lengths=()) for message in self.messages))

    def with_text_arguments(self) -> Conversation:
        """Itself with the arguments of tool calls as text: as they were written, else as JSON."""

        def as_text(call: ToolCall) -> ToolCall:
            written = call.written
            return replace(
                call, arguments=json.dumps(call.arguments, ensure_ascii=False) if written is None else written
            )

        return replace(
            self,
            messages=tuple(
                replace(message, tool_calls=tuple(map(as_text, message.tool_calls))) for message in self.messages
            ),
        )


@dataclass(frozen=True, slots=True)
class PlainText:
    """A plain document: every token is supervised."""

    text: str
    origin: Origin


@dataclass(frozen=True, slots=True)
class MarkedText:
    """Text whose turns are delimited by markers (data.markers)."""

    text: str
    origin: Origin


@dataclass(frozen=True, slots=True)
class TokenizedDocument:
    """A pretokenized document with its loss mask (1: supervised)."""

    ids: NDArray[np.int32]
    loss: NDArray[np.uint8]
    origin: Origin


@dataclass(frozen=True, slots=True)
class BadRecord:
    """A record that cannot be used. `reason` is the key in the ledger, `explanation` the sentence for the user."""

    origin: Origin
    reason: str
    explanation: str


@dataclass(frozen=True, slots=True)
class FilteredRecord:
    """A record excluded by the source's `where`."""

    origin: Origin
    reason: str


ParsedRecord = Conversation | PlainText | MarkedText | TokenizedDocument | BadRecord | FilteredRecord
"""What one record of a source turns into."""


# The calculator tool: its JSON schema, and assistant turns that call it.

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
