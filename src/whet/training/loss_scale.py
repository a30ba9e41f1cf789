"""The loss scale of fp16: gradients too small for its range are computed larger and made small again.

fp16 ends at 6e-8 below and 65 504 above. The scale doubles after a long time without overflow and halves with each;
the step that overflowed is left out. In every other precision the scale is 1 and never moves.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

_INITIAL_SCALE, _MAX_SCALE, _GROWTH_INTERVAL = 2.0**16, 2.0**24, 2000


@dataclass(slots=True)
class LossScaler:
    """What the loss is multiplied by before gradients are taken."""

    value: float = 1.0
    moves: bool = False
    calm: int = 0
    """Steps since it last moved."""

    @classmethod
    def for_fp16(cls) -> LossScaler:
        return cls(_INITIAL_SCALE, moves=True)

    def restore(self, saved: dict[str, Any]) -> None:
        """Go on as a checkpoint left it."""
        self.value, self.calm = saved["value"], saved["calm"]

    def can_shrink(self) -> bool:
        """Whether an overflow may be the scale's fault. At 1 it is the model's."""
        return self.moves and self.value > 1

    def update(self, overflowed: bool) -> None:
        """After a step: fall at once, rise slowly."""
        if not self.moves:
            return
        if overflowed:
            self.value, self.calm = max(1.0, self.value / 2), 0
            return
        self.calm += 1
        if self.calm == _GROWTH_INTERVAL:
            self.value, self.calm = min(_MAX_SCALE, self.value * 2), 0
