"""Settings of the checkpoint section."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from whet.checkpoint.directory import Retention
from whet.core.config import Section


class CheckpointConfig(Section):
    """When checkpoints are saved, and which are kept."""

    every: int | None = Field(
        default=None,
        ge=1,
        description="Steps between checkpoints. Default: a tenth of the run, if minutes and epochs are unset too. A "
        "checkpoint is always saved at the end of the run, and when a signal stops the run.",
    )
    minutes: float | None = Field(
        default=None, gt=0, description="Also save if the last save was this many minutes ago."
    )
    epochs: float | None = Field(default=None, gt=0, description="Also save each time this many epochs have passed.")
    keep_last: int = Field(default=2, ge=1, description="Number of newest checkpoints to keep.")
    keep_best: int = Field(
        default=0,
        ge=0,
        description="Number of best checkpoints by eval.best to keep; every evaluation then saves a checkpoint.",
    )
    keep_every: int | None = Field(default=None, ge=1, description="Keep checkpoints whose step is a multiple of this.")
    optimizer: Literal["all", "newest", "none"] = Field(
        default="all",
        description="newest: keep the optimizer state, usually two thirds of a checkpoint, only in the newest two. "
        "Older ones can be exported and used as model.path, but not resumed. none: save no optimizer state, so an "
        "interrupted run cannot be resumed.",
    )

    @property
    def retention(self) -> Retention:
        return Retention(self.keep_last, self.keep_best, self.keep_every)
