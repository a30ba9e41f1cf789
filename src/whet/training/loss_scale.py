"""Dynamic loss scaling for fp16, whose range ends at 6e-8 below and 65 504 above.

The scale doubles after 2000 steps without overflow and halves with each overflow; the step that overflowed is skipped.
In every other precision the scale is 1 and constant.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

_INITIAL_SCALE, _MAX_SCALE, _GROWTH_INTERVAL = 2.0**16, 2.0**24, 2000


@dataclass(slots=True)
class LossScaler:
    """The factor of the loss in the backward pass. The names are keys of a checkpoint's manifest."""

    value: float = 1.0
    moves: bool = False
    """Whether the scale is dynamic."""
    calm: int = 0
    """Steps since it last changed."""

    @classmethod
    def for_fp16(cls) -> LossScaler:
        return cls(_INITIAL_SCALE, moves=True)

    def restore(self, saved: dict[str, Any]) -> None:
        """Continue from the state in a checkpoint."""
        self.value, self.calm = saved["value"], saved["calm"]

    def can_shrink(self) -> bool:
        """Whether a smaller scale could avoid an overflow. At 1 the model itself overflows."""
        return self.moves and self.value > 1

    def update(self, overflowed: bool) -> None:
        """After each step."""
        if not self.moves:
            return
        if overflowed:
            self.value, self.calm = max(1.0, self.value / 2), 0
            return
        self.calm += 1
        if self.calm == _GROWTH_INTERVAL:
            self.value, self.calm = min(_MAX_SCALE, self.value * 2), 0
