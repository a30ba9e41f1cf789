"""A conversation with a model."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import nn

from whet.core.errors import WhetError
from whet.data.calculator import SCHEMA
from whet.data.conversation import BadRecordError
from whet.data.render import Renderer
from whet.infer.calculate import calculate
from whet.infer.generate import Answer, Sampling, answers
from whet.infer.streamed import TextStream
from whet.infer.tools import CalledCalculator, MarkedCalculator, Tools, called_expression, offer_of

_MOST_CALLS = 16
"""Of a tool in one answer: a model that calls for ever is stopped."""
INTERRUPTED = "interrupted"
Message = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Said:
    """An answer, and why it ended: `end`, `length` (of max_new_tokens or of the context), `string`, `interrupted`."""

    text: str
    stopped: str
    prompt: list[int] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)
    """With the token that ended it."""


class Speaker:
    """A model with its way of writing conversations; the renderer is the one that training uses."""

    def __init__(
        self,
        model: nn.Module,
        renderer: Renderer,
        stops: Sequence[int],
        sampling: Sampling,
        calculator: Tools | None = None,
        name: str = "model",
        within: Callable[[], AbstractContextManager[Any]] = contextlib.nullcontext,
    ) -> None:
        """`within` is entered while the model answers."""
        self.model, self.renderer, self.stops, self.sampling, self.name = model, renderer, stops, sampling, name
        self.within, self.calculator = within, calculator
        marked = isinstance(calculator, MarkedCalculator)
        self._inside = calculator if marked else None
        self._shows = not marked  # markers are part of the text then
        self._schemas = offer_of(calculator)

    def prompt(self, messages: Sequence[Message]) -> list[int]:
        try:
            return self.renderer.prompt_ids(messages, tools=self._schemas)
        except BadRecordError as error:
            raise WhetError(f"the model cannot be asked this: {error}") from None

    def text(self, ids: Sequence[int]) -> str:
        return str(self.renderer.tokenizer.decode(list(ids), skip_special_tokens=self._shows))

    def piece(self, ids: Sequence[int]) -> str:
        """Special tokens too."""
        return str(self.renderer.tokenizer.decode(list(ids)))

    def answer_all(self, prompts: Sequence[list[int]], done: Callable[[int], None] = lambda n: None) -> list[Said]:
        """The answers to prompts that have nothing to do with each other, together."""
        with self.within():
            found = answers(
                self.model, prompts, self.stops, self._pad, self.sampling, done=done, tools=self.calculator,
                text=self.text,
            )  # fmt: skip
        return [self._said(prompt, answer) for prompt, answer in zip(prompts, found, strict=True)]

    def answer(self, prompt: list[int], show: Callable[[str], None] | None = None) -> Said:
        """One answer; `show` gets its text as it comes. Ctrl-C ends it where it is."""
        stream = TextStream(self.text, self.sampling.stop)
        heard: list[int] = []

        def hear(_: int, token: int) -> None:
            heard.append(token)
            if show is not None:
                show(stream.take(token))

        try:
            with self.within():
                (found,) = answers(
                    self.model, [prompt], self.stops, self._pad, self.sampling, tools=self._inside, text=self.text,
                    heard=hear,
                )  # fmt: skip
            said = self._said(prompt, found)
        except KeyboardInterrupt:
            said = Said(self.text(heard), INTERRUPTED, prompt, heard)
        if show is not None:
            show(stream.rest(said.text))
        return said

    def _said(self, prompt: list[int], answer: Answer) -> Said:
        text = self.text(answer.ids) if answer.text is None else answer.text
        return Said(text, answer.stopped, prompt, [*answer.ids, *answer.end])

    @property
    def _pad(self) -> int:
        pad = self.renderer.tokenizer.pad_token_id
        return pad if pad is not None else 0


class ChatSession:
    """Remembers what was said."""

    def __init__(self, speaker: Speaker, system: str | None = None) -> None:
        self.speaker = speaker
        self.system = system
        self.messages: list[Message] = self._opening()

    def say(self, text: str, show: Callable[[str], None] | None = None) -> Said:
        """The model's answer to `text`, given all that was said before. An answer that was interrupted before its first
        word is forgotten, and the question with it."""
        said = [*self.messages, {"role": "user", "content": text}]
        for number in range(_MOST_CALLS):
            found = self.speaker.answer(self.speaker.prompt(said), show)
            call = called_expression(found.text) if isinstance(self.speaker.calculator, CalledCalculator) else None
            if call is None or found.stopped != "end":
                break
            said += _called(number, call, found.text)
            if show is not None:
                show(f"\n{said[-1]['content']}\n")
        if found.text or found.stopped != INTERRUPTED:
            self.messages = [*said, {"role": "assistant", "content": found.text}]
        return found

    def forget(self, system: str | None = None) -> None:
        """Start over, with another system message if one is given."""
        self.system = self.system if system is None else system
        self.messages = self._opening()

    def save(self, path: Path) -> None:
        """Add the conversation to a file of conversations, one on each line, that whet can train on."""
        if not any(message["role"] == "assistant" for message in self.messages):
            raise WhetError("there is nothing to save yet: ask something first")
        whole: dict[str, Any] = {"messages": self.messages}
        if any("tool_calls" in message for message in self.messages):
            whole["tools"] = [SCHEMA]
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(whole, ensure_ascii=False) + "\n")
        except OSError as error:
            raise WhetError(f"{path}: cannot be written ({error.strerror}). Give another file") from None

    def _opening(self) -> list[Message]:
        return [{"role": "system", "content": self.system}] if self.system else []


def _called(number: int, expression: str, text: str) -> list[Message]:
    """A turn that calls the calculator, and its answer."""
    call = {"name": "calculator", "arguments": {"expression": expression}}
    identity = f"call{number + 1:05}"
    spoken = text[: text.find("{")].removesuffix("\n").removesuffix("<tool_call>").rstrip()
    return [
        {"role": "assistant", "content": spoken,
         "tool_calls": [{"id": identity, "type": "function", "function": call}]},
        {"role": "tool", "content": calculate(expression) or "error: not a sum", "tool_call_id": identity,
         "name": "calculator"},
    ]  # fmt: skip
