"""One line of `metrics.jsonl` for each step."""

from __future__ import annotations

import math
import resource
import time
from dataclasses import asdict, dataclass
from typing import Any

import torch

from whet.data.loader import StepTotals
from whet.model.flops import Work
from whet.train.step import StepResult


@dataclass(frozen=True, slots=True)
class Seen:
    """What a run has gone through so far, over all ranks."""

    conversations: int = 0
    tokens: int = 0
    supervised_tokens: int = 0
    flops: int = 0

    def plus(self, totals: StepTotals, work: Work) -> Seen:
        return Seen(
            self.conversations + totals.conversations,
            self.tokens + totals.tokens,
            self.supervised_tokens + totals.supervised,
            self.flops + work.of(totals.tokens, totals.supervised, totals.squares),
        )


def step_line(
    step: int, result: StepResult, rates: dict[str, float], seen: Seen, totals: StepTotals, per_epoch: int,
    seconds: float, device: torch.device,
) -> dict[str, Any]:  # fmt: skip
    """`step` counts finished steps from 1; counts are cumulative, rates are of this step."""
    return {
        "time": time.time(),
        "step": step,
        "epoch": seen.conversations / per_epoch,
        "loss": known(result.loss),
        "accuracy": known(result.accuracy),
        "grad_norm": known(result.grad_norm),
        **rates,
        **asdict(seen),
        "tokens_per_s": totals.tokens / seconds,
        "supervised_per_s": totals.supervised / seconds,
        "conversations_per_s": totals.conversations / seconds,
        "mfu": None,  # not measured: the device's peak is not known
        "peak_gib": peak_gib(device),
        "step_s": seconds,
        "data_s": result.data_s,
    }


def passed_over_line(
    step: int, rates: dict[str, float], seen: Seen, per_epoch: int, device: torch.device
) -> dict[str, Any]:  # fmt: skip
    """Of a step that a rollback left out: its counts move on, nothing was measured and it took no time."""
    return {
        "time": time.time(),
        "step": step,
        "epoch": seen.conversations / per_epoch,
        **dict.fromkeys(("loss", "accuracy", "grad_norm")),
        **rates,
        **asdict(seen),
        **dict.fromkeys(("tokens_per_s", "supervised_per_s", "conversations_per_s", "mfu")),
        "peak_gib": peak_gib(device),
        "step_s": 0.0,
        "data_s": 0.0,
        "skipped": True,
    }


def known(value: float) -> float | None:
    """The number, or nothing: what is not finite was not measured and is not printed as if it were."""
    return value if math.isfinite(value) else None


def peak_gib(device: torch.device) -> float:
    """The most memory held so far: of the accelerator, or of this process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
