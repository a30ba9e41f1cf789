"""Throughput from step times and token counts, by the same formulas for every tool, and the Markdown table."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

COLUMN_NOTES = (
    "tokens/s: tokens without padding per second of wall-clock time, from the end of the last warm-up step to the end "
    "of the last step; waiting for data and writing metrics are included.",
    "supervised tokens/s: the tokens among them that have a loss. whet trains on the assistant's tokens and runs the "
    "output head on them only; the others train on every token of the packed rows, their default.",
    "TFLOP/s: 6 N per token (4 N with an adapter, whose frozen weights need no gradient) plus 6·L·H·D·length for "
    "causal attention; N counts every weight, including embedding and head, but of experts only those that a token is "
    "routed to. "
    "Recomputation does not count.",
    "peak GiB: peak memory allocated by torch on the device; on a CPU, the peak resident memory of the process.",
    "first step: seconds from the start of the process to the end of its first step. Conversations are tokenized "
    "beforehand, except for Unsloth, which tokenizes text itself and loads its weights from files.",
)
"""The meaning of the columns, printed below the table."""


@dataclass(frozen=True, slots=True)
class StepTimings:
    """Times and token counts of a tool, one per step."""

    ended: Sequence[float]
    """Unix times."""
    tokens: Sequence[int]
    supervised: Sequence[int]


@dataclass(frozen=True, slots=True)
class TokenFlops:
    """The FLOPs of a token by the convention above; the same for every tool."""

    weights: int
    """The number of weights."""
    active_weights: int
    """N, the number of weights that a token uses: of experts those that it is routed to."""
    attention: float
    """FLOPs of attention per token, forward and backward."""
    is_adapter: bool

    @property
    def per_token(self) -> float:
        return (4 if self.is_adapter else 6) * self.active_weights + self.attention


@dataclass(frozen=True, slots=True)
class Throughput:
    """The speed of a tool."""

    tokens_per_s: float
    supervised_per_s: float
    tflops: float
    step_ms: float
    first_step_s: float


MAX_STEP_SPREAD = 1.25
"""A larger spread gives a warning. On an idle machine equal steps take equal time; on two busy cores steps of the same
tool took up to three times as long."""
MAX_WARMUP_DRIFT = 1.03
"""A larger speed-up gives a warning: the tool was still compiling, or the GPU was still changing its clock."""


@dataclass(frozen=True, slots=True)
class StepVariation:
    """The variation of tokens per second over the counted steps."""

    spread: float
    """The ratio of the fastest to the slowest step."""
    median: float
    first_half: float
    """The median of the first half of the steps."""
    second_half: float


def step_variation(steps: StepTimings, warm: int) -> StepVariation:
    """The variation over all steps after the first `warm`."""
    pairs = itertools.pairwise(steps.ended[warm - 1 :])
    rates = [tokens / (end - begin) for (begin, end), tokens in zip(pairs, steps.tokens[warm:], strict=True)]
    half = (len(rates) + 1) // 2
    return StepVariation(
        spread=max(rates) / min(rates),
        median=statistics.median(rates),
        first_half=statistics.median(rates[:half]),
        second_half=statistics.median(rates[-half:]),
    )


def variation_warnings(variation: StepVariation) -> list[str]:
    """Why the throughput is unreliable; empty if it is not."""
    found = []
    if variation.spread > MAX_STEP_SPREAD:
        found.append(
            f"unreliable: the slowest counted step took {variation.spread:.1f} times as long per token as the fastest; "
            f"the median step does {variation.median:,.0f} tokens/s. Measure on an idle machine, with more --steps"
        )
    if variation.second_half > MAX_WARMUP_DRIFT * variation.first_half:
        found.append(
            f"still getting faster: the median is {variation.first_half:,.0f} tokens/s in the first half of the "
            f"counted steps, {variation.second_half:,.0f} in the second. Use more --warm and --steps"
        )
    return found


def attention_flops_per_token(layers: int, heads: int, head_width: int, lengths: Sequence[int]) -> float:
    """Mean FLOPs of attention per token, over all tokens of conversations of these lengths."""
    mean = sum(length * length for length in lengths) / sum(lengths)
    return 6.0 * layers * heads * head_width * mean


def compute_throughput(steps: StepTimings, warm: int, began: float, flops: TokenFlops) -> Throughput:
    """The speed over all steps after the first `warm`; `began` is the start time of the process."""
    seconds = steps.ended[-1] - steps.ended[warm - 1]
    rate = sum(steps.tokens[warm:]) / seconds
    return Throughput(
        tokens_per_s=rate,
        supervised_per_s=sum(steps.supervised[warm:]) / seconds,
        tflops=rate * flops.per_token / 1e12,
        step_ms=1000 * seconds / (len(steps.ended) - warm),
        first_step_s=steps.ended[0] - began,
    )


_COLUMNS = ("tool", "tokens/s", "supervised tokens/s", "TFLOP/s", "peak GiB", "first step, s", "ms/step", "whet ÷ tool")


def results_markdown(result: dict[str, Any]) -> str:
    """A heading with the settings, the table, notes on the tools, and the meaning of the columns."""
    rows = [_table_row(contender) for contender in result["contenders"] if contender["state"] != "not installed"]
    lines = [
        f"## {_table_heading(result['terms'])}",
        "",
        f"{result['device']}; {result['model']['weights']:,} random weights; {result['data']['from']}, "
        f"{result['data']['mean_length']:.0f} tokens per conversation on average.",
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
            found.append(f"{contender['title']} is not installed and left out.")
        found += [f"{_contender_label(contender)}: {note}." for note in contender["notes"]]
    return found


def _contender_label(contender: dict[str, Any]) -> str:
    return f"{contender['title']} {contender['version']}".strip()
