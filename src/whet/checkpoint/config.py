"""Settings of checkpointing and of the export at the end of a run."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from whet.checkpoint.retention import Retention
from whet.core.config import Section


class CheckpointConfig(Section):
    """Saving states that a run can continue from."""

    every: int | None = Field(
        default=None,
        ge=1,
        description="Steps between checkpoints; without this, minutes and epochs, a tenth of the run. There is always "
        "one at the end, and one when the run is asked to stop.",
    )
    minutes: float | None = Field(default=None, gt=0, description="Also after so many minutes without one.")
    epochs: float | None = Field(default=None, gt=0, description="Also after so many passes over the data.")
    keep_last: int = Field(default=2, ge=1, description="How many of the newest stay on disk.")
    keep_best: int = Field(
        default=0, ge=0, description="How many of the best by eval.best stay too; then every evaluation has one."
    )
    keep_every: int | None = Field(default=None, ge=1, description="Those whose step is a multiple of this stay too.")
    optimizer: Literal["all", "newest"] = Field(
        default="all",
        description="newest: only the newest two keep the optimizer's state, two thirds of the size of most; the "
        "others can be exported and started from, not resumed.",
    )

    @property
    def retention(self) -> Retention:
        return Retention(self.keep_last, self.keep_best, self.keep_every)


class ExportConfig(Section):
    """What is shipped when the run is done."""

    at_end: Literal["none", "hf", "merged", "adapter", "gguf"] = Field(
        default="merged",
        description="A plain model folder with adapters merged in (hf is the same), the adapter alone, a GGUF file, or "
        "nothing; in the numbers that the run computes in. `whet export` makes others.",
    )
