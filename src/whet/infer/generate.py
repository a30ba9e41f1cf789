"""Answers: prompts in, tokens out, through transformers' own generation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from whet.core.whereabouts import HERE
from whet.model.attention import plain


@dataclass(frozen=True, slots=True)
class Sampling:
    """How the next token is chosen; temperature 0 is greedy."""

    temperature: float = 0.0
    top_k: int = 50
    seed: int = 0
    max_new_tokens: int = 256


@torch.inference_mode()
def generate(
    model: nn.Module, prompts: Sequence[Sequence[int]], stop_ids: Sequence[int], pad_id: int, sampling: Sampling,
    batch: int = 32, done: Callable[[int], None] = lambda n: None,
) -> list[list[int]]:  # fmt: skip
    """The answer to each prompt, without its end-of-turn token. Prompts of like length share a batch."""
    from transformers import GenerationConfig

    model.eval()
    settings = GenerationConfig(
        max_new_tokens=sampling.max_new_tokens, do_sample=sampling.temperature > 0,
        eos_token_id=list(stop_ids) or None, pad_token_id=pad_id,
        **({"temperature": sampling.temperature, "top_k": sampling.top_k} if sampling.temperature > 0 else {}),
    )  # fmt: skip
    device = next(model.parameters()).device
    torch.manual_seed(sampling.seed)
    order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
    answers: list[list[int]] = [[] for _ in prompts]
    with plain(model):
        for start in range(0, len(order), batch):
            HERE.at("answering prompts")
            numbers = order[start : start + batch]
            width = max(len(prompts[i]) for i in numbers)
            tokens = torch.tensor([[pad_id] * (width - len(prompts[i])) + list(prompts[i]) for i in numbers])
            mask = torch.tensor([[0] * (width - len(prompts[i])) + [1] * len(prompts[i]) for i in numbers])
            output = model.generate(  # type: ignore[operator]
                tokens.to(device), attention_mask=mask.to(device), generation_config=settings
            )
            for i, row in zip(numbers, output[:, width:].tolist(), strict=True):
                answers[i] = _until_stop(row, stop_ids)
            done(len(numbers))
    return answers


def _until_stop(tokens: list[int], stop_ids: Sequence[int]) -> list[int]:
    return tokens[: next((i for i, token in enumerate(tokens) if token in stop_ids), len(tokens))]
