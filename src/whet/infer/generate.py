"""Answers: prompts in, tokens out."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import nn

from whet.core.errors import WhetError
from whet.infer.engine import Answer, Ask, Engine
from whet.infer.plain import answer_plainly
from whet.infer.sampling import Sampling
from whet.infer.served import what_is_asked
from whet.infer.tools import Tools
from whet.model.modes import evaluating

__all__ = ["Answer", "Sampling", "answers", "generate"]


def generate(
    model: nn.Module, prompts: Sequence[Sequence[int]], stop_ids: Sequence[int], pad_id: int, sampling: Sampling,
    batch: int = 32, done: Callable[[int], None] = lambda n: None, *, tools: Tools | None = None,
    text: Callable[[Sequence[int]], str] | None = None, limits: Sequence[int] | None = None,
) -> list[list[int]]:  # fmt: skip
    """The answer to each prompt, without its end-of-turn token. `done` is told how many answers were finished.

    An answer depends on model, prompt and sampling, not on the prompts beside it. `text` decodes tokens, for
    `sampling.stop`; `limits`: the most tokens of each answer, where they differ from `sampling.max_new_tokens`.
    """
    found = answers(model, prompts, stop_ids, pad_id, sampling, batch, done, tools=tools, text=text, limits=limits)
    return [answer.ids for answer in found]


@torch.inference_mode()
def answers(
    model: nn.Module, prompts: Sequence[Sequence[int]], stop_ids: Sequence[int], pad_id: int, sampling: Sampling,
    batch: int = 32, done: Callable[[int], None] = lambda n: None, *, tools: Tools | None = None,
    text: Callable[[Sequence[int]], str] | None = None, limits: Sequence[int] | None = None,
    heard: Callable[[int, int], None] | None = None,
) -> list[Answer]:  # fmt: skip
    """The same with the reason why each answer ended: `end` (a stop token), `length` or `string`. `heard` is called
    with (number of the prompt, token) for every token as it comes."""
    if not prompts:
        return []
    if sampling.stop and text is None:
        raise WhetError("stop: texts that end an answer are looked for in text: give a function that decodes tokens")
    limits = _within_context(model, prompts, limits or [sampling.max_new_tokens] * len(prompts))
    ask = Ask(sampling, frozenset(stop_ids), text, tools, heard)
    with evaluating(model):
        seen = what_is_asked(model, max(map(len, prompts)) + max(limits))
        if seen is None:
            return answer_plainly(model, prompts, limits, pad_id, ask, batch, done)
        return Engine(model, ask, seen).run(prompts, limits, batch, done)


def context_of(model: nn.Module) -> int | None:
    """How many tokens the model can read and write together; None: no limit is known."""
    config = model.config.get_text_config()  # type: ignore[operator, union-attr]
    return getattr(config, "max_position_embeddings", None)


def _within_context(model: nn.Module, prompts: Sequence[Sequence[int]], limits: Sequence[int]) -> list[int]:
    """The limits, lowered where prompt and answer together would not fit."""
    context = context_of(model) or 1 << 62
    for prompt in prompts:
        if not prompt:
            raise WhetError("a prompt has no tokens, so there is nothing to continue; begin with the model's BOS token")
        if len(prompt) >= context:
            raise WhetError(
                f"a prompt has {len(prompt):,} tokens and the model reads {context:,} (max_position_embeddings), so "
                "nothing is left for an answer. Shorten it, or use a model with a longer context"
            )
    return [min(limit, context - len(prompt)) for prompt, limit in zip(prompts, limits, strict=True)]
