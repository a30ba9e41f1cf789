"""The run: all that its steps need, built once by run/assemble.py; how far it is; and its micro-batches."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import torch

from whet.checkpoint.directory import lower_is_better, rank_by_score
from whet.checkpoint.save import CheckpointSaver
from whet.config import Config
from whet.core.console import warn
from whet.core.distributed import Ranks
from whet.data.loader import Loader
from whet.data.plan.planner import Plan
from whet.data.prepare.store import Store, StoreCheck
from whet.evaluation.validation_losses import ConversationLosses
from whet.execution.compile import should_compile
from whet.execution.cuda_graphs import disable_cuda_graphs, enable_cuda_graphs, max_gradient_bytes
from whet.inference.tasks.task import AnsweredExample
from whet.model.flops import StepFlops, device_peak_flops
from whet.model.loss.loss_model import LossModel
from whet.parallel.ddp import accumulate_in_fp32
from whet.parallel.fsdp import is_sharded
from whet.training.effect_meter import EffectMeter
from whet.training.guard import Guard
from whet.training.metrics import RunTotals, StartupTimer
from whet.training.output import RunOutput
from whet.training.precision import LossScaler, PrecisionPolicy
from whet.training.profiler import Profiler

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


class Evaluation(NamedTuple):
    """What an evaluation found."""

    metrics: dict[str, float]
    samples: list[AnsweredExample]
    """The answers to the tasks."""
    losses: ConversationLosses | None
    """Of each validation conversation; None without validation data."""


@dataclass(slots=True)
class Run:
    """One run in one process. Every rank has one; rank 0's writes the files."""

    config: Config
    ranks: Ranks
    precision: PrecisionPolicy
    plan: Plan
    store: Store
    """The prepared training conversations."""
    store_check: StoreCheck
    """Runs in the background; no checkpoint is saved before it is complete."""
    tokenizer: PreTrainedTokenizerFast
    loader: Loader
    model: LossModel
    optimizer: torch.optim.Optimizer
    loss_scaler: LossScaler
    guard: Guard
    intervals: Intervals
    evaluate: Callable[[], Evaluation]
    """Of the current model."""
    saver: CheckpointSaver | None
    """None: --dry-run, nothing is saved."""
    output: RunOutput
    startup: StartupTimer
    effect: EffectMeter
    flops: StepFlops
    peak_flops: float | None
    """Of all devices together, where known."""
    worst_batch_gib: float | None = None
    """The peak memory of this rank's device over the worst batch, before step 1; None where it is not measured."""
    step: int = 0
    """Finished steps."""
    totals: RunTotals = field(default_factory=RunTotals)
    evaluations: dict[int, dict[str, float]] = field(default_factory=dict)
    """The results by step. Checkpoints have them, because they decide which one is the best."""
    profiler: Profiler = field(default_factory=Profiler)
    autocast: AbstractContextManager[object] = field(init=False)

    def __post_init__(self) -> None:
        self.autocast = self.precision.autocast(self.ranks.device)

    def epochs(self, totals: RunTotals) -> float:
        return totals.conversations / self.plan.stats.per_epoch

    def best_evaluation(self) -> int | None:
        """The step of the evaluation with the best eval.best, the earliest of equal ones; None before the first."""
        scores = self._scheduled_scores()
        return next(iter(rank_by_score(scores, scores, lower_is_better(self.config.eval.best))), None)

    def ends_early(self) -> bool:
        """Whether eval.patience ends the run now. It depends on evaluations alone, which checkpoints have and every
        rank knows: a resumed run decides as an uninterrupted one."""
        best, patience = self.best_evaluation(), self.config.eval.patience
        if patience is None or best is None or self.step >= self.intervals.steps:
            return False
        return sum(step > best for step in self._scheduled_scores()) >= patience

    def _scheduled_scores(self) -> dict[int, float]:
        """eval.best by step, without the additional evaluation where --until paused the run."""
        metric, intervals = self.config.eval.best, self.intervals
        every = self.config.eval.every or 1
        return {
            step: results[metric]
            for step, results in self.evaluations.items()
            if metric in results and (step == intervals.first or (step - intervals.offset) % every == 0)
        }


@dataclass(frozen=True, slots=True)
class Intervals:
    """When a run evaluates and saves, in finished steps."""

    steps: int
    """The last step of the whole run."""
    last: int
    """The last step of this process: that of the run, or --until."""
    evaluate_every: int | None
    evaluate_at_start: bool
    save_every: int | None
    save_epochs: float | None = None
    save_evaluated: bool = False
    """Save at every evaluation, so that the best checkpoint can be kept."""
    first: int = 0
    """The step after which the run starts (train.start_step, train.step_offset)."""
    offset: int = 0
    """train.step_offset: intervals count from here."""

    def evaluates_before_step(self, start: int) -> bool:
        """Whether to evaluate before training starts or resumes after `start` steps. A checkpoint is saved before its
        step is evaluated, so a resumed run evaluates it."""
        return self.evaluate_at_start if start == self.first else self.evaluates_after(start)

    def evaluates_after(self, step: int) -> bool:
        return step == self.last or bool(self.evaluate_every and (step - self.offset) % self.evaluate_every == 0)

    def saves_after(self, step: int, epochs_before: float = 0.0, epochs_after: float = 0.0) -> bool:
        """`epochs_before`, `epochs_after`: epochs finished before this step and after it."""
        saved_epochs = self.save_epochs or math.inf
        return (
            step == self.last
            or bool(self.save_every and (step - self.offset) % self.save_every == 0)
            or math.floor(epochs_before / saved_epochs) < math.floor(epochs_after / saved_epochs)
            or (self.save_evaluated and self.evaluates_after(step))
        )


# Changing the micro-batches of a run: how many rows each has, and what depends on it. The numbers of a step do not.


def set_micro_rows(run: Run, rows: int) -> None:
    """Give every micro-batch of this rank so many rows. Weights must not have gradients that are still needed."""
    if rows != run.loader.micro_rows:
        before, run.loader = run.loader, run.loader.with_micro_rows(rows)
        before.close()
    run.config = run.config.model_copy(update={"train": run.config.train.model_copy(update={"micro_rows": rows})})
    if run.precision.weights == torch.bfloat16 and not is_sharded(run.model):
        accumulate_in_fp32(run.model, run.loader.max_rank_rows > rows)
    _set_cuda_graphs(run, rows * run.config.row_length)


def _set_cuda_graphs(run: Run, tokens: int) -> None:
    """Use CUDA graphs where layers are launch-bound for this many tokens; graphs of other shapes are released."""
    disable_cuda_graphs(run.model)
    device, precision = run.ranks.device, run.precision
    compiles = should_compile(run.config.model.compile, device, precision.compute)
    if compiles and device.type == "cuda" and run.ranks.world_size == 1 and run.config.parallel.offload == "none":
        memory = torch.cuda.get_device_properties(device).total_memory
        room = max_gradient_bytes(memory, run.config.parallel.recompute != "none")
        enable_cuda_graphs(run.model, tokens, device_peak_flops(device, precision.name), room)


def use_smaller_micro_batches(run: Run, rows: int, step: int) -> None:
    """After a step in which a rank ran out of memory: all ranks continue with its micro-batches. `rows`: those with
    which this rank computed the step."""
    before, rows = run.loader.micro_rows, min(run.ranks.all_gather([rows]))
    set_micro_rows(run, rows)
    warn(
        f"step {step}: the device ran out of memory with {before} rows in a micro-batch, so the step was computed with "
        f"{rows}, and the run continues with {rows}: slower, with the same loss. Is another program using the device?"
    )
    run.output.write_event(
        {
            "time": time.time(), "step": step, "kind": "out-of-memory", "action": "repeat",
            "reason": f"out of memory with {before} rows in a micro-batch, computed with {rows}",
            "micro_rows_before": before, "micro_rows": rows,
        }
    )  # fmt: skip
    run.output.update_plan({"micro_rows": rows})
