"""What `whet check` says about one thing that it looked at."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

Level = Literal["ok", "warning", "fault"]


@dataclass(frozen=True, slots=True)
class Finding:
    """What one check found."""

    check: str
    level: Level
    text: str

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)
