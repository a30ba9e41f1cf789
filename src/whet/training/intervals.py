"""When a run evaluates and saves."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Intervals:
    """When a run evaluates and saves, in finished steps."""

    steps: int
    """Of the whole run; the schedule depends on it."""
    last: int
    """The last step of this process: that of the run, or --until."""
    evaluate_every: int | None
    evaluate_at_start: bool
    save_every: int | None
    save_epochs: float | None = None
    save_evaluated: bool = False
    """Save at every evaluation, so that the best checkpoint can be kept."""
    first: int = 0
    """The step after which the run starts (train.start_step)."""

    def evaluates_before_step(self, start: int) -> bool:
        """Whether to evaluate before training starts or resumes after `start` steps. A checkpoint is saved before its
        step is evaluated, so a resumed run evaluates it."""
        return self.evaluate_at_start if start == self.first else self.evaluates_after(start)

    def evaluates_after(self, step: int) -> bool:
        return step == self.last or bool(self.evaluate_every and step % self.evaluate_every == 0)

    def saves_after(self, step: int, epochs_before: float = 0.0, epochs_after: float = 0.0) -> bool:
        """`epochs_before`, `epochs_after`: epochs finished before this step and after it."""
        saved_epochs = self.save_epochs or math.inf
        return (
            step == self.last
            or bool(self.save_every and step % self.save_every == 0)
            or math.floor(epochs_before / saved_epochs) < math.floor(epochs_after / saved_epochs)
            or (self.save_evaluated and self.evaluates_after(step))
        )
