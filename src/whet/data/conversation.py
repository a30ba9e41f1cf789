"""What sources give: conversations, plain text, marked text, ready tokens, and lines that cannot be used."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

ROLES = ("system", "developer", "user", "assistant", "tool")


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a record was read: a source and a line (in Parquet and the like a row), counted from 1."""

    source: str
    line: int

    def __str__(self) -> str:
        return f"{self.source}:{self.line}"


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A function that the assistant asks for."""

    name: str
    arguments: dict[str, Any]
    id: str | None = None

    def as_dict(self) -> dict[str, Any]:
        call: dict[str, Any] = {"type": "function", "function": {"name": self.name, "arguments": self.arguments}}
        return call if self.id is None else {"id": self.id, **call}


@dataclass(frozen=True, slots=True)
class Message:
    """One turn."""

    role: str
    content: str
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    train: bool | None = None
    """False: not supervised whatever train_on says (`weight: 0`, `train: false`). None: as train_on says."""
    tool_call_id: str | None = None
    """Of a tool's result: the call that it answers."""
    name: str | None = None
    """Of a tool's result: the tool."""

    def as_dict(self, in_parts: bool = False) -> dict[str, Any]:
        """As chat templates expect it. Some call the reasoning `reasoning_content`, some `thinking`: both get it.
        Those of models that see images want the content in parts."""
        content = [{"type": "text", "text": self.content}] if in_parts else self.content
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


@dataclass(frozen=True, slots=True)
class Conversation:
    """The turns of one conversation, in order, and the tools that the assistant may call (OpenAI's schema)."""

    messages: tuple[Message, ...]
    origin: Origin
    tools: tuple[dict[str, Any], ...] = ()


@dataclass(frozen=True, slots=True)
class PlainText:
    """A plain document: every token is learned."""

    text: str
    origin: Origin


@dataclass(frozen=True, slots=True)
class MarkedText:
    """Text in which markers open and close the turns (data.markers)."""

    text: str
    origin: Origin


@dataclass(frozen=True, slots=True)
class TokenizedDocument:
    """A document that was tokenised before, with its loss mask."""

    ids: NDArray[np.int32]
    loss: NDArray[np.uint8]
    origin: Origin


@dataclass(frozen=True, slots=True)
class BadRecord:
    """A record that cannot be used."""

    origin: Origin
    reason: str
    explanation: str


@dataclass(frozen=True, slots=True)
class FilteredRecord:
    """A record that the source's filter excludes."""

    origin: Origin
    reason: str


ParsedRecord = Conversation | PlainText | MarkedText | TokenizedDocument | BadRecord | FilteredRecord
"""What becomes of one record of a source."""
