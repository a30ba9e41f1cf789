"""A place whose trials train nothing: their loss is a function of the recipe, and their folders say so."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path

from whet.search.trials import TrialEnd, TrialRun

BEST_RATE = 3e-3


def planted_loss(trial: TrialRun) -> float:
    """Lowest at a learning rate of 3e-3; falls with the steps."""
    optimizer = trial.config.train.optimizer
    distance = abs(math.log10(optimizer.lr / BEST_RATE))
    return 1 + distance + (0.1 if optimizer.name == "muon" else 0) + 2 / trial.until


class CurvePlace:
    """Runs trials at once. `dies_at`: raises KeyboardInterrupt in the n-th call, as a kill would."""

    slots = 1

    def __init__(self, loss: Callable[[TrialRun], float | TrialEnd] = planted_loss, dies_at: int | None = None) -> None:
        self.starts: list[tuple[int, int]] = []
        self._loss, self._left, self._ended = loss, dies_at, list[TrialEnd]()
        self.most_running = 0

    def _live(self) -> None:
        if self._left is not None:
            self._left -= 1
            if self._left < 0:
                raise MemoryError("killed")

    def start(self, trial: TrialRun) -> None:
        self._live()
        self.starts.append((trial.number, trial.until))
        found = self._loss(trial)
        if isinstance(found, TrialEnd):
            self._ended.append(found)
            return
        trial.folder.mkdir(parents=True, exist_ok=True)
        write_metrics(trial.folder, trial.until, found)
        self._ended.append(TrialEnd(trial.number, 0))
        self.most_running = max(self.most_running, len(self._ended))
        self._live()

    def poll(self, seconds: float) -> list[TrialEnd]:
        self._live()
        return [self._ended.pop(0)] if self._ended else []

    def stop(self) -> None: ...

    def kill(self) -> None: ...

    def close(self) -> None: ...


def write_metrics(folder: Path, step: int, loss: float) -> None:
    """The lines of a step and of its evaluation."""
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": step, "loss": loss, "tokens": 100 * step}) + "\n")
        file.write(json.dumps({"step": step, "val_loss": loss}) + "\n")
