"""`/v1/chat/completions` and `/v1/completions`: from a request to sequences, and from tokens to the response."""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

from whet.core.console import warn
from whet.core.display import is_valid_text
from whet.core.errors import BadRecordError, WhetError
from whet.data.read.records.messages import parse_message_list
from whet.data.read.records.tools import parse_tools
from whet.inference.engine import GenerationOptions
from whet.inference.generate import context_length
from whet.inference.inference_model import InferenceModel
from whet.inference.online_engine import OnlineSequence, TokenLogprob
from whet.inference.sampling import rng_keys
from whet.serve.answers import (
    AnswerText,
    Ending,
    ToolAnswerText,
    chat_logprobs,
    completion_logprobs,
    decode_continuation,
)
from whet.serve.requests import ChatRequest, CompletionRequest, GenerationRequest
from whet.serve.service import Generation, GenerationService
from whet.serve.tool_calls import ToolCallFormat, find_tool_call_format
from whet.web.request_guard import Rejection

_CHARACTERS_PER_TOKEN = 8
_FORCED_CALL = (
    "tool_choice: whet supports auto and none. It does not constrain what a model writes, so it cannot promise a call; "
    "ask for it in a message"
)
_CUT_TOKENS = 64
"""So many tokens may be others where a text is cut."""


@dataclass(eq=False)
class ServedModel:
    """A model under the name that requests use; `adapter` is what the engine calls its adapter."""

    id: str
    model: InferenceModel
    adapter: str | None = None
    has_logprobs: bool = True
    created: int = field(default_factory=lambda: int(time.time()))

    @cached_property
    def tool_call_format(self) -> ToolCallFormat | None:
        """None: calls are passed on as text."""
        found = find_tool_call_format(self.model.renderer)
        if found is None:
            warn(
                f"{self.id}: its chat template writes tool calls in a way that whet cannot read, so answers have them "
                "as text"
            )
        return found

    def as_dict(self) -> dict[str, Any]:
        return {"id": self.id, "object": "model", "created": self.created, "owned_by": "whet"}


@dataclass(slots=True)
class Choice:
    """One of the answers of a response."""

    index: int
    sequence: OnlineSequence
    answer: AnswerText | ToolAnswerText
    received: int = 0
    """Tokens that arrived; the engine may be ahead."""
    reported: int = 0
    """Tokens whose log probabilities were sent."""
    length: int = 0
    """Characters that were sent."""

    def new_logprobs(self) -> list[TokenLogprob]:
        """Those of the tokens since the last call; neither the stop token nor a stop string is part of the answer."""
        end = min(self.received, len(self.sequence.completion.ids))
        new = (self.sequence.logprobs or [])[self.reported : end]
        self.reported = end
        return new


class Endpoint:
    """One request: its choices, and the response whole or in chunks."""

    prefix: str
    whole: str
    chunk: str

    def __init__(self, served: ServedModel, request: GenerationRequest, service: GenerationService) -> None:
        self.served, self.request, self.service = served, request, service
        self.choices: list[Choice] = []
        self.prompts: list[list[int]] = []
        self._context = context_length(served.model.model) or 1 << 30
        self._head = {"id": f"{self.prefix}-{secrets.token_hex(12)}", "created": int(time.time()), "model": served.id}

    async def encode(self, encode: Callable[[str], list[int]], text: str) -> list[int]:
        """The tokens of a prompt, encoded in another thread. Encoding megabytes takes long: of a long text a part is
        encoded first, which may show that it does not fit."""
        size = _CHARACTERS_PER_TOKEN * self._context
        while size < len(text):
            if len(await asyncio.to_thread(encode, text[:size])) > self._context + _CUT_TOKENS:
                raise self._too_long(f"more than {self._context:,}")
            size *= 2
        return await asyncio.to_thread(encode, text)

    def _too_long(self, tokens: str) -> Rejection:
        return Rejection(
            400, f"the prompt has {tokens} tokens, the model's context {self._context:,}: no room for an answer",
            self.prompt_field, "context_length_exceeded",
        )  # fmt: skip

    def add_prompt(self, prompt: list[int], top_logprobs: int | None) -> None:
        """Add the request's choices for one prompt."""
        request, model = self.request, self.served.model
        if not prompt:
            raise Rejection(400, "the prompt has no tokens", self.prompt_field)
        context = self._context
        if len(prompt) >= context:
            raise self._too_long(f"{len(prompt):,}")
        if top_logprobs is not None and not self.served.has_logprobs:
            raise Rejection(400, "logprobs: not available for this model, which has no KV cache", "logprobs")
        count = request.n or 1
        if len(self.choices) + count > self.service.max_requests:
            raise Rejection(400, f"n: a request may have {self.service.max_requests} answers here", "n")
        limit = min(context - len(prompt), context if request.limit is None else request.limit)
        seed = secrets.randbits(62) if request.seed is None else request.seed
        self.prompts.append(prompt)
        for number, key in enumerate(rng_keys([prompt] * count, seed)):
            decode = self.decoder(prompt)
            sequence = OnlineSequence(
                0, prompt, key, limit, GenerationOptions(request.sampling(seed + number), frozenset()),
                adapter=self.served.adapter, top_logprobs=top_logprobs, logprobs=None if top_logprobs is None else [],
            )  # fmt: skip

            def on_token(_: int, token: int, sequence: OnlineSequence = sequence) -> None:
                self.service.on_token(sequence, token)

            sequence.options = GenerationOptions(
                sequence.options.sampling, frozenset(model.stop_ids), decode, on_token=on_token
            )
            self.choices.append(Choice(len(self.choices), sequence, self.answer(decode)))

    @property
    def sequences(self) -> list[OnlineSequence]:
        return [choice.sequence for choice in self.choices]

    async def events(self, generation: Generation) -> AsyncIterator[dict[str, Any]]:
        """The chunks of a stream."""
        for choice in self.choices:
            if first := self.first_delta():
                yield self._chunk([self.delta(choice, first)])
        async for number, token in generation:
            choice = self.choices[number]
            if token is None:
                ending = choice.answer.finish(choice.sequence.completion)
                for part in self.ending_deltas(choice, ending):
                    yield self._chunk([part])
                yield self._chunk([self.delta(choice, None, ending.finish_reason)])
                continue
            choice.received += 1
            text = choice.answer.push(token)
            if text or choice.sequence.logprobs is not None:
                yield self._chunk([self.delta(choice, text)])
        if self.request.include_usage:
            yield {**self._chunk([]), "usage": self.usage()}

    async def result(self, generation: Generation) -> dict[str, Any]:
        """The whole response."""
        texts = [""] * len(self.choices)
        endings: dict[int, Ending] = {}
        async for number, token in generation:
            if token is None:
                endings[number] = self.choices[number].answer.finish(self.choices[number].sequence.completion)
                texts[number] += endings[number].text
            else:
                self.choices[number].received += 1
                texts[number] += self.choices[number].answer.push(token)
        choices = [self.whole_choice(choice, texts[choice.index], endings[choice.index]) for choice in self.choices]
        return {**self._head, "object": self.whole, "choices": choices, "usage": self.usage()}

    def _chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {**self._head, "object": self.chunk, "choices": choices}

    def usage(self) -> dict[str, int]:
        prompt = sum(map(len, self.prompts))
        generated = sum(len(sequence.completion.ids) for sequence in self.sequences)
        return {"prompt_tokens": prompt, "completion_tokens": generated, "total_tokens": prompt + generated}

    # What the two endpoints do differently

    prompt_field: str

    def decoder(self, prompt: list[int]) -> Any:
        raise NotImplementedError

    def answer(self, decode: Any) -> AnswerText | ToolAnswerText:
        return AnswerText(decode, self.request.stop_strings)

    def first_delta(self) -> Any:
        return None

    def delta(self, choice: Choice, content: Any, finish_reason: str | None = None) -> dict[str, Any]:
        raise NotImplementedError

    def ending_deltas(self, choice: Choice, ending: Ending) -> list[dict[str, Any]]:
        return [self.delta(choice, ending.text)] if ending.text else []

    def whole_choice(self, choice: Choice, text: str, ending: Ending) -> dict[str, Any]:
        raise NotImplementedError


class ChatCompletion(Endpoint):
    """`POST /v1/chat/completions`"""

    prefix, whole, chunk, prompt_field = "chatcmpl", "chat.completion", "chat.completion.chunk", "messages"
    request: ChatRequest

    async def prepare(self) -> None:
        """Render the messages, in the main thread, where templates are limited; encode them in another."""
        request, renderer = self.request, self.served.model.renderer
        try:
            messages = parse_message_list(request.messages)
        except (BadRecordError, RecursionError) as error:
            raise Rejection(400, f"messages: {error}", "messages") from None
        self._tools = self._offered_tools()
        try:
            text = renderer.prompt_text(messages, self._tools)
        except (BadRecordError, WhetError) as error:
            raise Rejection(400, f"messages: {error}", "messages") from None
        prompt = await self.encode(renderer.encode_prompt, text)
        if request.top_logprobs is not None and not request.logprobs:
            raise Rejection(400, "top_logprobs: needs logprobs: true", "top_logprobs")
        self.add_prompt(prompt, (request.top_logprobs or 0) if request.logprobs else None)

    def _offered_tools(self) -> tuple[dict[str, Any], ...]:
        """The tools to render; none for tool_choice none."""
        choice = self.request.tool_choice
        if choice not in (None, "auto", "none"):
            raise Rejection(400, _FORCED_CALL, "tool_choice", "unsupported_value")
        try:
            tools = parse_tools(self.request.tools)
        except (BadRecordError, RecursionError) as error:
            raise Rejection(400, f"tools: {error}", "tools") from None
        if not tools or choice == "none":
            return ()
        try:
            self._format = self.served.tool_call_format
        except WhetError as error:
            raise Rejection(400, f"tools: {error}", "tools", "unsupported_parameter") from None
        return tools

    def decoder(self, prompt: list[int]) -> Any:
        if self._tools and self._format is None:  # the client finds the calls by their marks
            return partial(self.served.model.renderer.decode_answer, skip_special_tokens=False)
        return self.served.model.decode

    def answer(self, decode: Any) -> AnswerText | ToolAnswerText:
        if not self._tools or self._format is None:
            return super().answer(decode)
        parallel = self.request.parallel_tool_calls is not False
        return ToolAnswerText(self.served.model, self.request.stop_strings, self._format, self._tools, parallel)

    def first_delta(self) -> dict[str, Any]:
        return {"role": "assistant", "content": ""}

    def delta(self, choice: Choice, content: Any, finish_reason: str | None = None) -> dict[str, Any]:
        delta = content if isinstance(content, dict) else {} if content is None else {"content": content}
        found: dict[str, Any] = {"index": choice.index, "delta": delta, "finish_reason": finish_reason}
        logprobs = choice.new_logprobs()
        return {**found, "logprobs": chat_logprobs(self.served.model, logprobs) if logprobs else None}

    def ending_deltas(self, choice: Choice, ending: Ending) -> list[dict[str, Any]]:
        calls = [{"index": number, **call.as_dict()} for number, call in enumerate(ending.calls)]
        return super().ending_deltas(choice, ending) + [self.delta(choice, {"tool_calls": [call]}) for call in calls]

    def whole_choice(self, choice: Choice, text: str, ending: Ending) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": text, "refusal": None}
        if ending.calls:
            message |= {"content": text.strip() or None, "tool_calls": [call.as_dict() for call in ending.calls]}
        logprobs = None if choice.sequence.logprobs is None else chat_logprobs(self.served.model, choice.new_logprobs())
        return {
            "index": choice.index, "message": message, "logprobs": logprobs, "finish_reason": ending.finish_reason,
        }  # fmt: skip


class CompletionEndpoint(Endpoint):
    """`POST /v1/completions`"""

    prefix, whole, chunk, prompt_field = "cmpl", "text_completion", "text_completion", "prompt"
    request: CompletionRequest

    async def prepare(self) -> None:
        for prompt in self._prompts():
            ids = await self.encode(self._encode, prompt) if isinstance(prompt, str) else list(prompt)
            self.add_prompt(ids, self.request.logprobs)

    def _prompts(self) -> Sequence[str | Sequence[int]]:
        prompt: Any = self.request.prompt
        if isinstance(prompt, str) or (prompt and isinstance(prompt[0], int)):
            prompt = [prompt]
        if not prompt:
            raise Rejection(400, "prompt: give at least one", "prompt")
        size = len(self.served.model.renderer.tokenizer)
        for each in prompt:
            if isinstance(each, str):
                if not is_valid_text(each):
                    raise Rejection(400, "prompt: contains NUL or a lone surrogate; remove it", "prompt")
            elif any(not 0 <= token < size for token in each):
                raise Rejection(400, f"prompt: a token id is not one of the tokenizer's {size:,}", "prompt")
        return prompt

    def _encode(self, text: str) -> list[int]:
        tokenizer = self.served.model.renderer.tokenizer
        ids = list(tokenizer.backend_tokenizer.encode(text).ids)
        start = tokenizer.bos_token_id if tokenizer.bos_token_id is not None else tokenizer.eos_token_id
        return ids or ([] if start is None else [start])

    def decoder(self, prompt: list[int]) -> Any:
        return decode_continuation(self.served.model, prompt)

    def delta(self, choice: Choice, content: Any, finish_reason: str | None = None) -> dict[str, Any]:
        text, offset = content or "", choice.length
        choice.length += len(text)
        new = choice.new_logprobs()
        logprobs = completion_logprobs(self.served.model, new, offset) if new else None
        return {"index": choice.index, "text": text, "logprobs": logprobs, "finish_reason": finish_reason}

    def whole_choice(self, choice: Choice, text: str, ending: Ending) -> dict[str, Any]:
        return self.delta(choice, text, ending.finish_reason)


ENDPOINTS: Mapping[str, tuple[type[ChatCompletion | CompletionEndpoint], type[GenerationRequest]]] = {
    "/v1/chat/completions": (ChatCompletion, ChatRequest),
    "/v1/completions": (CompletionEndpoint, CompletionRequest),
}


def server_sent_event(value: Any) -> bytes:
    """One event of a stream."""
    return f"data: {json.dumps(value, ensure_ascii=False)}\n\n".encode("utf-8", "replace")
