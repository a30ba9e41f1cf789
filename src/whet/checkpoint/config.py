"""The knobs of saving and shipping."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from whet.core.config import Section


class CheckpointConfig(Section):
    """Saving states that a run can continue from."""

    every: int | None = Field(default=None, ge=1, description="Steps between checkpoints; absent: a tenth of the run.")
    keep_last: int = Field(default=2, ge=1, description="How many of the newest stay on disk.")


class ExportConfig(Section):
    """What is shipped when the run is done."""

    at_end: Literal["none", "merged", "adapter"] = Field(
        default="merged",
        description="A plain model folder with adapters merged in, the adapter alone, or nothing.",
    )
