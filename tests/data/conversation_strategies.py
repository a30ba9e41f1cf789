"""Random conversations whose texts remain identifiable in any rendering.

Every text holds a core such as `«7»` that occurs nowhere else. Around it stands what might mislead: template words,
markers, think tags, quotes, role names, whitespace.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hypothesis import strategies as st

from whet.data.conversation import Conversation, Message, Origin, ToolCall

from .trl_templates import TOOLS

HOSTILE = (
    " ", "\n", "\n\n", "\t", "\u00a0", '"', "'", "\\", "\\n", "user", "assistant", "system", "tool", "model", "none",
    "<think>", "</think>", "<think>\n", "\n</think>\n\n", "<tool_response>", "</tool_response>", "<tool_call>",
    "<|channel>", "<channel|>", "<|im_end|>", "<|im_start|>user\n", "<|eot_id|>", "<end_of_turn>", "<|end|>", "[INST]",
    "<｜Assistant｜>", "/no_think", "<", ">", "</", "think>", "{{ x }}", "{%", "0", "7", "True", "null", "[]", "{}",
    "&", "naïve", "日本語", "😀", "e\u0301", "\x00", "<image>", "You are a helpful assistant.", "word " * 60,
)  # fmt: skip


class Cores:
    """Hands out texts with a core of their own."""

    def __init__(self, draw: st.DrawFn) -> None:
        self.draw, self.count = draw, 0

    def __call__(self) -> str:
        self.count += 1
        around = st.lists(st.sampled_from(HOSTILE), max_size=2).map("".join)
        if self.draw(st.booleans()):
            return f"«{self.count}»"
        return f"{self.draw(around)}«{self.count}»{self.draw(around)}"


def _value(cores: Cores, depth: int = 2) -> Any:
    kind = cores.draw(st.sampled_from(["text", "text", "number", "other", "nested"]))
    if kind == "nested" and depth:
        return {"inner": _value(cores, depth - 1), "list": [_value(cores, depth - 1), 2]}
    if kind == "number":
        return cores.draw(st.sampled_from([0, -3, 2.5, 10**20]))
    return cores.draw(st.sampled_from([True, False, None, ""])) if kind == "other" else cores()


def _answer(cores: Cores) -> Message:
    kind = cores.draw(st.sampled_from(["plain", "plain", "field", "inline"]))
    content = f"<think>\n{cores()}\n</think>\n\n{cores()}" if kind == "inline" else cores()
    learn = cores.draw(st.sampled_from([None, None, None, True, False]))
    return Message("assistant", content, reasoning=cores() if kind == "field" else "", train=learn)


def _use_of_tools(cores: Cores) -> list[Message]:
    calls = tuple(
        ToolCall("weather", {"city": _value(cores), "days": _value(cores)}, f"abcdefgh{i}")
        for i in range(cores.draw(st.integers(1, 2)))
    )
    asked = replace(_answer(cores), tool_calls=calls)
    if cores.draw(st.booleans()):
        asked = replace(asked, content="")
    return [asked, *(Message("tool", cores(), tool_call_id=call.id, name="weather") for call in calls)]


@st.composite
def conversations(draw: st.DrawFn, calls: bool = True) -> Conversation:
    """Several turns, with a system message or not, tools or not, reasoning or not, weights or not."""
    cores = Cores(draw)
    messages = [Message("system", cores())] if draw(st.booleans()) else []
    has_calls = calls and draw(st.booleans())
    for _ in range(draw(st.integers(1, 3))):
        blank = draw(st.sampled_from([False] * 8 + [True]))
        messages.append(Message("user", draw(st.sampled_from(["", " ", "\n"])) if blank else cores()))
        if has_calls and draw(st.booleans()):
            messages += _use_of_tools(cores)
        messages.append(_answer(cores))
    tools = TOOLS if has_calls or draw(st.booleans()) else ()
    return Conversation(tuple(messages), Origin("here", 1), tools)


def plain_variant(conversation: Conversation, mark: str) -> Conversation:
    """A conversation of the same structure whose texts no template treats specially."""

    def text(old: str, number: int) -> str:
        return f"{mark}{number}{mark}" if old else ""

    return replace(
        conversation,
        messages=tuple(
            replace(message, content=text(message.content, 2 * i), reasoning=text(message.reasoning, 2 * i + 1))
            for i, message in enumerate(conversation.messages)
        ),
    )
