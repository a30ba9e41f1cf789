"""`generate`: prompts in, completions out; by the engine or, for models it does not support, by transformers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from whet.core.distributed import seed_generators
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
from whet.model.modules import cache_works, eval_mode, without_generation_config
from whet.parallel.fsdp import is_sharded

_SMALL_BATCH = 32
_NO_TOKEN_ID = 1 << 30
"""Larger than any token id. With an empty eos_token_id transformers would fall back to the model's own."""


@torch.inference_mode()
def generate(
    model: nn.Module, prompts: Sequence[Sequence[int]], sampling: Sampling, stop_ids: Sequence[int] = (), *,
    pad_id: int = 0, batch_size: int | None = None, limits: Sequence[int] | None = None, tool: Tool | None = None,
    decode: Callable[[Sequence[int]], str] | None = None, on_token: Callable[[int, int], None] | None = None,
    on_finished: Callable[[int], None] = lambda count: None,
) -> list[Completion]:  # fmt: skip
    """A completion of each prompt; it depends on model, prompt and sampling, not on the other prompts of the batch.

    Args:
        stop_ids: tokens that end a completion; they are not part of it.
        batch_size: prompts in progress at a time, as far as memory allows; `default_batch_size` if absent.
        limits: the maximum number of new tokens for each prompt; `sampling.max_new_tokens` if absent.
        tool: inserts tokens into completions, such as the result of a calculation.
        decode: decodes tokens; required by `sampling.stop`.
        on_token: called with (index of the prompt, token) for every generated token.
        on_finished: called with the number of completions that have just finished.
    """
    if not prompts:
        return []
    if sampling.stop and decode is None:
        raise WhetError("stop: stop strings are matched in decoded text; pass `decode`, a function that decodes tokens")
    batch_size = batch_size or default_batch_size(model)
    limits = _clamp_to_context(model, prompts, limits or [sampling.max_new_tokens] * len(prompts))
    options = GenerationOptions(sampling, frozenset(stop_ids), decode, tool, on_token)
    with eval_mode(model):
        layers = probe_kv_cache(model, max(map(len, prompts)) + max(limits))
        if layers is None:
            batch_size = min(batch_size, _SMALL_BATCH)  # whose memory nothing bounds
            return _generate_with_transformers(model, prompts, limits, options, pad_id, batch_size, on_finished)
        return Engine(model, options, layers).run(prompts, limits, batch_size, on_finished)


def default_batch_size(model: nn.Module) -> int:
    """On an accelerator a small model decodes 1,024 sequences in little more time than 32, which a sharded model keeps:
    its ranks do not know how much memory the others have."""
    is_small = next(model.parameters()).device.type == "cpu" or any(is_sharded(module) for module in model.modules())
    return _SMALL_BATCH if is_small else 1024


def context_length(model: nn.Module) -> int | None:
    """The maximum number of tokens in a sequence (max_position_embeddings); None if the model has no such limit."""
    config = model.config.get_text_config()  # type: ignore[operator, union-attr]
    return getattr(config, "max_position_embeddings", None)


def _clamp_to_context(model: nn.Module, prompts: Sequence[Sequence[int]], limits: Sequence[int]) -> list[int]:
    """The limits, reduced where prompt and completion would exceed the context."""
    context = context_length(model) or 1 << 62
    for prompt in prompts:
        if not prompt:
            raise WhetError("a prompt is empty: it has no tokens to continue. Start with the model's BOS token")
        if len(prompt) >= context:
            raise WhetError(
                f"a prompt has {len(prompt):,} tokens, and the model's context is {context:,} "
                "(max_position_embeddings): no room for an answer. Shorten the prompt, or use another model"
            )
    return [min(limit, context - len(prompt)) for prompt, limit in zip(prompts, limits, strict=True)]


# Models that the KV cache does not support generate through transformers.


def _generate_with_transformers(
    model: nn.Module, prompts: Sequence[Sequence[int]], limits: Sequence[int], options: GenerationOptions, pad_id: int,
    batch_size: int, on_finished: Callable[[int], None],
) -> list[Completion]:  # fmt: skip
    """Only prompts of equal length share a batch: a recurrent model would read padding as text. Sampled and streamed
    ones run alone: torch's random numbers depend on the batch."""
    if options.tool is not None:
        raise WhetError(
            f"model.path: {type(model).__name__} does not support tools: whet cannot insert their results into its "
            "recurrent state or custom cache. Generate without tools"
        )
    completions = [Completion() for _ in prompts]
    keys = rng_keys(prompts, options.sampling.seed)
    alone = options.sampling.temperature > 0 or options.on_token is not None
    with native_attention(model):
        for batch in _equal_length_batches(prompts, limits, 1 if alone else batch_size):
            PHASE.enter("generating")
            seed_generators(keys[batch[0]], next(model.parameters()).device)
            rows = _transformers_generate(
                model, [list(prompts[i]) for i in batch], limits[batch[0]], options, pad_id, batch[0]
            )
            for i, ids in zip(batch, rows, strict=True):
                completions[i] = _to_completion(ids, limits[i], options)
            on_finished(len(batch))
    return completions


def _equal_length_batches(prompts: Sequence[Sequence[int]], limits: Sequence[int], batch_size: int) -> list[list[int]]:
    """Indices of prompts with equal length and limit, at most `batch_size` in a batch."""
    batches: list[list[int]] = []
    for i in sorted(range(len(prompts)), key=lambda i: (len(prompts[i]), limits[i], i)):
        first = batches[-1][0] if batches else None
        alike = first is not None and (len(prompts[first]), limits[first]) == (len(prompts[i]), limits[i])
        if alike and len(batches[-1]) < batch_size:
            batches[-1].append(i)
        else:
            batches.append([i])
    return batches


def _transformers_generate(
    model: nn.Module, prompts: list[list[int]], limit: int, options: GenerationOptions, pad_id: int, first_index: int
) -> list[list[int]]:
    """The new tokens of each prompt; `first_index` is what `on_token` is called with."""
    from transformers import GenerationConfig

    sampling = options.sampling
    settings: dict[str, Any] = {"repetition_penalty": sampling.repetition_penalty}
    if sampling.temperature > 0:
        settings |= {"temperature": sampling.temperature, "top_k": sampling.top_k, "top_p": sampling.top_p}
        settings |= {"min_p": sampling.min_p} if sampling.min_p > 0 else {}
    config = GenerationConfig(
        max_new_tokens=limit, do_sample=sampling.temperature > 0, eos_token_id=sorted(options.stop_ids) or _NO_TOKEN_ID,
        pad_token_id=pad_id, use_cache=cache_works(model), **settings,
    )  # fmt: skip
    tokens = torch.tensor(prompts).to(next(model.parameters()).device)
    width = tokens.shape[1]

    def contains_stop_string(ids: Tensor, scores: Any, **_: Any) -> Tensor:
        assert options.decode is not None
        rows = ids[:, width:].tolist()
        found = [truncate_at_stop_string(row, sampling.stop, options.decode) is not None for row in rows]
        return torch.tensor(found, device=ids.device)

    with without_generation_config(model):
        output = model.generate(  # type: ignore[operator]
            tokens, attention_mask=torch.ones_like(tokens), generation_config=config,
            stopping_criteria=[contains_stop_string] if sampling.stop else None,
            streamer=_TokenStreamer(first_index, options) if options.on_token is not None else None,
        )  # fmt: skip
    return output[:, width:].tolist()


class _TokenStreamer:
    """transformers' streamer protocol: the first call to `put` has the prompt."""

    def __init__(self, index: int, options: GenerationOptions) -> None:
        self._index, self._options, self._is_prompt = index, options, True

    def put(self, tokens: Tensor) -> None:
        if not self._is_prompt and self._options.on_token is not None:
            for token in tokens.flatten().tolist():
                if token not in self._options.stop_ids:
                    self._options.on_token(self._index, token)
        self._is_prompt = False

    def end(self) -> None:
        pass


def _to_completion(ids: list[int], limit: int, options: GenerationOptions) -> Completion:
    """The tokens that transformers returned, cut at the first stop token or stop string."""
    end = next((i for i, token in enumerate(ids) if token in options.stop_ids), None)
    stop_token = () if end is None else (ids[end],)
    ids = ids[:end]
    strings = options.sampling.stop
    kept = truncate_at_stop_string(ids, strings, options.decode) if strings and options.decode else None
    if kept is not None:
        return Completion(kept[0], FINISH_STRING, text=kept[1])
    return Completion(ids[:limit], FINISH_LENGTH if end is None else FINISH_END, stop_token)
