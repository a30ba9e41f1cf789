"""In which numbers an export is written, and how much of a difference their rounding explains."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from whet.core.errors import WhetError


@dataclass(frozen=True, slots=True)
class Numbers:
    """A type of numbers, by the name that `--dtype` has for it."""

    name: str
    torch_name: str
    bytes_each: float
    difference: float
    """Largest difference of a logit, relative to the largest logit, that rounding explains."""
    kl: float
    """Largest mean Kullback-Leibler divergence, in nats, that rounding explains."""
    agreement: float
    """Smallest part of positions where both models would say the same next token."""

    @property
    def dtype(self) -> torch.dtype:
        return getattr(torch, self.torch_name)


KNOWN = {
    numbers.name: numbers
    for numbers in (
        Numbers("f64", "float64", 8, 1e-4, 1e-6, 0.99),
        Numbers("f32", "float32", 4, 1e-3, 1e-5, 0.99),
        Numbers("bf16", "bfloat16", 2, 0.1, 0.05, 0.9),
        Numbers("f16", "float16", 2, 0.05, 0.02, 0.9),
        Numbers("q8_0", "float32", 34 / 32, 0.15, 0.05, 0.9),
    )
}
_KINDS = {
    "merged": ("f64", "f32", "bf16", "f16"),
    "gguf": ("f32", "bf16", "f16", "q8_0"),
    "megatron": ("f32", "bf16", "f16"),
}
_OF_TORCH = {torch.float64: "f64", torch.float32: "f32", torch.bfloat16: "bf16", torch.float16: "f16"}


EXACT = "exact"


def choose(kind: str, asked: str | None, computed_in: torch.dtype, kept_in: torch.dtype) -> Numbers:
    """What was asked for, else what training computed in: 16-bit runs ship 16 bits, though their trained weights may be
    kept in 32. `exact` are the ones they are kept in."""
    if kind == "adapter":
        if asked is not None:
            raise WhetError(f"--dtype: {asked}, but an adapter is shipped in the numbers that it was trained in")
        return of(computed_in)
    known = _KINDS[kind]
    if asked == EXACT:
        asked, computed_in = None, kept_in
    if asked is not None and asked not in known:
        raise WhetError(f"--dtype: {asked} does not exist for --to {kind}; it can be {', '.join((*known, EXACT))}")
    name = asked or _OF_TORCH[computed_in]
    return KNOWN[name if name in known else "f32"]


def of(dtype: torch.dtype) -> Numbers:
    return KNOWN[_OF_TORCH[dtype]]
