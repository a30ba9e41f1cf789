"""One line of metrics.jsonl for each step, and what the progress line shows of it."""

from __future__ import annotations

import math
import resource
import time
from dataclasses import asdict, dataclass
from typing import Any

import torch

from whet.data.loader import StepTotals
from whet.model.experts.load import StepLoad
from whet.model.flops import StepFlops
from whet.training.step import StepResult
from whet.training.timing import StepTime


@dataclass(frozen=True, slots=True)
class RunTotals:
    """What a run has processed so far, over all ranks. The names are keys of metrics.jsonl and of checkpoints."""

    conversations: int = 0
    tokens: int = 0
    supervised_tokens: int = 0
    flops: int = 0

    def add(self, totals: StepTotals, flops: StepFlops) -> RunTotals:
        return RunTotals(
            self.conversations + totals.conversations,
            self.tokens + totals.tokens,
            self.supervised_tokens + totals.supervised,
            self.flops + flops.for_documents(totals.lengths, totals.supervised),
        )


@dataclass(frozen=True, slots=True)
class StepSpeed:
    """The speed of a step; None for all of it where its time is not representative."""

    time: StepTime
    flops: int
    """Of this step, over all ranks."""
    peak_flops: float | None
    """Per second, of all devices together; None if unknown."""

    def rate(self, count: float) -> float | None:
        """`count` per second."""
        return count / self.time.seconds if self.time.is_steady else None

    @property
    def mfu(self) -> float | None:
        """Model FLOPs utilisation: the FLOPs of the model, without recomputation, ÷ the devices' peak."""
        is_known = self.time.is_steady and self.peak_flops
        return self.flops / (self.time.seconds * self.peak_flops) if is_known and self.peak_flops else None


def step_metrics(
    step: int, result: StepResult, rates: dict[str, float], totals: RunTotals, batch: StepTotals, per_epoch: int,
    speed: StepSpeed, device: torch.device,
) -> dict[str, Any]:  # fmt: skip
    """The line of a step, counted from 1: `totals` are cumulative, all else is of this step alone."""
    return {
        "time": time.time() - speed.time.ended_ago_s,
        "step": step,
        "epoch": totals.conversations / per_epoch,
        "loss": finite_or_none(result.loss),
        "accuracy": finite_or_none(result.accuracy),
        "grad_norm": finite_or_none(result.grad_norm),
        **({} if math.isnan(result.router_aux_loss) else {"router_aux_loss": result.router_aux_loss}),
        **_load_metrics(result.expert_load),
        **rates,
        **asdict(totals),
        "tokens_per_s": speed.rate(batch.tokens),
        "supervised_per_s": speed.rate(batch.supervised),
        "conversations_per_s": speed.rate(batch.conversations),
        "mfu": speed.mfu,
        "peak_gib": peak_gib(device),
        "step_s": speed.time.seconds,
        "data_s": result.data_s,
    }


def _load_metrics(load: StepLoad | None) -> dict[str, Any]:
    return {} if load is None else {"expert_load_max": load.max_load, "experts_idle": int(load.idle)}


def excluded_step_metrics(
    step: int, rates: dict[str, float], totals: RunTotals, per_epoch: int, device: torch.device
) -> dict[str, Any]:
    """The line of a step that a rollback excluded: it counts, but nothing was computed."""
    return {
        "time": time.time(),
        "step": step,
        "epoch": totals.conversations / per_epoch,
        **dict.fromkeys(("loss", "accuracy", "grad_norm")),
        **rates,
        **asdict(totals),
        **dict.fromkeys(("tokens_per_s", "supervised_per_s", "conversations_per_s", "mfu")),
        "peak_gib": peak_gib(device),
        "step_s": 0.0,
        "data_s": 0.0,
        "skipped": "passed over",
    }


def progress_note(line: dict[str, Any], smoothed: float) -> str:
    """What the progress line shows of a step: never a number that was not measured."""
    parts = ["loss not measured" if math.isnan(smoothed) else f"loss {smoothed:.4f}"]
    if line.get("skipped"):
        parts.append("skipped")
    if line["tokens_per_s"] is not None:
        parts.append(f"{line['tokens_per_s']:,.0f} tokens/s")
    if line["mfu"] is not None:
        parts.append(f"mfu {line['mfu']:.1%}")
    return " · ".join(parts)


def finite_or_none(value: float) -> float | None:
    """JSON has no NaN: a number that is not finite becomes null."""
    return value if math.isfinite(value) else None


def peak_gib(device: torch.device) -> float:
    """Peak memory so far: of the accelerator, or of this process on a CPU."""
    if device.type not in ("cpu", "mps"):  # a Mac's GPU shares the memory of its CPU
        return torch.accelerator.max_memory_allocated(device) / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
