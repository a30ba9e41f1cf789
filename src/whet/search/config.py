"""Settings of the search section. The ranges themselves stand where the values would: see space.py."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from whet.core.config import Section


class SearchConfig(Section):
    """How `whet search` chooses trials and stops bad ones."""

    method: Literal["asha", "tpe", "random", "grid", "single"] = Field(
        default="asha",
        description="asha: random values, and trials that fall behind at a rung stop early. tpe: full-length trials, "
        "sampled near good earlier ones. random: full-length trials. grid: every combination. single: one trial.",
    )
    metric: str | None = Field(
        default=None,
        description="The metric of evaluations that the search improves, such as val_loss or task/orders; absent: "
        "eval.best. Higher is better for tasks and accuracies, lower for all others.",
    )
    max_trials: int | None = Field(
        default=None, ge=1, le=10**6, description="Number of trials; absent: 16, or for grid every combination."
    )
    concurrent: int | None = Field(
        default=None,
        ge=1,
        le=10**4,
        description="Trials that run at the same time; absent: as many as this machine has devices for; one on a CPU.",
    )
    mode: Literal["aggressive", "standard", "conservative"] = Field(
        default="standard",
        description="asha: which brackets to use. A bracket with more rungs stops trials earlier. aggressive: only "
        "the deepest bracket; standard: the deeper half; conservative: all.",
    )
    divisor: float = Field(
        default=4,
        ge=2,
        le=1000,
        description="asha: at a rung, one of this many trials continues, and the next rung is this many times longer.",
    )
    max_rungs: int = Field(default=5, ge=1, le=50, description="asha: maximum number of rungs in a bracket.")
    storage: str | None = Field(
        default=None,
        description="Where Optuna keeps the trials, as a URL such as postgresql://HOST/DATABASE or "
        "sqlite:///FILE; absent: journal.log in the search's folder.",
    )
