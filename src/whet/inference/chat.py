"""Chat with a model: streamed replies, sessions, prompt files, and the probability of each token."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from whet.core.errors import BadRecordError, WhetError
from whet.data.calculator import CALCULATOR_SCHEMA
from whet.data.read.messages import parse_message_list
from whet.data.render.renderer import Renderer
from whet.inference.calculator_tool import (
    FunctionCallCalculator,
    InlineCalculator,
    Tool,
    calculate,
    parse_calculator_call,
    tool_schemas,
)
from whet.inference.engine import Completion
from whet.inference.generate import generate_completions
from whet.inference.sampling import Sampling
from whet.model.attention import native_attention

# Text as it comes: tokens in, the characters that are certain out.


class TextStream:
    """A character may take several tokens, and a text that ends the answer is not to be shown: both are held back."""

    def __init__(self, text: Callable[[Sequence[int]], str], stop: Sequence[str] = ()) -> None:
        self._text, self._stop = text, stop
        self._held = max((len(string) for string in stop), default=1) - 1
        self._ids: list[int] = []
        self._given = 0

    def take(self, token: int) -> str:
        """What can be shown now."""
        self._ids.append(token)
        text = self._text(self._ids)
        certain = min(len(text) - self._held, len(text_before_stop(text, self._stop)))
        if text.endswith("\N{REPLACEMENT CHARACTER}"):
            certain = min(certain, len(text.rstrip("\N{REPLACEMENT CHARACTER}")))
        return self._up_to(text, certain)

    def rest(self, answer: str) -> str:
        """What is left when the answer is known."""
        return self._up_to(answer, len(answer))

    def _up_to(self, text: str, end: int) -> str:
        found = text[self._given : max(end, self._given)]
        self._given += len(found)
        return found


def text_before_stop(text: str, stop: Sequence[str]) -> str:
    """The text up to the first of the strings that end it."""
    return text[: min((text.find(string) for string in stop if string in text), default=len(text))]


# A conversation with a model.

_MAX_TOOL_CALLS = 16
"""Of a tool in one answer: a model that calls for ever is stopped."""
FINISH_INTERRUPTED = "interrupted"
MessageDict = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Reply:
    """An answer, and why it ended: `end`, `length` (of max_new_tokens or of the context), `string`, `interrupted`."""

    text: str
    stopped: str
    prompt: list[int] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)
    """With the token that ended it."""


class ChatModel:
    """A model with its way of writing conversations; the renderer is the one that training uses."""

    def __init__(
        self,
        model: nn.Module,
        renderer: Renderer,
        stops: Sequence[int],
        sampling: Sampling,
        calculator: Tool | None = None,
        name: str = "model",
        within: Callable[[], AbstractContextManager[Any]] = contextlib.nullcontext,
    ) -> None:
        """`within` is entered while the model answers."""
        self.model, self.renderer, self.stops, self.sampling, self.name = model, renderer, stops, sampling, name
        self.within, self.calculator = within, calculator
        marked = isinstance(calculator, InlineCalculator)
        self._inside = calculator if marked else None
        self._shows = not marked  # markers are part of the text then
        self._schemas = tool_schemas(calculator)

    def prompt(self, messages: Sequence[MessageDict]) -> list[int]:
        try:
            return self.renderer.prompt_ids(messages, tools=self._schemas)
        except BadRecordError as error:
            raise WhetError(f"the model cannot be asked this: {error}") from None

    def text(self, ids: Sequence[int]) -> str:
        return str(self.renderer.tokenizer.decode(list(ids), skip_special_tokens=self._shows))

    def piece(self, ids: Sequence[int]) -> str:
        """Special tokens too."""
        return str(self.renderer.tokenizer.decode(list(ids)))

    def answer_all(self, prompts: Sequence[list[int]], done: Callable[[int], None] = lambda n: None) -> list[Reply]:
        """The answers to prompts that have nothing to do with each other, together."""
        with self.within():
            found = generate_completions(
                self.model, prompts, self.stops, self._pad, self.sampling, done=done, tools=self.calculator,
                text=self.text,
            )  # fmt: skip
        return [self._said(prompt, answer) for prompt, answer in zip(prompts, found, strict=True)]

    def answer(self, prompt: list[int], show: Callable[[str], None] | None = None) -> Reply:
        """One answer; `show` gets its text as it comes. Ctrl-C ends it where it is."""
        stream = TextStream(self.text, self.sampling.stop)
        heard: list[int] = []

        def hear(_: int, token: int) -> None:
            heard.append(token)
            if show is not None:
                show(stream.take(token))

        try:
            with self.within():
                (found,) = generate_completions(
                    self.model, [prompt], self.stops, self._pad, self.sampling, tools=self._inside, text=self.text,
                    heard=hear,
                )  # fmt: skip
            said = self._said(prompt, found)
        except KeyboardInterrupt:
            said = Reply(self.text(heard), FINISH_INTERRUPTED, prompt, heard)
        if show is not None:
            show(stream.rest(said.text))
        return said

    def _said(self, prompt: list[int], answer: Completion) -> Reply:
        text = self.text(answer.ids) if answer.text is None else answer.text
        return Reply(text, answer.stopped, prompt, [*answer.ids, *answer.end])

    @property
    def _pad(self) -> int:
        pad = self.renderer.tokenizer.pad_token_id
        return pad if pad is not None else 0


class ChatSession:
    """Remembers what was said."""

    def __init__(self, speaker: ChatModel, system: str | None = None) -> None:
        self.speaker = speaker
        self.system = system
        self.messages: list[MessageDict] = self._opening()

    def say(self, text: str, show: Callable[[str], None] | None = None) -> Reply:
        """The model's answer to `text`, given all that was said before. An answer that was interrupted before its first
        word is forgotten, and the question with it."""
        said = [*self.messages, {"role": "user", "content": text}]
        for number in range(_MAX_TOOL_CALLS):
            found = self.speaker.answer(self.speaker.prompt(said), show)
            call = (
                parse_calculator_call(found.text)
                if isinstance(self.speaker.calculator, FunctionCallCalculator)
                else None
            )
            if call is None or found.stopped != "end":
                break
            said += _tool_call_messages(number, call, found.text)
            if show is not None:
                show(f"\n{said[-1]['content']}\n")
        if found.text or found.stopped != FINISH_INTERRUPTED:
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
            whole["tools"] = [CALCULATOR_SCHEMA]
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(whole, ensure_ascii=False) + "\n")
        except OSError as error:
            raise WhetError(f"{path}: cannot be written ({error.strerror}). Give another file") from None

    def _opening(self) -> list[MessageDict]:
        return [{"role": "system", "content": self.system}] if self.system else []


def _tool_call_messages(number: int, expression: str, text: str) -> list[MessageDict]:
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


# How likely each token of an answer was, and what else the model might have said.


@dataclass(frozen=True, slots=True)
class TokenProbability:
    """A token that was or could have been said."""

    token: str
    id: int
    probability: float


@dataclass(frozen=True, slots=True)
class ExplainedToken:
    """A token of an answer. Probabilities are the model's own: before temperature, filters and penalties."""

    token: str
    id: int
    probability: float
    rank: int
    """1: no token was likelier."""
    likeliest: tuple[TokenProbability, ...]

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


@torch.inference_mode()
def explain_tokens(
    model: nn.Module, prompt: Sequence[int], answer: Sequence[int], text: Callable[[Sequence[int]], str], top: int = 5
) -> list[ExplainedToken]:
    """Of every token of `answer`, in one pass over the whole text, with transformers' own attention."""
    if not answer:
        return []
    device = next(model.parameters()).device
    with native_attention(model):
        logits = model(input_ids=torch.tensor([[*prompt, *answer]], device=device)).logits[0]
    shares = logits[len(prompt) - 1 : -1].float().softmax(dim=-1).cpu()
    values, tokens = shares.topk(min(top, shares.shape[1]), dim=-1)
    found = []
    for row, number in enumerate(answer):
        own = shares[row, number]
        likeliest = zip(tokens[row].tolist(), values[row].tolist(), strict=True)
        found.append(
            ExplainedToken(
                text([number]), number, own.item(), 1 + int((shares[row] > own).sum()),
                tuple(TokenProbability(text([other]), other, value) for other, value in likeliest),
            )
        )  # fmt: skip
    return found


# Prompts from a file: lines of text, or JSON lines.


def read_prompts(path: Path) -> list[list[MessageDict]]:
    """What each line asks: the messages up to where the model is to speak.

    In `.jsonl` files a line is a text, {"prompt": text}, or {"messages": […]}, whose last answers are left out, so that
    a file to train on can be asked too. In all others a line is a prompt. Empty lines are passed over.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise WhetError(f"--prompts: {path}: cannot be read ({error.strerror})") from None
    except UnicodeDecodeError:
        raise WhetError(f"--prompts: {path}: this is not a text file in UTF-8") from None
    read = _prompt_from_json if path.suffix in (".jsonl", ".ndjson") else _prompt_from_text
    found = [read(line, f"--prompts: {path}:{number}") for number, line in enumerate(lines, 1) if line.strip()]
    if not found:
        raise WhetError(f"--prompts: {path}: there is no prompt in this file. Write one on each line")
    return found


def _prompt_from_text(line: str, place: str) -> list[MessageDict]:
    return [{"role": "user", "content": line}]


def _prompt_from_json(line: str, place: str) -> list[MessageDict]:
    try:
        value: Any = json.loads(line)
    except ValueError as error:
        raise WhetError(f"{place}: no JSON ({error}). A file of plain lines must not be called .jsonl") from None
    if isinstance(value, dict) and isinstance(value.get("prompt"), str):
        value = value["prompt"]
    if isinstance(value, str):
        return [{"role": "user", "content": value}]
    messages = value.get("messages") if isinstance(value, dict) else None
    if not isinstance(messages, list) or not all(isinstance(each, dict) and "role" in each for each in messages):
        raise WhetError(f'{place}: this is neither a text nor an object with "prompt" (a text) or "messages" (a list)')
    try:
        messages = [
            turn.as_dict() for turn in parse_message_list(messages)
        ]  # as training reads them: parts become text
    except BadRecordError as error:
        raise WhetError(f"{place}: {error}") from None
    while messages and messages[-1]["role"] == "assistant":
        messages = messages[:-1]
    if not messages:
        raise WhetError(f"{place}: nothing is left to ask: all messages are the assistant's")
    return messages
