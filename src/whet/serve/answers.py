"""Tokens to answers: text as it arrives, tool calls at the end, log probabilities, in the form of OpenAI's API."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from whet.data.render.template_text import Tools
from whet.inference.engine import FINISH_LENGTH, Completion
from whet.inference.inference_model import InferenceModel, TextStream
from whet.inference.online_engine import TokenLogprob
from whet.serve.requests import finite
from whet.serve.tool_calls import ParsedCall, ToolCallFormat, visible_length

Decode = Callable[[Sequence[int]], str]


@dataclass(frozen=True, slots=True)
class Ending:
    """The end of an answer."""

    text: str
    """What was not shown yet."""
    calls: list[ParsedCall]
    finish_reason: str


class AnswerText:
    """The text of an answer that is being generated."""

    def __init__(self, decode: Decode, stop: Sequence[str]) -> None:
        self._decode, self._stream = decode, TextStream(decode, stop)

    def push(self, token: int) -> str:
        """Add a token; return the text that can be shown now."""
        return self._stream.push(token)

    def finish(self, completion: Completion) -> Ending:
        text = self._decode(completion.ids) if completion.text is None else completion.text
        return Ending(self._stream.flush(text), [], _finish_reason(completion))


class ToolAnswerText:
    """The same where tools are offered: what may be a call is held back until the answer is complete."""

    def __init__(
        self, model: InferenceModel, stop: Sequence[str], form: ToolCallFormat, tools: Tools, parallel: bool
    ) -> None:
        self._model, self._form, self._tools, self._parallel = model, form, tools, parallel
        self._stream = TextStream(self._decode, stop)
        self._special = sorted(model.renderer.tokenizer.all_special_tokens, key=len, reverse=True)
        self._text, self._shown = "", ""

    def _decode(self, ids: Sequence[int]) -> str:
        """With special tokens, because some templates mark calls with them."""
        return self._model.renderer.decode_answer(ids, skip_special_tokens=False)

    def push(self, token: int) -> str:
        self._text += self._stream.push(token)
        return self._advance(self._text[: visible_length(self._text, self._form)])

    def finish(self, completion: Completion) -> Ending:
        text = self._decode(completion.ids) if completion.text is None else completion.text
        rest, calls = self._form.parse(text, self._tools)
        calls = calls if self._parallel else calls[:1]
        reason = "tool_calls" if calls else _finish_reason(completion)
        return Ending(self._advance(rest.rstrip() if calls else rest), calls, reason)

    def _advance(self, text: str) -> str:
        for token in self._special:
            text = text.replace(token, "")
        new = text[len(self._shown) :]
        self._shown += new
        return new


def _finish_reason(completion: Completion) -> str:
    return "length" if completion.finish_reason == FINISH_LENGTH else "stop"


def decode_continuation(model: InferenceModel, prompt: Sequence[int]) -> Decode:
    """Decodes what follows a prompt. The last tokens of the prompt are decoded with it, because a tokenizer may drop
    the space before the first word of a text."""
    tokenizer, tail = model.renderer.tokenizer, list(prompt[-8:])
    before = str(tokenizer.decode(tail, skip_special_tokens=True))

    def decode(ids: Sequence[int]) -> str:
        return str(tokenizer.decode([*tail, *ids], skip_special_tokens=True))[len(before) :]

    return decode


# Log probabilities, as the two endpoints write them.


def chat_logprobs(model: InferenceModel, tokens: Sequence[TokenLogprob]) -> dict[str, Any]:
    def entry(token: int, logprob: float) -> dict[str, Any]:
        text = _token_text(model, token)
        is_whole = "\N{REPLACEMENT CHARACTER}" not in text  # else a part of a character
        return {"token": text, "logprob": finite(logprob), "bytes": list(text.encode()) if is_whole else None}

    content = [
        {**entry(each.token, each.logprob), "top_logprobs": [entry(*likely) for likely in each.top]} for each in tokens
    ]
    return {"content": content, "refusal": None}


def completion_logprobs(model: InferenceModel, tokens: Sequence[TokenLogprob], offset: int) -> dict[str, Any]:
    """`offset`: characters of the answer before these tokens."""
    texts = [_token_text(model, each.token) for each in tokens]
    offsets = [offset + sum(map(len, texts[:i])) for i in range(len(texts))]
    return {
        "tokens": texts,
        "token_logprobs": [finite(each.logprob) for each in tokens],
        "top_logprobs": [{_token_text(model, token): finite(value) for token, value in each.top} for each in tokens],
        "text_offset": offsets,
    }


def _token_text(model: InferenceModel, token: int) -> str:
    return str(model.renderer.tokenizer.decode([token]))
