"""Which checkpoints are kept on disk: the newest, the best, every n-th. Pure functions of step numbers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Retention:
    """A checkpoint stays while any of these wants it."""

    last: int = 1
    """So many of the newest, at least one: a run can always go on."""
    best: int = 0
    """So many of those with the best score."""
    every: int | None = None
    """Those whose step is a multiple of this."""

    def steps_to_keep(
        self, steps: Iterable[int], scores: Mapping[int, float], lower_is_better: bool = True
    ) -> set[int]:
        """Of the complete checkpoints after `steps`, those that stay. Of equal scores the earlier step is better."""
        known = sorted(set(steps))
        newest = known[-max(1, self.last) :]
        ranked = rank_by_score(known, scores, lower_is_better)
        periodic = [step for step in known if self.every and step % self.every == 0]
        return {*newest, *ranked[: self.best], *periodic}

    def max_kept(self, steps: int) -> int:
        """How many there can be at once in a run of so many steps."""
        return min(steps, self.last + self.best + (steps // self.every if self.every else 0))


def rank_by_score(steps: Iterable[int], scores: Mapping[int, float], lower_is_better: bool = True) -> list[int]:
    """Those of `steps` that have a score, the best first."""
    scored = sorted(step for step in steps if step in scores)
    return sorted(scored, key=lambda step: scores[step] if lower_is_better else -scores[step])


def lower_is_better(metric: str) -> bool:
    """Losses and bits fall; accuracies and the shares of right answers in tasks rise."""
    return not (metric.startswith("task/") or "accuracy" in metric)
