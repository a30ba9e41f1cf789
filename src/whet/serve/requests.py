"""The bodies of requests: what OpenAI's API allows, checked by type and range. What whet cannot do is refused by name,
because ignoring it would change the answer."""

from __future__ import annotations

import json
import math
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from whet.core.display import is_valid_text
from whet.inference.sampling import Sampling
from whet.web.request_guard import Rejection

_GREEDY_BELOW = 1e-4
"""Dividing logits by a smaller temperature overflows; the most likely token has all the probability long before."""
_WITHOUT_EFFECT = (
    "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention",
)  # fmt: skip
"""Fields for OpenAI's own service, which do not change an answer."""
_NEUTRAL_VALUES: dict[str, tuple[Any, ...]] = {
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "logit_bias": ({},),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "functions": ([],),
    "function_call": ("none",),
    "echo": (False,),
    "suffix": ("",),
    "best_of": (1,),
}
"""Fields that whet has not, with the values that mean the same as leaving them out."""


class StreamOptions(BaseModel):
    """What a stream contains besides the answer."""

    model_config = ConfigDict(strict=True, extra="forbid")
    include_usage: bool = False
    include_obfuscation: bool | None = None


class GenerationRequest(BaseModel):
    """What both endpoints take. top_k, min_p and repetition_penalty are whet's, as in `whet chat`."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)
    model: str
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    stop: str | list[str] | None = None
    seed: int | None = None
    n: int | None = Field(default=None, ge=1, le=128)
    max_tokens: int | None = Field(default=None, ge=1)
    temperature: float | None = Field(default=None, ge=0, le=2)
    top_p: float | None = Field(default=None, ge=0, le=1)
    top_k: int | None = Field(default=None, ge=0)
    min_p: float | None = Field(default=None, ge=0, le=1)
    repetition_penalty: float | None = Field(default=None, ge=0.01, le=100)

    @property
    def stop_strings(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    @property
    def limit(self) -> int | None:
        """The maximum number of tokens of an answer; None: what the context leaves."""
        return self.max_tokens

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    def sampling(self, seed: int) -> Sampling:
        """Temperature 1 and no filters unless the request says otherwise, as in OpenAI's API."""
        temperature = 1.0 if self.temperature is None else self.temperature
        return Sampling(
            temperature=0.0 if temperature < _GREEDY_BELOW else temperature,
            top_k=self.top_k or 0,
            seed=seed,
            top_p=1.0 if self.top_p is None else max(self.top_p, 1e-9),
            min_p=self.min_p or 0.0,
            repetition_penalty=self.repetition_penalty or 1.0,
            stop=self.stop_strings,
        )


class ChatRequest(GenerationRequest):
    """`POST /v1/chat/completions`. The messages and tools are checked by the reader that training uses."""

    messages: list[Any] = Field(min_length=1)
    tools: list[Any] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = Field(default=None, ge=0, le=20)
    max_completion_tokens: int | None = Field(default=None, ge=1)

    @property
    def limit(self) -> int | None:
        return self.max_completion_tokens if self.max_completion_tokens is not None else self.max_tokens


class CompletionRequest(GenerationRequest):
    """`POST /v1/completions`: text or token ids to continue, without a chat template."""

    prompt: str | list[str] | list[int] | list[list[int]]
    logprobs: int | None = Field(default=None, ge=0, le=20)


R = TypeVar("R", bound=GenerationRequest)


def parse_request(kind: type[R], body: bytes) -> R:
    """The request; a Rejection names the field that is wrong."""
    fields = _parse_json(body)
    if not isinstance(fields, dict):
        raise Rejection(400, "the body must be a JSON object")
    for name in (*_WITHOUT_EFFECT, *(set(_NEUTRAL_VALUES) & set(fields))):
        value = fields.pop(name, None)
        if name in _NEUTRAL_VALUES and value is not None and value not in _NEUTRAL_VALUES[name]:
            raise Rejection(400, f"{name}: whet does not support this; leave it out", name, "unsupported_parameter")
    try:
        request = kind.model_validate(fields)
    except ValidationError as error:
        raise _as_rejection(error) from None
    except RecursionError:
        raise Rejection(400, "the body is nested too deeply") from None
    if len(request.stop_strings) > 16 or not all(text and is_valid_text(text) for text in request.stop_strings):
        raise Rejection(400, "stop: give at most 16 strings, none of them empty or with NUL or lone surrogates", "stop")
    return request


def _parse_json(body: bytes) -> Any:
    def refuse(constant: str) -> None:
        raise ValueError(f"{constant} is not JSON")

    try:
        return json.loads(body.decode("utf-8"), parse_constant=refuse)
    except UnicodeDecodeError:
        raise Rejection(400, "the body is not UTF-8") from None
    except RecursionError:
        raise Rejection(400, "the body is nested too deeply") from None
    except ValueError as error:
        raise Rejection(400, f"the body is not JSON: {str(error)[:200]}") from None


def _as_rejection(error: ValidationError) -> Rejection:
    """The first problem, by the name of its field."""
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    name = str(first["loc"][0]) if first["loc"] else None
    if first["type"] == "extra_forbidden":
        return Rejection(400, f"{name}: whet has no such parameter; leave it out", name, "unknown_parameter")
    if first["type"] == "missing":
        return Rejection(400, f"{name}: this parameter is missing", name, "missing_required_parameter")
    return Rejection(400, f"{name}: {first['msg'][0].lower()}{first['msg'][1:]}", name, "invalid_value")


def finite(number: float) -> float:
    """A log probability as JSON can write it; OpenAI's API, too, has -9999 for one that is out of reach."""
    return number if math.isfinite(number) else -9999.0
