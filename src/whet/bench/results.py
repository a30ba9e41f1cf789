"""Throughput from step times and token counts, by the same formulas for every tool, and the Markdown table."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

# Speed from the clock and the counts of steps. The same arithmetic for every tool.

COLUMN_NOTES = (
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
class StepTimings:
    """What a tool did, one number a step."""

    ended: Sequence[float]
    """When, in seconds of the wall clock."""
    tokens: Sequence[int]
    supervised: Sequence[int]


@dataclass(frozen=True, slots=True)
class TokenFlops:
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
class Throughput:
    """The outcome."""

    tokens_per_s: float
    supervised_per_s: float
    tflops: float
    step_ms: float
    first_step_s: float


MAX_STEP_SPREAD = 1.25
"""From this spread on, a reader is warned. Steps of the same shape take the same time on a machine that is idle; beside
other work on two cores the same tool's were seen to take three times as long."""
MAX_WARMUP_DRIFT = 1.03
"""From this on, too: a tool that compiles as it goes, or a card that changes its clock, was measured on its way."""


@dataclass(frozen=True, slots=True)
class StepVariation:
    """How alike the counted steps were, by tokens a second of each."""

    spread: float
    """How much longer a token took in the slowest step than in the fastest."""
    median: float
    first_half: float
    """The median of the first half of them; of a single step, that step."""
    second_half: float


def step_variation(steps: StepTimings, warm: int) -> StepVariation:
    """Of all steps after the first `warm`."""
    pairs = itertools.pairwise(steps.ended[warm - 1 :])
    rates = [tokens / (end - begin) for (begin, end), tokens in zip(pairs, steps.tokens[warm:], strict=True)]
    half = (len(rates) + 1) // 2
    return StepVariation(
        spread=max(rates) / min(rates),
        median=statistics.median(rates),
        first_half=statistics.median(rates[:half]),
        second_half=statistics.median(rates[-half:]),
    )


def variation_warnings(even: StepVariation) -> list[str]:
    """Why a number is unsure."""
    found = []
    if even.spread > MAX_STEP_SPREAD:
        found.append(
            f"its slowest counted step took {even.spread:.1f} times as long for a token as its fastest, so this "
            f"number, and every ratio with it, is unsure: its median step does {even.median:,.0f} tokens/s. Measure on "
            "an idle machine, with more --steps"
        )
    if even.second_half > MAX_WARMUP_DRIFT * even.first_half:
        found.append(
            f"it was still getting faster: {even.first_half:,.0f} tokens/s by the median of the first half of the "
            f"counted steps, {even.second_half:,.0f} by that of the second. Give more --warm and --steps"
        )
    return found


def attention_flops_per_token(layers: int, heads: int, head_width: int, lengths: Sequence[int]) -> float:
    """FLOPs for a token of conversations of these lengths: of a long one there are more tokens, and each sees more."""
    mean = sum(length * length for length in lengths) / sum(lengths)
    return 6.0 * layers * heads * head_width * mean


def compute_throughput(steps: StepTimings, warm: int, began: float, load: TokenFlops) -> Throughput:
    """Over all steps after the first `warm`; `began` is when the process was started."""
    seconds = steps.ended[-1] - steps.ended[warm - 1]
    rate = sum(steps.tokens[warm:]) / seconds
    return Throughput(
        tokens_per_s=rate,
        supervised_per_s=sum(steps.supervised[warm:]) / seconds,
        tflops=rate * load.per_token / 1e12,
        step_ms=1000 * seconds / (len(steps.ended) - warm),
        first_step_s=steps.ended[0] - began,
    )


# The outcome as Markdown.

_COLUMNS = ("tool", "tokens/s", "supervised tokens/s", "TFLOP/s", "peak GiB", "first step, s", "ms a step", "whet ÷ it")


def results_markdown(result: dict[str, Any]) -> str:
    """A heading with the terms, the table, and below it what the columns mean and what must be known of each tool."""
    rows = [_table_row(contender) for contender in result["contenders"] if contender["state"] != "not installed"]
    lines = [
        f"## {_table_heading(result['terms'])}",
        "",
        f"{result['device']}; {result['model']['weights']:,} random weights; {result['data']['from']}, "
        f"{result['data']['mean_length']:.0f} tokens a conversation on average.",
        "",
        f"| {' | '.join(_COLUMNS)} |",
        f"|---|{'---:|' * (len(_COLUMNS) - 1)}",
        *rows,
        "",
        *(f"- {note}" for note in [*_contender_notes(result["contenders"]), *COLUMN_NOTES]),
    ]
    return "\n".join(lines) + "\n"


def _table_heading(terms: dict[str, Any]) -> str:
    return (
        f"{terms['model']}, {terms['mode']}, {terms['precision']}: {terms['rows']} rows of {terms['length']}, "
        f"recompute {terms['recompute']}, steps {terms['warm'] + 1} to {terms['steps']}"
    )


def _table_row(contender: dict[str, Any]) -> str:
    name = _contender_label(contender)
    if contender["state"] == "failed":
        return f"| {name} | failed: {contender['error'].replace('|', '/')} |{' |' * (len(_COLUMNS) - 2)}"
    speed = contender["speed"]
    ratio = contender["ratio"]
    cells = (
        name,
        f"{speed['tokens_per_s']:,.0f}",
        f"{speed['supervised_per_s']:,.0f}",
        f"{speed['tflops']:,.1f}" if speed["tflops"] >= 1 else f"{speed['tflops']:.3f}",
        f"{contender['peak_gib']:.1f}",
        f"{speed['first_step_s']:.1f}",
        f"{speed['step_ms']:,.0f}",
        "–" if ratio is None else f"{ratio:.2f}",
    )
    return f"| {' | '.join(cells)} |"


def _contender_notes(contenders: list[dict[str, Any]]) -> list[str]:
    found = []
    for contender in contenders:
        if contender["state"] == "not installed":
            found.append(f"{contender['title']} is not installed here, so it is left out.")
        found += [f"{_contender_label(contender)}: {note}." for note in contender["notes"]]
    return found


def _contender_label(contender: dict[str, Any]) -> str:
    return f"{contender['title']} {contender['version']}".strip()
