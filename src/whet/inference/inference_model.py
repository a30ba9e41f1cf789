"""A model ready for inference: it renders conversations, generates and streams replies, and explains their tokens."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import nn

from whet.core.errors import BadRecordError, WhetError
from whet.data.conversation import Message
from whet.data.read.records.record_fields import require_text
from whet.data.render.renderer import Renderer
from whet.data.render.template_text import Tools
from whet.inference.calculator_tool import InlineCalculator, Tool, with_tool_schema
from whet.inference.engine import Completion
from whet.inference.generate import generate
from whet.inference.sampling import Sampling
from whet.model.attention import native_attention
from whet.model.config import ModelConfig
from whet.model.load.tokenizer import stop_ids

FINISH_INTERRUPTED = "interrupted"


@dataclass(frozen=True, slots=True)
class Reply:
    """A reply and why it finished: `end`, `length` (of max_new_tokens or the context), `string` or `interrupted`."""

    text: str
    finish_reason: str
    prompt: list[int] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)
    """The generated tokens, including the stop token."""


@dataclass(frozen=True, slots=True)
class InferenceModel:
    """A model with its renderer, which is the one that training uses, its stop tokens and its generation settings."""

    model: nn.Module
    renderer: Renderer
    stop_ids: Sequence[int]
    name: str = "model"
    context: Callable[[], AbstractContextManager[Any]] = contextlib.nullcontext
    """Entered around forward passes: autocast, or the choice of an adapter where models share weights."""
    sampling: Sampling = Sampling()  # noqa: RUF009 - it is frozen
    tool: Tool | None = None

    @property
    def pad_id(self) -> int:
        pad = self.renderer.tokenizer.pad_token_id
        return pad if pad is not None else 0

    def prompt_ids(self, messages: Sequence[Message], tools: Tools = ()) -> list[int]:
        """The tokens of a conversation up to where the model's reply begins."""
        try:
            for message in messages:
                require_text(message.content, f"the {message.role} message")
            return self.renderer.prompt_ids(messages, with_tool_schema(tools, self.tool))
        except BadRecordError as error:
            raise WhetError(f"this conversation cannot be rendered: {error}") from None

    def decode(self, ids: Sequence[int]) -> str:
        """The text of a reply. Special tokens are left out, unless they are the marks of inline calculations."""
        skip = not isinstance(self.tool, InlineCalculator)
        return self.renderer.decode_answer(ids, skip_special_tokens=skip)

    def reply_batch(
        self, prompts: Sequence[list[int]], on_finished: Callable[[int], None] = lambda count: None
    ) -> list[Reply]:
        """A reply to each of several independent prompts, in batches."""
        with self.context():
            completions = generate(
                self.model, prompts, self.sampling, self.stop_ids, pad_id=self.pad_id, tool=self.tool,
                decode=self.decode, on_finished=on_finished,
            )  # fmt: skip
        return [self._to_reply(prompt, completion) for prompt, completion in zip(prompts, completions, strict=True)]

    def reply(self, prompt: list[int], show: Callable[[str], None] | None = None) -> Reply:
        """One reply; `show` receives its text as it is generated. Ctrl-C ends it early.

        Calls by function calling end the reply: ChatSession adds their results as messages.
        """
        stream = TextStream(self.decode, self.sampling.stop)
        generated: list[int] = []

        def on_token(_: int, token: int) -> None:
            generated.append(token)
            if show is not None:
                show(stream.push(token))

        try:
            with self.context():
                (completion,) = generate(
                    self.model, [prompt], self.sampling, self.stop_ids, pad_id=self.pad_id,
                    tool=self.tool if isinstance(self.tool, InlineCalculator) else None, decode=self.decode,
                    on_token=on_token,
                )  # fmt: skip
            reply = self._to_reply(prompt, completion)
        except KeyboardInterrupt:
            reply = Reply(self.decode(generated), FINISH_INTERRUPTED, prompt, generated)
        if show is not None:
            show(stream.flush(reply.text))
        return reply

    def _to_reply(self, prompt: list[int], completion: Completion) -> Reply:
        text = self.decode(completion.ids) if completion.text is None else completion.text
        return Reply(text, completion.finish_reason, prompt, [*completion.ids, *completion.stop_token])

    def explain(self, reply: Reply, top: int = 5) -> list[ExplainedToken]:
        """The probability of each token of a reply and of the `top` most likely ones, from one forward pass."""
        with self.context():
            return explain_tokens(self.model, reply.prompt, reply.ids, self.renderer.tokenizer.decode, top)


def stop_token_ids(renderer: Renderer, model: ModelConfig) -> list[int]:
    """The tokens that end a reply, according to the chat template, the tokenizer and the model's generation config."""
    tokenizer = renderer.tokenizer
    eot = getattr(tokenizer, "eot_token_id", None)  # ends the assistant's turn, where a tokenizer has one
    known = {*stop_ids(model), tokenizer.eos_token_id, eot, renderer.end_of_turn()}
    return sorted(token for token in known if token is not None)


class TextStream:
    """Turns tokens into text while they arrive.

    It holds back an incomplete character, which may take several tokens, and text that may be part of a stop string.
    Only the last tokens are decoded again: with all of them, a long answer would take quadratic time.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], stop: Sequence[str] = ()) -> None:
        self._decode, self._stop = decode, stop
        self._held = max((len(string) for string in stop), default=1) - 1
        self._window = 32 + 4 * self._held  # a token has a character or a byte at least
        self._ids: list[int] = []
        """The last tokens: their text begins after `_before` characters of the reply."""
        self._before = self._shown = 0

    def push(self, token: int) -> str:
        """Add a token; return the text that is now certain."""
        self._ids.append(token)
        text = self._decode(self._ids)
        if len(self._ids) >= 2 * self._window:
            last = self._ids[-self._window :]
            recent = self._decode(last)
            before = self._before + len(text) - len(recent)
            if text.endswith(recent) and before <= self._shown:  # not in the middle of a character
                self._ids, self._before, text = last, before, recent
        certain = min(len(text) - self._held, len(text_before_stop(text, self._stop)))
        if text.endswith("\N{REPLACEMENT CHARACTER}"):
            certain = min(certain, len(text.rstrip("\N{REPLACEMENT CHARACTER}")))
        return self._advance(text, certain, self._before)

    def flush(self, text: str) -> str:
        """The rest of the complete reply."""
        return self._advance(text, len(text), 0)

    def _advance(self, text: str, end: int, before: int) -> str:
        """Show `text`, which begins after `before` characters of the reply, up to `end`."""
        start = self._shown - before
        new = text[start : max(end, start)]
        self._shown += len(new)
        return new


def text_before_stop(text: str, stop: Sequence[str]) -> str:
    """The text up to the first stop string."""
    return text[: min((text.find(string) for string in stop if string in text), default=len(text))]


@dataclass(frozen=True, slots=True)
class TokenProbability:
    """A candidate for a position and its probability."""

    token: str
    id: int
    probability: float


@dataclass(frozen=True, slots=True)
class ExplainedToken:
    """A token of a reply. Probabilities are the model's own: before temperature, filters and penalties."""

    token: str
    id: int
    probability: float
    rank: int
    """1: no token was more likely."""
    likeliest: tuple[TokenProbability, ...]

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


@torch.inference_mode()
def explain_tokens(
    model: nn.Module, prompt: Sequence[int], reply: Sequence[int], decode: Callable[[list[int]], Any], top: int = 5
) -> list[ExplainedToken]:
    """Explain every token of `reply`, in one forward pass with transformers' own attention."""
    if not reply:
        return []
    device = next(model.parameters()).device
    with native_attention(model):
        logits = model(input_ids=torch.tensor([[*prompt, *reply]], device=device)).logits[0]
    probabilities = logits[len(prompt) - 1 : -1].float().softmax(dim=-1).cpu()
    values, tokens = probabilities.topk(min(top, probabilities.shape[1]), dim=-1)
    explained = []
    for position, token in enumerate(reply):
        own = probabilities[position, token]
        likeliest = zip(tokens[position].tolist(), values[position].tolist(), strict=True)
        explained.append(
            ExplainedToken(
                str(decode([token])), token, own.item(), 1 + int((probabilities[position] > own).sum()),
                tuple(TokenProbability(str(decode([other])), other, value) for other, value in likeliest),
            )
        )  # fmt: skip
    return explained
