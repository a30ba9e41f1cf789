"""Generation: prompts in, token ids out, by the engine or, for models it does not support, by transformers' `generate`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from whet.core.errors import WhetError
from whet.core.heartbeat import PHASE
from whet.inference.calculator_tool import Tool
from whet.inference.engine import (
    FINISH_END,
    FINISH_LENGTH,
    FINISH_STRING,
    Completion,
    Engine,
    GenerationOptions,
    truncate_at_stop_string,
)
from whet.inference.kv_cache import probe_kv_cache
from whet.inference.sampling import Sampling, rng_keys
from whet.model.attention import native_attention
from whet.model.modules import eval_mode

# Answers through transformers' own generation, for models that slots do not serve.

_NO_TOKEN_ID = 1 << 30
"""No token's id: without any, transformers would take the model's own."""


def generate_with_transformers(
    model: nn.Module, prompts: Sequence[Sequence[int]], limits: Sequence[int], pad_id: int, ask: GenerationOptions, batch: int,
    done: Callable[[int], None],
) -> list[Completion]:  # fmt: skip
    """Prompts of the same length share a batch: a model with state would take padding for text. Sampled ones are alone,
    because torch's random numbers depend on the batch."""
    if ask.tools is not None:
        raise WhetError(
            f"model.path: tools cannot be used with this model ({type(model).__name__}): it keeps a state or cache of "
            "its own kind, into which whet cannot put their results. Ask it without tools"
        )
    answers = [Completion() for _ in prompts]
    keys = rng_keys(prompts, ask.sampling.seed)
    alone = ask.sampling.temperature > 0 or ask.heard is not None
    with native_attention(model):
        for numbers in _equal_length_batches(prompts, limits, 1 if alone else batch):
            PHASE.enter("answering prompts")
            torch.manual_seed(keys[numbers[0]])
            for number, ids in zip(
                numbers, _transformers_generate(model, prompts, limits, pad_id, ask, numbers), strict=True
            ):
                answers[number] = _to_completion(ids, limits[number], ask)
            done(len(numbers))
    return answers


def _equal_length_batches(prompts: Sequence[Sequence[int]], limits: Sequence[int], batch: int) -> list[list[int]]:
    """Numbers of prompts that share length and limit, at most `batch` together."""
    groups: list[list[int]] = []
    for number in sorted(range(len(prompts)), key=lambda i: (len(prompts[i]), limits[i], i)):
        first = groups[-1][0] if groups else None
        alike = first is not None and (len(prompts[first]), limits[first]) == (len(prompts[number]), limits[number])
        if alike and len(groups[-1]) < batch:
            groups[-1].append(number)
        else:
            groups.append([number])
    return groups


def _transformers_generate(
    model: nn.Module,
    prompts: Sequence[Sequence[int]],
    limits: Sequence[int],
    pad_id: int,
    ask: GenerationOptions,
    numbers: list[int],
) -> list[list[int]]:
    from transformers import GenerationConfig

    sampling = ask.sampling
    options: dict[str, Any] = {"repetition_penalty": sampling.repetition_penalty}
    if sampling.temperature > 0:
        options |= {"temperature": sampling.temperature, "top_k": sampling.top_k, "top_p": sampling.top_p}
        options |= {"min_p": sampling.min_p} if sampling.min_p > 0 else {}
    settings = GenerationConfig(
        max_new_tokens=limits[numbers[0]], do_sample=sampling.temperature > 0,
        eos_token_id=sorted(ask.stops) or _NO_TOKEN_ID, pad_token_id=pad_id, **options,
    )  # fmt: skip
    tokens = torch.tensor([list(prompts[i]) for i in numbers]).to(next(model.parameters()).device)
    width = tokens.shape[1]

    def found_string(ids: Tensor, scores: Any, **_: Any) -> Tensor:
        assert ask.text is not None
        ended = [truncate_at_stop_string(row, sampling.stop, ask.text) is not None for row in ids[:, width:].tolist()]
        return torch.tensor(ended, device=ids.device)

    output = model.generate(  # type: ignore[operator]
        tokens, attention_mask=torch.ones_like(tokens), generation_config=settings,
        stopping_criteria=[found_string] if sampling.stop else None,
        streamer=_TokenStreamer(numbers[0], ask) if ask.heard is not None else None,
    )  # fmt: skip
    return output[:, width:].tolist()


class _TokenStreamer:
    """Passes tokens on; the first call has the prompt."""

    def __init__(self, number: int, ask: GenerationOptions) -> None:
        self._number, self._ask, self._is_prompt = number, ask, True

    def put(self, tokens: Tensor) -> None:
        if not self._is_prompt and self._ask.heard is not None:
            for token in tokens.flatten().tolist():
                if token not in self._ask.stops:
                    self._ask.heard(self._number, token)
        self._is_prompt = False

    def end(self) -> None:
        pass


def _to_completion(ids: list[int], limit: int, ask: GenerationOptions) -> Completion:
    end = next((i for i, token in enumerate(ids) if token in ask.stops), None)
    last = () if end is None else (ids[end],)
    ids = ids if end is None else ids[:end]
    kept = truncate_at_stop_string(ids, ask.sampling.stop, ask.text) if ask.sampling.stop and ask.text else None
    if kept is not None:
        return Completion(kept[0], FINISH_STRING, text=kept[1])
    return Completion(ids[:limit], FINISH_LENGTH if end is None else FINISH_END, last)


# Answers: prompts in, tokens out.


def generate(
    model: nn.Module, prompts: Sequence[Sequence[int]], stop_ids: Sequence[int], pad_id: int, sampling: Sampling,
    batch: int = 32, done: Callable[[int], None] = lambda n: None, *, tools: Tool | None = None,
    text: Callable[[Sequence[int]], str] | None = None, limits: Sequence[int] | None = None,
) -> list[list[int]]:  # fmt: skip
    """The answer to each prompt, without its end-of-turn token. `done` is told how many answers were finished.

    An answer depends on model, prompt and sampling, not on the prompts beside it. `text` decodes tokens, for
    `sampling.stop`; `limits`: the most tokens of each answer, where they differ from `sampling.max_new_tokens`.
    """
    found = generate_completions(
        model, prompts, stop_ids, pad_id, sampling, batch, done, tools=tools, text=text, limits=limits
    )
    return [answer.ids for answer in found]


@torch.inference_mode()
def generate_completions(
    model: nn.Module, prompts: Sequence[Sequence[int]], stop_ids: Sequence[int], pad_id: int, sampling: Sampling,
    batch: int = 32, done: Callable[[int], None] = lambda n: None, *, tools: Tool | None = None,
    text: Callable[[Sequence[int]], str] | None = None, limits: Sequence[int] | None = None,
    heard: Callable[[int, int], None] | None = None,
) -> list[Completion]:  # fmt: skip
    """The same with the reason why each answer ended: `end` (a stop token), `length` or `string`. `heard` is called
    with (number of the prompt, token) for every token as it comes."""
    if not prompts:
        return []
    if sampling.stop and text is None:
        raise WhetError("stop: texts that end an answer are looked for in text: give a function that decodes tokens")
    limits = _clamp_to_context(model, prompts, limits or [sampling.max_new_tokens] * len(prompts))
    ask = GenerationOptions(sampling, frozenset(stop_ids), text, tools, heard)
    with eval_mode(model):
        seen = probe_kv_cache(model, max(map(len, prompts)) + max(limits))
        if seen is None:
            return generate_with_transformers(model, prompts, limits, pad_id, ask, batch, done)
        return Engine(model, ask, seen).run(prompts, limits, batch, done)


def context_length(model: nn.Module) -> int | None:
    """How many tokens the model can read and write together; None: no limit is known."""
    config = model.config.get_text_config()  # type: ignore[operator, union-attr]
    return getattr(config, "max_position_embeddings", None)


def _clamp_to_context(model: nn.Module, prompts: Sequence[Sequence[int]], limits: Sequence[int]) -> list[int]:
    """The limits, lowered where prompt and answer together would not fit."""
    context = context_length(model) or 1 << 62
    for prompt in prompts:
        if not prompt:
            raise WhetError("a prompt has no tokens, so there is nothing to continue; begin with the model's BOS token")
        if len(prompt) >= context:
            raise WhetError(
                f"a prompt has {len(prompt):,} tokens and the model reads {context:,} (max_position_embeddings), so "
                "nothing is left for an answer. Shorten it, or use a model with a longer context"
            )
    return [min(limit, context - len(prompt)) for prompt, limit in zip(prompts, limits, strict=True)]
