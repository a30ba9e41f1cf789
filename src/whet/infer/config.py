"""The knobs of measuring."""

from __future__ import annotations

from pydantic import Field

from whet.core.config import Section


class EvalConfig(Section):
    """Measuring while training."""

    every: int | None = Field(default=None, ge=1, description="Steps between evaluations; absent: start and end only.")
    rows: int | None = Field(
        default=None,
        ge=1,
        description="At most so many packed rows of the validation data, evenly chosen; absent: all.",
    )
    at_start: bool = Field(default=True, description="Measure the untrained model too, as the line to beat.")
    tasks: list[str] = Field(default=[], description="Tasks to score by generated answers, such as orders.")
    examples: int = Field(default=64, ge=1, description="Held-out examples of each task.")
    best: str = Field(
        default="val_loss",
        description="Which measure checkpoints/best and checkpoint.keep_best go by, such as val_loss or task/orders; "
        "higher is better for tasks and accuracies, lower for all else.",
    )
