"""Sampling of the next token: parameters, filters, and a random number that depends on the prompt alone."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from whet.core.errors import WhetError


@dataclass(frozen=True, slots=True)
class Sampling:
    """How the next token is chosen and when to stop; temperature 0 is greedy, and the filters do nothing then.

    They are applied in this order, as transformers does: penalty, temperature, top_k, top_p, min_p.
    """

    temperature: float = 0.0
    top_k: int = 50
    """Only the so many likeliest tokens; 0: all."""
    seed: int = 0
    max_new_tokens: int = 256
    top_p: float = 1.0
    """Only the likeliest tokens that have this share together; 1: all."""
    min_p: float = 0.0
    """Only tokens that are at least this part as likely as the likeliest; 0: all."""
    repetition_penalty: float = 1.0
    """Above 1: logits of tokens that were there, in prompt or answer, are divided by it (multiplied, if negative)."""
    stop: tuple[str, ...] = ()
    """Texts that end an answer."""

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
            raise WhetError("stop: the empty text would end every answer at once; leave it out")


_VALID_RANGES = {
    "temperature": "it must be 0 (the likeliest token) or more",
    "top_k": "it must be 0 (all tokens) or more",
    "max_new_tokens": "it must be 1 or more",
    "top_p": "it must be above 0 and at most 1",
    "min_p": "it must be from 0 to 1",
    "repetition_penalty": "it must be above 0; 1 does nothing",
}


def sample_next_tokens(
    logits: Tensor, keys: Tensor, counts: Tensor, sampling: Sampling, seen: Tensor | None = None
) -> Tensor:
    """[N] the next token of each row of logits [N, V].

    The random number of a row is a function of its key [N] and of how many tokens it has drawn before, counts [N]: it
    does not matter which other rows are there. `seen` [N, V]: the tokens that a repetition penalty applies to.
    """
    logits = logits.float()
    if seen is not None:
        penalty = sampling.repetition_penalty
        logits = torch.where(seen, torch.where(logits < 0, logits * penalty, logits / penalty), logits)
    if sampling.temperature == 0:
        return logits.argmax(dim=-1)
    shares, tokens = filtered_probabilities(logits, sampling)
    sums = shares.cumsum(dim=-1)
    whole = sums[:, -1:]
    # never the whole: the first sum above it, which would be none, always belongs to a token that may be chosen
    target = torch.minimum(
        counter_based_uniform(keys, counts)[:, None] * whole, torch.nextafter(whole, torch.zeros_like(whole))
    )
    place = (sums <= target).sum(dim=-1, keepdim=True)
    return (place if tokens is None else tokens.gather(1, place))[:, 0]


def filtered_probabilities(logits: Tensor, sampling: Sampling) -> tuple[Tensor, Tensor | None]:
    """(shares, tokens) [N, C]: what is left after the filters, not normalised, and which tokens these are; None: all in
    their order. Sorting a whole vocabulary takes longer than a layer, so it is done only where it must be."""
    logits = logits / sampling.temperature
    tokens = None
    if 0 < sampling.top_k < logits.shape[-1]:
        logits, tokens = logits.topk(sampling.top_k, dim=-1)
    elif sampling.top_p < 1:
        logits, tokens = logits.sort(dim=-1, descending=True)
    shares = logits.softmax(dim=-1)
    if sampling.top_p < 1:
        if tokens is None:  # top_k took the whole vocabulary
            shares, tokens = shares.sort(dim=-1, descending=True)
        before = shares.cumsum(dim=-1) - shares
        shares = shares * (before < sampling.top_p)
    if sampling.min_p > 0:
        shares = shares * (shares >= sampling.min_p * shares.amax(dim=-1, keepdim=True))
    return shares, tokens


def rng_keys(prompts: Sequence[Sequence[int]], seed: int) -> list[int]:
    """A number for each prompt that its random numbers come from: of the seed, the prompt, and how often the same
    prompt came before it, so that asking several times gives several answers."""
    times: dict[tuple[int, ...], int] = {}
    keys = []
    for prompt in prompts:
        ids = tuple(prompt)
        number = times[ids] = times.get(ids, -1) + 1
        digest = hashlib.blake2b(repr((seed, number, ids)).encode(), digest_size=8).digest()
        keys.append(int.from_bytes(digest, "little", signed=True))
    return keys


def counter_based_uniform(keys: Tensor, counts: Tensor) -> Tensor:
    """[N] numbers in [0, 1), by splitmix64: torch's generators give numbers by their place in a tensor, which here
    changes from batch to batch."""
    mixed = keys + counts * -0x61C8864680B583EB
    mixed = (mixed ^ _logical_shift_right(mixed, 30)) * -0x40A7B892E31B1A47
    mixed = (mixed ^ _logical_shift_right(mixed, 27)) * -0x6B2FB644ECCEEE15
    mixed = mixed ^ _logical_shift_right(mixed, 31)
    return _logical_shift_right(mixed, 40).to(torch.float32) * 2.0**-24


def _logical_shift_right(numbers: Tensor, by: int) -> Tensor:
    """To the right, zeros coming in: torch's integers have a sign."""
    return (numbers >> by) & ((1 << (64 - by)) - 1)
