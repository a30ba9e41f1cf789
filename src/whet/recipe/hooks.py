"""What the training loop calls, tied to a run's files."""

from __future__ import annotations

import math
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from whet.checkpoint import place
from whet.checkpoint.save import Saver
from whet.config import Config
from whet.core.console import say
from whet.core.errors import RunFailedError
from whet.core.ranks import Ranks
from whet.core.run import RunFolder
from whet.data.loader import Loader
from whet.model.loss import LossModel
from whet.recipe.data import Data
from whet.recipe.fault import batch_of, event_of, message_of, write_batch, write_passed_over
from whet.recipe.first_step import FirstStep, sentence
from whet.recipe.folder import Files, go_on, kept_metrics
from whet.recipe.measure import measure
from whet.recipe.parts import Arithmetic
from whet.train.guard import Guard
from whet.train.loss_scale import LossScale
from whet.train.metrics import Seen
from whet.train.track import Trackers
from whet.train.trainer import RETRY, Fault, Place


@dataclass(frozen=True, slots=True)
class RunHooks:
    """Every rank has them; rank 0 alone has a folder and files."""

    config: Config
    data: Data
    root: LossModel
    optimizer: torch.optim.Optimizer
    loss_scale: LossScale
    ranks: Ranks
    arithmetic: Arithmetic
    steps: int
    saver: Saver | None
    """None: nothing is kept."""
    folder: RunFolder | None
    files: Files | None
    trackers: Trackers
    loader: Loader
    guard: Guard
    first_step: FirstStep

    def log(self, line: dict[str, Any]) -> None:
        if not self.first_step.is_done:
            self._tell(self.first_step.done(), line["step"])
            if self.saver is not None:
                self.saver.get_ready()
        if self.files is not None and self.folder is not None:
            self.files.metrics.write(line)
            self.files.step_ended()
            self.trackers.write(line)
            self.folder.beat(line["step"], self.steps)

    def _tell(self, seconds: dict[str, float], step: int) -> None:
        say(sentence(seconds))
        if self.folder is not None:
            self.folder.first_step = {key: round(value, 3) for key, value in seconds.items()}
            self.folder.set_status("running", step, self.steps)

    def evaluate(self, step: int) -> None:
        results, samples = measure(self.config, self.data, self.root, self.ranks, self.arithmetic)
        if not self.first_step.is_done:
            self.first_step.ends("measure_s")
        broken = [name for name, value in results.items() if not math.isfinite(value)]
        if broken:
            raise RunFailedError(
                f"step {step}: {', '.join(broken)} of the evaluation is not finite: the model has diverged. {RETRY}"
            )
        if self.files is not None and results:
            for sample in samples:
                self.files.samples.write({"step": step, **sample.as_dict()})
            line = {"time": time.time(), "step": step, **results}
            self.files.metrics.write(line)
            self.trackers.write(line)
            if self.saver is not None and self.config.eval.best in results:
                self.saver.score({step: results[self.config.eval.best]})
            say(f"step {step}: " + ", ".join(f"{name} {_shown(value)}" for name, value in results.items()))

    def save(self, step: int, seen: Seen) -> None:
        if self.saver is None:
            return
        state: dict[str, Any] = {"seen": asdict(seen), "loss_scale": asdict(self.loss_scale)}
        if self.files is not None:
            state |= self.files.sizes
        self.saver.save(step, state)

    def wait_for_save(self) -> None:
        if self.saver is not None:
            self.saver.wait()

    def save_requested(self) -> bool:
        """Rank 0's clock decides. A save that failed asks for the next one, which then says so on every rank."""
        if self.saver is None or not self.ranks.is_first:
            return False
        minutes = self.config.checkpoint.minutes
        is_late = minutes is not None and time.monotonic() - self.saver.last_saved >= 60 * minutes
        return is_late or self.saver.has_failed

    def fault(self, fault: Fault) -> str:
        """The event and the batch on disk; where the run ends, also the state before this step, if it is sound."""
        file = self.config.folder / "faults" / f"step-{fault.step:06d}.json"
        event = event_of(fault, self.data, file)
        if self.files is not None:
            scale = self.loss_scale.value
            write_batch(file, batch_of(fault, self.config, self.data, self.loader, self.arithmetic.name, scale))
            self.files.events.write(event)
        done = fault.step - 1
        self.wait_for_save()
        saved = self.ranks.gather(place.steps_in(self._checkpoints) if self.ranks.is_first else [])
        if fault.verdict.action == "stop" and done > 0 and done not in saved and not fault.findings.weights:
            self.save(done, fault.before)
            self.wait_for_save()
        return message_of(event)

    def can_roll_back(self) -> bool:
        self.wait_for_save()
        return bool(self.ranks.gather(place.resumable(self._checkpoints) if self.ranks.is_first else []))

    @property
    def _checkpoints(self) -> Path:
        return self.config.folder / "checkpoints"

    def roll_back(self, step: int) -> Place:
        self.wait_for_save()
        path = self.config.folder
        done = self.ranks.gather(place.resumable(self._checkpoints) if self.ranks.is_first else [])[-1]
        self.guard.passed_over.append((done + 1, step))
        if self.folder is not None:  # before anything is undone: a run that dies here passes over them too
            write_passed_over(path, self.guard)
        start, seen, kept = go_on(self.config, self.root, self.optimizer, self.loss_scale, self.ranks)
        if self.files is not None:
            self.files.cut(kept)
        self.trackers.go_back(start)
        self.guard.recall(kept_metrics(path, kept, self.ranks))
        return Place(start, seen)

    def stop_requested(self) -> bool:
        return self.folder is not None and self.folder.stop_requested()


def _shown(value: float) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:.4f}"
