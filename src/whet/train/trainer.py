"""The loop around the step: what is measured, saved and asked between two steps."""

from __future__ import annotations

import contextlib
import math
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch

from whet.core.console import progress, say
from whet.core.errors import RunFailedError, StoppedError
from whet.core.ranks import Ranks
from whet.data.loader import Loader
from whet.model.flops import Work
from whet.model.loss import LossModel
from whet.train.config import TrainConfig
from whet.train.ema import Ema
from whet.train.loss_scale import LossScale
from whet.train.metrics import Pace, Seen, note_of, step_line
from whet.train.optim import set_rates
from whet.train.profiler import Profiler
from whet.train.schedule import Place, rate_factor
from whet.train.step import find_gradients

RETRY = "A lower train.optimizer.lr often helps: start a new run with it, in another folder (run.dir=FOLDER)"


@dataclass(frozen=True, slots=True)
class Hooks:
    """What the loop calls; the recipe connects them to files, evaluation and checkpoints."""

    log: Callable[[dict[str, Any]], None]
    evaluate: Callable[[int], None]
    save: Callable[[int, Seen], None]
    stop_requested: Callable[[], bool]


@dataclass(frozen=True, slots=True)
class Cadence:
    """When things happen, in finished steps."""

    steps: int
    """Of the whole run, which the schedule goes by."""
    last: int
    """Where this process ends: the last step, or the one until which it was asked to train."""
    evaluate_every: int | None
    evaluate_at_start: bool
    save_every: int

    def evaluates_after(self, step: int) -> bool:
        return step == self.last or bool(self.evaluate_every and step % self.evaluate_every == 0)

    def saves_after(self, step: int) -> bool:
        return step == self.last or step % self.save_every == 0


@dataclass(frozen=True, slots=True)
class Trainer:
    """Everything that a run's steps need."""

    model: LossModel
    optimizer: torch.optim.Optimizer
    loader: Loader
    config: TrainConfig
    cadence: Cadence
    hooks: Hooks
    ranks: Ranks
    work: Work
    per_epoch: int
    whole: Place
    """Where the run ends."""
    seed: int
    arithmetic: AbstractContextManager[object]
    loss_scale: LossScale
    profiler: Profiler
    peak: float | None
    """FLOP/s of all devices together, where known."""

    def run(self, start: int, seen: Seen) -> None:
        """Steps `start` to the last. Raises StoppedError when asked to stop, after saving a checkpoint."""
        if self.cadence.evaluate_at_start if start == 0 else self.cadence.evaluates_after(start):
            self.hooks.evaluate(start)  # a checkpoint is saved before its step is measured: no step waits for that
        smoothed = Ema()
        with _signals() as asked, progress("training", self.cadence.steps, start) as bar:
            for step in range(start, self.cadence.last):
                stop = asked() or self.hooks.stop_requested()
                with self.profiler.around(step + 1):
                    seen, line, stopping = self._one(step, seen, stop)
                bar.advance(1, note_of(line, smoothed.add(line["loss"] if line["loss"] is not None else math.nan)))
                done = step + 1
                if stopping or self.cadence.saves_after(done):
                    self.hooks.save(done, seen)
                if stopping:
                    raise StoppedError(
                        f"stopped after step {done} of {self.cadence.steps}; a checkpoint is saved. "
                        "Start it again to continue (whet train: with --resume)"
                    )
                if self.cadence.evaluates_after(done):
                    self.hooks.evaluate(done)

    def _one(self, step: int, seen: Seen, stop: bool) -> tuple[Seen, dict[str, Any], bool]:
        began = time.perf_counter()
        totals = self.loader.totals(step)
        after = seen.plus(totals, self.work)
        rates = set_rates(self.optimizer, self._factor(self._place(step, seen), self._place(step + 1, after)))
        if self.loss_scale.moves:
            rates["loss_scale"] = self.loss_scale.value
        self.model.train()
        result = find_gradients(
            self.model, self.loader, step, ranks=self.ranks, seed=self.seed, clip_norm=self.config.clip_norm,
            arithmetic=self.arithmetic, loss_scale=self.loss_scale.value, stop=stop,
        )  # fmt: skip
        if result.finite:
            self.optimizer.step()
        elif not self.loss_scale.can_shrink():
            raise RunFailedError(
                f"step {step + 1}: the loss is {result.loss} and the gradient norm {result.grad_norm}; this step did "
                f"not change the weights. {RETRY}"
            )
        self.loss_scale.settle(result.finite)
        pace = Pace(time.perf_counter() - began, after.flops - seen.flops, self.peak)
        line = step_line(step + 1, result, rates, after, totals, self.per_epoch, pace, self.ranks.device)
        self.hooks.log(line)
        return after, line, result.stop

    def _factor(self, before: Place, after: Place) -> float:
        by = self.config.schedule
        return rate_factor(before.counted(by), after.counted(by), self.whole.counted(by), by)

    def _place(self, step: int, seen: Seen) -> Place:
        return Place(step, seen.conversations / self.per_epoch, seen.conversations, seen.tokens)


@contextlib.contextmanager
def _signals() -> Iterator[Callable[[], bool]]:
    """Ctrl-C and SIGTERM ask for a stop after the current step; a second Ctrl-C interrupts at once."""
    received: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        if received and number == signal.SIGINT:
            raise KeyboardInterrupt
        received.append(number)
        say("stopping when this step is saved; Ctrl-C again stops at once")

    before = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield lambda: bool(received)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
