"""Sampling of the next token: parameters, filters, and random numbers that depend on seed and prompt alone."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from whet.core.display import is_valid_text
from whet.core.errors import WhetError


@dataclass(frozen=True, slots=True)
class Sampling:
    """How to choose the next token and when to stop. Temperature 0 is greedy and ignores top_k, top_p and min_p.

    The order is that of transformers: repetition_penalty, temperature, top_k, top_p, min_p.
    """

    temperature: float = 0.0
    top_k: int = 50
    """Sample from the `top_k` most likely tokens; 0: from all."""
    seed: int = 0
    max_new_tokens: int = 256
    top_p: float = 1.0
    """Sample from the fewest most likely tokens whose probabilities add up to `top_p`; 1: from all."""
    min_p: float = 0.0
    """Drop tokens less likely than `min_p` times the most likely one; 0: none."""
    repetition_penalty: float = 1.0
    """Divides positive logits of tokens already in the sequence, and multiplies negative ones; 1: no effect."""
    stop: tuple[str, ...] = ()
    """Strings that end a completion."""

    def __post_init__(self) -> None:
        limits = {
            "temperature": self.temperature >= 0,
            "top_k": self.top_k >= 0,
            "max_new_tokens": self.max_new_tokens >= 1,
            "top_p": 0 < self.top_p <= 1,
            "min_p": 0 <= self.min_p <= 1,
            "repetition_penalty": self.repetition_penalty > 0,
        }
        for name, holds in limits.items():
            if not holds:
                raise WhetError(f"{name}: {getattr(self, name)} is out of range; {_VALID_RANGES[name]}")
        if "" in self.stop:
            raise WhetError("stop: an empty string would end every answer at once; remove it")
        if wrong := [text for text in self.stop if not is_valid_text(text)]:
            raise WhetError(f"stop: {wrong[0]!r} contains NUL or a character that is not valid UTF-8; remove it")


_VALID_RANGES = {
    "temperature": "it must be 0 (greedy) or more",
    "top_k": "it must be 0 (all tokens) or more",
    "max_new_tokens": "it must be 1 or more",
    "top_p": "it must be above 0 and at most 1",
    "min_p": "it must be from 0 to 1",
    "repetition_penalty": "it must be above 0; 1 has no effect",
}


def sample_next_tokens(
    logits: Tensor, keys: Tensor, counts: Tensor, sampling: Sampling, seen: Tensor | None = None
) -> Tensor:
    """[N]: the next token for each row of logits [N, V].

    The random number of a row is a function of its key [N] and of the number of tokens sampled before, counts [N]; it
    does not depend on the other rows. `seen` [N, V]: the tokens that the repetition penalty applies to.
    """
    logits = logits.float()
    if seen is not None:
        penalty = sampling.repetition_penalty
        logits = torch.where(seen, torch.where(logits < 0, logits * penalty, logits / penalty), logits)
    if sampling.temperature == 0:
        return logits.argmax(dim=-1)
    weights, tokens = filtered_probabilities(logits, sampling)
    cumulative = weights.cumsum(dim=-1)
    total = cumulative[:, -1:]
    # strictly below the total, so that some cumulative sum exceeds it; the first that does has a non-zero weight
    target = torch.minimum(
        counter_based_uniform(keys, counts)[:, None] * total, torch.nextafter(total, torch.zeros_like(total))
    )
    index = (cumulative <= target).sum(dim=-1, keepdim=True)
    return (index if tokens is None else tokens.gather(1, index))[:, 0]


def filtered_probabilities(logits: Tensor, sampling: Sampling) -> tuple[Tensor, Tensor | None]:
    """(probabilities, tokens) [N, C]: the candidates left by the filters, not renormalised; tokens None: the vocabulary
    in its order. Sorting the vocabulary takes longer than a layer, so it happens only if a filter needs it."""
    logits = logits / sampling.temperature
    tokens = None
    if 0 < sampling.top_k < logits.shape[-1]:
        logits, tokens = logits.topk(sampling.top_k, dim=-1)
    elif sampling.top_p < 1:
        logits, tokens = logits.sort(dim=-1, descending=True)
    probabilities = logits.softmax(dim=-1)
    if sampling.top_p < 1:
        if tokens is None:  # top_k covers the vocabulary
            probabilities, tokens = probabilities.sort(dim=-1, descending=True)
        before = probabilities.cumsum(dim=-1) - probabilities
        probabilities = probabilities * (before < sampling.top_p)
    if sampling.min_p > 0:
        probabilities = probabilities * (probabilities >= sampling.min_p * probabilities.amax(dim=-1, keepdim=True))
    return probabilities, tokens


def rng_keys(prompts: Sequence[Sequence[int]], seed: int) -> list[int]:
    """A 64-bit key per prompt: a hash of the seed, the prompt and its repeat count, so that repeated prompts differ."""
    repeats: dict[tuple[int, ...], int] = {}
    keys = []
    for prompt in prompts:
        ids = tuple(prompt)
        repeat = repeats[ids] = repeats.get(ids, -1) + 1
        digest = hashlib.blake2b(repr((seed, repeat, ids)).encode(), digest_size=8).digest()
        keys.append(int.from_bytes(digest, "little", signed=True))
    return keys


def counter_based_uniform(keys: Tensor, counts: Tensor) -> Tensor:
    """[N] numbers in [0, 1), by splitmix64. With torch's generator they would depend on the rest of the batch."""
    mixed = keys + counts * -0x61C8864680B583EB
    mixed = (mixed ^ _logical_shift_right(mixed, 30)) * -0x40A7B892E31B1A47
    mixed = (mixed ^ _logical_shift_right(mixed, 27)) * -0x6B2FB644ECCEEE15
    mixed = mixed ^ _logical_shift_right(mixed, 31)
    return _logical_shift_right(mixed, 40).to(torch.float32) * 2.0**-24


def _logical_shift_right(numbers: Tensor, by: int) -> Tensor:
    """torch's integers are signed, so `>>` alone would shift the sign bit in."""
    return (numbers >> by) & ((1 << (64 - by)) - 1)
