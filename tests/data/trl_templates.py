"""The chat templates that trl ships, each with a small tokenizer that has its markers as tokens, and conversations."""

from __future__ import annotations

import importlib.util
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from tokenizers import AddedToken
from transformers import PreTrainedTokenizerFast

from whet.data.conversation import Conversation, Message, Origin, ToolCall
from whet.data.render.renderer import Renderer

from .template_families import small_tokenizer

_MARKER = re.compile(
    r"<[a-z]+[|]>|<[|][a-z]+>|<\|[^|<>\s'\"{}]+\|>|</?[a-z_]+>|<｜[^｜]+｜>|\[/?[A-Z_]+\]",
)
_EOS = (
    "<|im_end|>", "<|eot_id|>", "<turn|>", "<end_of_turn>", "<|END_OF_TURN_TOKEN|>", "<|return|>", "<|endoftext|>",
    "<｜end▁of▁sentence｜>",
)  # fmt: skip
_STOPS = ("<|im_end|>", "<|eot_id|>", "<|return|>", "<|call|>", "<|end|>", "<|eom_id|>", "<|user|>", "<|observation|>")


@dataclass(frozen=True)
class TrlTemplate:
    """A template as a file of trl."""

    name: str
    source: str

    @property
    def markers(self) -> list[str]:
        return sorted({marker for marker in _MARKER.findall(self.source) if len(marker) > 3} | {"<s>"})

    @property
    def eos(self) -> str | None:
        return next((eos for eos in _EOS if eos in self.source), None)

    @property
    def stops(self) -> list[str]:
        found = [stop for stop in _STOPS if stop in self.markers]
        return [stop for stop in found if stop != "<|end|>"] if "<|return|>" in found else found  # as in gpt-oss

    def tokenizer(self) -> PreTrainedTokenizerFast:
        return _tokenizer(self)

    def fitted(self, tokenizer: PreTrainedTokenizerFast) -> PreTrainedTokenizerFast:
        """A real tokenizer with the template and its markers."""
        tokens: list[Any] = [AddedToken(marker, normalized=False, special=True) for marker in self.markers]
        tokenizer.add_special_tokens({"additional_special_tokens": tokens})
        tokenizer.chat_template = self.source
        if self.eos is not None:
            tokenizer.eos_token = self.eos
        return tokenizer

    def renderer(
        self, train_on: str = "assistant", cached: bool = True, tokenizer: PreTrainedTokenizerFast | None = None
    ) -> Renderer:
        tokenizer = tokenizer or self.tokenizer()
        stops = [tokenizer.convert_tokens_to_ids(stop) for stop in self.stops]
        return Renderer(tokenizer, train_on, stops, cached=cached)


@cache
def _tokenizer(template: TrlTemplate) -> PreTrainedTokenizerFast:
    return small_tokenizer(template.source, template.markers, bos="<s>", eos=template.eos)


def _all() -> tuple[TrlTemplate, ...]:
    spec = importlib.util.find_spec("trl")
    if spec is None or spec.origin is None:
        return ()
    files = sorted((Path(spec.origin).parent / "chat_templates").glob("*.jinja"))
    return tuple(TrlTemplate(file.stem, file.read_text()) for file in files)


TRL_TEMPLATES = _all()
TOOLS: tuple[dict[str, Any], ...] = (
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "d",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string", "description": "c"}},
                "required": ["city"],
            },
        },
    },
)


def conversation(*messages: Message, tools: tuple[dict[str, Any], ...] = ()) -> Conversation:
    return Conversation(messages, Origin("here", 1), tools)


def user(text: str) -> Message:
    return Message("user", text)


def says(text: str, **other: Any) -> Message:
    return Message("assistant", text, **other)


_CALLS = (
    ToolCall("weather", {"city": 'Rīga "x"', "days": 3}, "abcdefghi"),
    ToolCall("weather", {"city": "Oslo"}, "abcdefghj"),
)
_SUNNY = Message("tool", "sunny", tool_call_id="abcdefghi", name="weather")
_RAIN = Message("tool", "rain", tool_call_id="abcdefghj", name="weather")

FIXED = {
    "two": conversation(user("Hi"), says("Yes!")),
    "system": conversation(Message("system", "Be brief."), user("Hi there"), says("Yes, sure.")),
    "four": conversation(user("Hi"), says("Yes"), user("More?"), says("No.")),
    "unicode": conversation(user("Žvirblis 🐦 日本"), says("Ā ē\n\nī 🎉 “x”")),
    "edge": conversation(user(" Hi \n"), says("\n Yes \n")),
    "reason": conversation(user("Hi"), says("Four.", reasoning="two and two")),
    "reason2": conversation(
        user("Hi"), says("Four.", reasoning="two and two"), user("again"), says("Five", reasoning="three and two")
    ),
    "inline": conversation(
        user("Hi"), says("<think>\nhm\n</think>\n\nFour."), user("more"), says("<think>\nho\n</think>\n\nFive.")
    ),
    "call": conversation(user("Weather?"), says("", tool_calls=_CALLS[:1]), _SUNNY, says("It is sunny."), tools=TOOLS),
    "call2": conversation(
        user("Weather?"), says("Let me see.", tool_calls=_CALLS), _SUNNY, _RAIN, says("It is sunny."), tools=TOOLS
    ),
    "tools": conversation(user("Hi"), says("Yes"), tools=TOOLS),
    "weight": conversation(user("Hi"), says("Yes", train=False), user("More?"), says("No.")),
}
"""Conversations whose layout_or_reason is pinned for every template."""
