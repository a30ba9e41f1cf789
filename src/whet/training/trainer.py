"""The loop around the step: what is measured, saved and asked between two steps."""

from __future__ import annotations

import functools
import math
import time
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch

from whet.core.console import info, progress, warn
from whet.core.distributed import Ranks
from whet.core.errors import RunFailedError, StoppedError
from whet.core.heartbeat import PHASE
from whet.core.signals import collect_stop_signals
from whet.core.smoothing import ExponentialAverage
from whet.data.loader import Loader
from whet.execution.cuda_graphs import release_cuda_graphs
from whet.model.flops import StepFlops
from whet.model.loss.loss_model import LossModel
from whet.parallel.fsdp import is_sharded
from whet.training.config import TrainConfig
from whet.training.diagnose import Diagnoser, Diagnosis
from whet.training.guard import Guard, Verdict
from whet.training.loss_scale import LossScaler
from whet.training.metrics import (
    RunTotals,
    StepSpeed,
    StepTime,
    StepTimer,
    progress_note,
    skipped_step_metrics,
    step_metrics,
)
from whet.training.micro_batches import ForwardPasses, OverlappedForward
from whet.training.optimizers.factory import (
    ConditionalStep,
    build_conditional_step,
    gradient_bytes,
    optimizer_step,
    set_learning_rates,
)
from whet.training.profiler import Profiler
from whet.training.schedule import Position, lr_factor
from whet.training.step import StepResult, compute_gradients

_MAX_OVERLAP_BYTES = 2**30  # bytes
LOWER_LR_HINT = "A lower train.optimizer.lr often helps: start a new run with it, in another folder (run.dir=FOLDER)"


@dataclass(frozen=True, slots=True)
class ResumePoint:
    """Where a run goes on: after so many finished steps."""

    step: int
    seen: RunTotals


@dataclass(frozen=True, slots=True)
class StepFault:
    """A step that the guard did not find fine, counted from 1, and what is known about it."""

    step: int
    before: RunTotals
    result: StepResult
    verdict: Verdict
    findings: Diagnosis
    policy: str
    """What is done about such a step, while it may be."""


@dataclass(frozen=True, slots=True)
class _StepOutcome:
    """What became of a step."""

    seen: RunTotals
    line: dict[str, Any]
    stop: bool
    back: ResumePoint | None = None
    save: bool = False


@dataclass(frozen=True, slots=True)
class _LoopState:
    """What the steps of one go have in common."""

    early: ConditionalStep | None
    ahead: OverlappedForward
    clock: StepTimer


class TrainerHooks(Protocol):
    """What the loop calls; the recipe connects them to files, evaluation and checkpoints."""

    def log(self, line: dict[str, Any]) -> None:
        """A line of metrics.jsonl."""

    def evaluate(self, step: int) -> None:
        """Measure the model after so many steps."""

    def save(self, step: int, seen: RunTotals) -> None:
        """Write a checkpoint; it may still be on its way when this returns."""

    def wait_for_save(self) -> None:
        """Until the checkpoint is on the disk."""

    def save_requested(self) -> bool:
        """Whether it is time for a checkpoint, by the clock; one rank may say so and the others not."""

    def stop_requested(self) -> bool:
        """Whether someone wants the run to end."""

    def fault(self, fault: StepFault) -> str:
        """Write down what happened, and save where it stops; gives the words for the user."""

    def can_roll_back(self) -> bool:
        """Whether there is a checkpoint."""

    def roll_back(self, step: int) -> ResumePoint:
        """Return to the newest checkpoint, and decide to pass over the steps since, this one included."""


@dataclass(frozen=True, slots=True)
class Intervals:
    """When things happen, in finished steps."""

    steps: int
    """Of the whole run, which the schedule goes by."""
    last: int
    """Where this process ends: the last step, or the one until which it was asked to train."""
    evaluate_every: int | None
    evaluate_at_start: bool
    save_every: int | None
    save_epochs: float | None = None
    save_measured: bool = False
    """Every evaluation has a checkpoint: the best can then be kept."""
    first: int = 0
    """The step after which the run begins (train.start_step)."""

    def evaluates_after(self, step: int) -> bool:
        return step == self.last or bool(self.evaluate_every and step % self.evaluate_every == 0)

    def saves_after(self, step: int, before: float = 0.0, after: float = 0.0) -> bool:
        """`before`, `after`: epochs that were done before this step and after it."""
        return (
            step == self.last
            or bool(self.save_every and step % self.save_every == 0)
            or bool(self.save_epochs and math.floor(before / self.save_epochs) < math.floor(after / self.save_epochs))
            or (self.save_measured and self.evaluates_after(step))
        )


@dataclass(frozen=True, slots=True)
class Trainer:
    """Everything that a run's steps need."""

    model: LossModel
    optimizer: torch.optim.Optimizer
    loader: Loader
    config: TrainConfig
    cadence: Intervals
    hooks: TrainerHooks
    ranks: Ranks
    work: StepFlops
    per_epoch: int
    whole: Position
    """Where the run ends."""
    seed: int
    autocast: AbstractContextManager[object]
    loss_scale: LossScaler
    profiler: Profiler
    peak: float | None
    """FLOP/s of all devices together, where known."""
    guard: Guard

    def run(self, start: int, seen: RunTotals) -> None:
        """Steps `start` to the last. Raises StoppedError when asked to stop, after saving a checkpoint."""
        place: ResumePoint | None = ResumePoint(start, seen)
        signals: list[int] = []
        while place is not None:
            place = self._from(place, signals)

    def _from(self, place: ResumePoint, signals: list[int]) -> ResumePoint | None:
        """The steps from a place to the end, or to where the guard wants to go back from; gives where to."""
        start, seen = place.step, place.seen
        if self.cadence.evaluate_at_start if start == self.cadence.first else self.cadence.evaluates_after(start):
            PHASE.enter("evaluating", start)
            release_cuda_graphs(self.model)
            self.hooks.evaluate(start)  # a checkpoint is saved before its step is measured: no step waits for that
        self.model.train()
        smoothed, course = ExponentialAverage(), self._course()
        with collect_stop_signals(signals, _announce_stop), progress("training", self.cadence.steps, start) as bar:
            for step in range(start, self.cadence.last):
                with self.profiler.step(step + 1):
                    if self.guard.excludes(step + 1):
                        result = self._pass_over(step, seen)
                    else:
                        stop = bool(signals) or self.hooks.stop_requested()
                        result = self._one(step, seen, stop, course, is_first=step == start)
                if result.back is not None:
                    if result.stop:
                        raise StoppedError(
                            f"stopped in step {step + 1}, which was faulty; the run is back after step "
                            f"{result.back.step}. Start it again to continue (whet train: with --resume)"
                        )
                    return result.back
                before, seen, done = seen, result.seen, step + 1
                bar.advance(1, progress_note(result.line, smoothed.add(result.line["loss"])))
                is_due = self.cadence.saves_after(done, self._epochs(before), self._epochs(seen))
                if result.stop or result.save or is_due:
                    PHASE.enter("saving a checkpoint")
                    self.hooks.save(done, seen)
                if result.stop:
                    self.hooks.wait_for_save()
                    raise StoppedError(
                        f"stopped after step {done} of {self.cadence.steps}; a checkpoint is saved. "
                        "Start it again to continue (whet train: with --resume)"
                    )
                if self.cadence.evaluates_after(done):
                    PHASE.enter("evaluating")
                    release_cuda_graphs(self.model)
                    self.hooks.evaluate(done)
                    self.model.train()  # not in every step: a model with adapters has thousands of modules
        return None

    def _epochs(self, seen: RunTotals) -> float:
        return seen.conversations / self.per_epoch

    def _course(self) -> _LoopState:
        early = build_conditional_step(self.optimizer)
        # one step may begin before the one before is looked at if it has the same loss scale, if the gradients that are
        # kept meanwhile are small, and if no process is left alone in a meeting when another has no memory for it
        overlaps = (
            early is not None
            and not self.loss_scale.moves
            and self.ranks.context_size == self.ranks.tensor_size == 1
            and not is_sharded(self.model)
            and gradient_bytes(self.optimizer) <= _MAX_OVERLAP_BYTES
        )
        clock = StepTimer(by_device=overlaps and self.ranks.device.type == "cuda")
        return _LoopState(early, OverlappedForward(self._passes, overlaps), clock)

    def _passes(self, step: int) -> ForwardPasses:
        return ForwardPasses(
            self.model, self.loader, step, device=self.ranks.device, seed=self.seed, autocast=self.autocast,
            loss_scale=self.loss_scale.value,
        )  # fmt: skip

    def _is_followed(self, step: int, before: RunTotals, after: RunTotals) -> bool:
        """Whether nothing is planned to come between this step and the next."""
        done = step + 1
        return (
            done < self.cadence.last
            and not self.cadence.evaluates_after(done)
            and not self.cadence.saves_after(done, self._epochs(before), self._epochs(after))
            and not self.guard.excludes(done + 1)
            and not self.profiler.starts_or_stops_after(done)
        )

    def _one(self, step: int, seen: RunTotals, stop: bool, course: _LoopState, is_first: bool) -> _StepOutcome:
        early, ahead, clock = course.early, course.ahead, course.clock
        passes, save = ahead.take(step), self.hooks.save_requested()
        if not passes.has_begun:
            clock.start()
        PHASE.enter("computing gradients", step + 1)
        totals = self.loader.totals(step)
        after = seen.add(totals, self.work)
        rates = self._rates(step, seen, after)
        if early is not None:
            early.was_asked = False
        # what follows the first step of a process takes longer: it gets ready to save
        is_followed = not (stop or save or is_first) and self._is_followed(step, seen, after)
        result = compute_gradients(
            passes, ranks=self.ranks, clip_norm=self.config.clip_norm, stop=stop, save=save, move=early,
            limit=self.guard.limit(), meanwhile=functools.partial(ahead.begin, step + 1) if is_followed else None,
        )  # fmt: skip
        lap, is_warm = clock.stop(result.came), ahead.made_before() == passes.made_before
        verdict = self.guard.judge(result, totals.supervised, self.loss_scale.can_shrink())
        moved = early is not None and early.was_asked and verdict.kind == "fine"
        if not moved:
            ahead.drop()
            if early is not None and early.was_asked:
                early.take_back()
        if verdict.kind not in ("fine", "overflow"):
            verdict = self._fault(step, seen, result, verdict)
        if verdict.action == "rollback":
            return _StepOutcome(seen, {}, result.stop, self.hooks.roll_back(step + 1))
        PHASE.enter("changing weights")
        if verdict.action == "take" and not moved:
            found = time.perf_counter()
            optimizer_step(self.optimizer, result.factor)
            lap = StepTime(lap.seconds + time.perf_counter() - found, 0.0)
        self.loss_scale.update(verdict.kind == "overflow")
        pace = StepSpeed(lap, after.flops - seen.flops, self.peak, is_warm)
        line = step_metrics(step + 1, result, rates, after, totals, self.per_epoch, pace, self.ranks.device)
        if verdict.action == "skip":
            line["skipped"] = verdict.kind
        self._log(line)
        return _StepOutcome(after, line, result.stop, save=result.save)

    def _fault(self, step: int, seen: RunTotals, result: StepResult, verdict: Verdict) -> Verdict:
        """Find who is to blame and say so; ends the run if that is what the policy, or what is left of it, says."""
        if verdict.action == "rollback" and not self.hooks.can_roll_back():
            verdict = verdict.stop_because("there is no checkpoint to go back to")
        PHASE.enter("looking for what is to blame")
        diagnoser = Diagnoser(self.model, self.ranks, self.seed, self.autocast, self.loss_scale.value)
        findings = diagnoser.diagnose(self.loader, step, verdict.kind)
        words = self.hooks.fault(StepFault(step + 1, seen, result, verdict, findings, self.guard.policy(verdict.kind)))
        if verdict.action == "stop":
            raise RunFailedError(words)
        warn(words)
        return verdict

    def _pass_over(self, step: int, seen: RunTotals) -> _StepOutcome:
        """A step that a rollback left out: it counts, and nothing is computed."""
        after = replace(seen.add(self.loader.totals(step), self.work), flops=seen.flops)
        rates = self._rates(step, seen, after)
        line = skipped_step_metrics(step + 1, rates, after, self.per_epoch, self.ranks.device)
        self._log(line)
        return _StepOutcome(after, line, stop=False)

    def _rates(self, step: int, before: RunTotals, after: RunTotals) -> dict[str, float]:
        """Set those of this step; gives what metrics.jsonl says of them."""
        schedule = self.config.schedule
        here, there = (
            Position(number, seen.conversations / self.per_epoch, seen.conversations, seen.tokens).in_units_of(schedule)
            for number, seen in ((step, before), (step + 1, after))
        )
        rates = set_learning_rates(self.optimizer, lr_factor(here, there, self.whole.in_units_of(schedule), schedule))
        return rates | {"loss_scale": self.loss_scale.value} if self.loss_scale.moves else rates

    def _log(self, line: dict[str, Any]) -> None:
        self.guard.record(line)
        self.hooks.log(line)


def _announce_stop() -> None:
    info("stopping when this step is saved; Ctrl-C again stops at once")
