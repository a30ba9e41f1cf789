"""Speed from the clock and the counts of steps. The same arithmetic for every tool."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

CONVENTIONS = (
    "tokens/s: tokens that are not padding, by the wall clock from the end of the last warm-up step to the end of the "
    "last step; waiting for data and writing metrics count.",
    "supervised tokens/s: those among them that the loss is taken of. whet trains on the assistant's tokens only and "
    "computes the head there only; the others get packed rows as they take them by default, and train on every token.",
    "TFLOP/s: 6 N for each token (4 N with an adapter, whose frozen weights need no gradient) and 6·L·H·D·length for "
    "causal attention; N is every weight, embedding and head included. What is computed a second time does not count.",
    "peak GiB: the most that torch held at a time on the device; of a CPU, the process's resident memory.",
    "first step: seconds from the start of the process to the end of its first step. Conversations were tokenised "
    "before, but Unsloth takes text and tokenises it; it also reads its weights from a file.",
)
"""What the columns mean, to be printed below every table."""


@dataclass(frozen=True, slots=True)
class Steps:
    """What a tool did, one number a step."""

    ended: Sequence[float]
    """When, in seconds of the wall clock."""
    tokens: Sequence[int]
    supervised: Sequence[int]


@dataclass(frozen=True, slots=True)
class Load:
    """What a token costs, by the convention above; the same number for every tool."""

    weights: int
    """N."""
    attention: float
    """FLOPs of attention for a token, forward and backward."""
    is_adapter: bool

    @property
    def per_token(self) -> float:
        return (4 if self.is_adapter else 6) * self.weights + self.attention


@dataclass(frozen=True, slots=True)
class Speed:
    """The outcome."""

    tokens_per_s: float
    supervised_per_s: float
    tflops: float
    step_ms: float
    first_step_s: float


UNSTEADY = 1.25
"""From this spread on, a reader is warned. Steps of the same shape take the same time on a machine that is idle; beside
other work on two cores the same tool's were seen to take three times as long."""
SETTLING = 1.03
"""From this on, too: a tool that compiles as it goes, or a card that changes its clock, was measured on its way."""


@dataclass(frozen=True, slots=True)
class Evenness:
    """How alike the counted steps were, by tokens a second of each."""

    spread: float
    """How much longer a token took in the slowest step than in the fastest."""
    median: float
    first_half: float
    """The median of the first half of them; of a single step, that step."""
    second_half: float


def evenness(steps: Steps, warm: int) -> Evenness:
    """Of all steps after the first `warm`."""
    pairs = itertools.pairwise(steps.ended[warm - 1 :])
    rates = [tokens / (end - begin) for (begin, end), tokens in zip(pairs, steps.tokens[warm:], strict=True)]
    half = (len(rates) + 1) // 2
    return Evenness(
        spread=max(rates) / min(rates),
        median=statistics.median(rates),
        first_half=statistics.median(rates[:half]),
        second_half=statistics.median(rates[-half:]),
    )


def warnings(even: Evenness) -> list[str]:
    """Why a number is unsure."""
    found = []
    if even.spread > UNSTEADY:
        found.append(
            f"its slowest counted step took {even.spread:.1f} times as long for a token as its fastest, so this "
            f"number, and every ratio with it, is unsure: its median step does {even.median:,.0f} tokens/s. Measure on "
            "an idle machine, with more --steps"
        )
    if even.second_half > SETTLING * even.first_half:
        found.append(
            f"it was still getting faster: {even.first_half:,.0f} tokens/s by the median of the first half of the "
            f"counted steps, {even.second_half:,.0f} by that of the second. Give more --warm and --steps"
        )
    return found


def attention_cost(layers: int, heads: int, head_width: int, lengths: Sequence[int]) -> float:
    """FLOPs for a token of conversations of these lengths: of a long one there are more tokens, and each sees more."""
    mean = sum(length * length for length in lengths) / sum(lengths)
    return 6.0 * layers * heads * head_width * mean


def speed(steps: Steps, warm: int, began: float, load: Load) -> Speed:
    """Over all steps after the first `warm`; `began` is when the process was started."""
    seconds = steps.ended[-1] - steps.ended[warm - 1]
    rate = sum(steps.tokens[warm:]) / seconds
    return Speed(
        tokens_per_s=rate,
        supervised_per_s=sum(steps.supervised[warm:]) / seconds,
        tflops=rate * load.per_token / 1e12,
        step_ms=1000 * seconds / (len(steps.ended) - warm),
        first_step_s=steps.ended[0] - began,
    )
