"""The effect of a run on each weight that it trains, as the run and its exports report it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

EFFECT_FILE = "effect.json"
"""In a run's folder."""
_MAX_NAMED, _MAX_NUMBERS = 3, 8


@dataclass(slots=True)
class WeightEffect:
    """One weight of the merged model. None: not measured."""

    module: str
    """Its name."""
    shape: tuple[int, ...]
    change: float | None
    """‖ΔW‖ ÷ ‖W‖; None too for a weight that was zero."""
    moved: bool | None
    gradient: bool | None = None
    """Whether it ever got one."""
    exported: bool | None = None
    """Whether the export has the trained weight, up to rounding."""
    updates: int | None = None
    """Elements that training changed."""
    lost: int | None = None
    """Of these, the ones that rounding to the dtype of the export sets back to the value before."""
    experts: int | None = None
    untouched_experts: list[int] = field(default_factory=list)
    """Experts that did not change: they got no token."""

    @property
    def experts_touched(self) -> float | None:
        """The share of experts that changed."""
        return None if self.experts is None else 1 - len(self.untouched_experts) / self.experts

    def as_dict(self) -> dict[str, Any]:
        """Without what was not measured."""
        found = {key: value for key, value in asdict(self).items() if value is not None}
        if self.experts is None:
            del found["untouched_experts"]
        else:
            found["experts_touched"] = self.experts_touched
        return found | {"shape": list(self.shape)}


def relative_change(update_squares: float, base_squares: float) -> float | None:
    """‖ΔW‖ ÷ ‖W‖ from sums of squares; None if W was zero, or either has elements that are not finite."""
    if not base_squares or not math.isfinite(update_squares) or not math.isfinite(base_squares):
        return None
    return (update_squares / base_squares) ** 0.5


def effect_summary(effects: Sequence[WeightEffect]) -> dict[str, Any]:
    """The effect on all weights together: counts, and the names of weights that training did not reach."""
    changes = [each.change for each in effects if each.change is not None and each.moved]
    updates = sum(each.updates or 0 for each in effects)
    with_experts = [each for each in effects if each.experts is not None]
    summary: dict[str, Any] = {
        "weights": len(effects),
        "moved": sum(each.moved is not False for each in effects),
        "without_gradient": [each.module for each in effects if each.gradient is False],
        "unmoved": [each.module for each in effects if each.moved is False],
    }
    if changes:
        summary["smallest_change"], summary["largest_change"] = min(changes), max(changes)
    if any(each.exported is not None for each in effects):
        summary["exported"] = sum(each.exported is True for each in effects)
    if updates:
        summary["lost_to_rounding"] = sum(each.lost or 0 for each in effects) / updates
    if with_experts:
        summary["experts"] = sum(each.experts or 0 for each in with_experts)
        summary["untouched_experts"] = sum(len(each.untouched_experts) for each in with_experts)
    return summary


def effect_certificate(effects: Sequence[WeightEffect]) -> dict[str, Any]:
    """The summary, and `modules`: a line for each weight."""
    return {**effect_summary(effects), "modules": [each.as_dict() for each in effects]}


def describe_effect(summary: dict[str, Any]) -> str:
    """One line of a summary."""
    count, moved = summary["weights"], summary["moved"]
    parts = [f"{'all' if moved == count else f'{moved:,} of'} {count:,} trained weights moved"]
    if "smallest_change" in summary:
        parts[0] += f" (‖ΔW‖/‖W‖ {summary['smallest_change']:.1e} to {summary['largest_change']:.1e})"
    if "exported" in summary:
        exported = summary["exported"]
        parts.append(f"{'all' if exported == count else f'{exported:,}'} of them are in the export")
    if "lost_to_rounding" in summary:
        lost = f"rounding lost {summary['lost_to_rounding']:.1%} of the changed elements"
        parts.append(f"{lost}, the smallest changes: usual after few steps. --dtype f32 keeps them")
    if summary.get("untouched_experts"):
        parts.append(f"{summary['untouched_experts']:,} of {summary['experts']:,} expert weights got no token")
    return "; ".join(parts)


def effect_warnings(effects: Sequence[WeightEffect]) -> list[str]:
    """What a run should not end with unnoticed."""
    found = []
    if names := [each.module for each in effects if each.gradient is False]:
        found.append(
            f"{len(names):,} of {len(effects):,} trained weights got no gradient, so they learned nothing: "
            f"{listed(names)}. The loss does not depend on them"
        )
    if names := [each.module for each in effects if each.gradient and each.moved is False]:
        found.append(
            f"{len(names):,} of {len(effects):,} trained weights got a gradient and did not move: {listed(names)}. "
            "Raise train.optimizer.lr"
        )
    idle = [each for each in effects if each.untouched_experts]
    if names := [f"{each.module} ({list_experts(each.untouched_experts)})" for each in idle]:
        found.append(f"experts got no token in training, and so did not change: {listed(names)}")
    return found


def list_experts(experts: Sequence[int]) -> str:
    """The first few numbers."""
    more = len(experts) - _MAX_NUMBERS
    return ", ".join(map(str, experts[:_MAX_NUMBERS])) + (f" and {more} more" if more > 0 else "")


def listed(names: Sequence[str]) -> str:
    """The first few names."""
    more = len(names) - _MAX_NAMED
    return ", ".join(names[:_MAX_NAMED]) + (f" and {more:,} more" if more > 0 else "")
