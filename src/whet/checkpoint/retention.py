"""Which checkpoints to keep: the newest, the best, every n-th. Pure functions of step numbers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Retention:
    """A checkpoint is kept if any of these rules keeps it."""

    last: int = 1
    """Number of newest to keep; at least one, so that the run can be resumed."""
    best: int = 0
    """Number of those with the best score to keep."""
    every: int | None = None
    """Keep steps that are a multiple of this."""

    def steps_to_keep(
        self, steps: Iterable[int], scores: Mapping[int, float], lower_is_better: bool = True
    ) -> set[int]:
        """The subset of `steps` to keep. Of equal scores, the earlier step is the better one."""
        known = sorted(set(steps))
        newest = known[-max(1, self.last) :]
        ranked = rank_by_score(known, scores, lower_is_better)
        periodic = [step for step in known if self.every and step % self.every == 0]
        return {*newest, *ranked[: self.best], *periodic}

    def max_kept(self, steps: int) -> int:
        """The most checkpoints that a run of this many steps keeps at a time."""
        return min(steps, self.last + self.best + (steps // self.every if self.every else 0))


def rank_by_score(steps: Iterable[int], scores: Mapping[int, float], lower_is_better: bool = True) -> list[int]:
    """The steps that have a score, best first."""
    scored = sorted(step for step in steps if step in scores)
    return sorted(scored, key=lambda step: scores[step] if lower_is_better else -scores[step])


def lower_is_better(metric: str) -> bool:
    """True for losses and bits per byte, False for accuracies and task scores."""
    return not (metric.startswith("task/") or "accuracy" in metric)
