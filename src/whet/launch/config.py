"""Settings of `whet launch`."""

from __future__ import annotations

import os
from typing import ClassVar

from pydantic import Field

from whet.core.config import Section


class LaunchConfig(Section):
    """How `whet launch` starts a run. None of these settings changes the training result."""

    alternatives: ClassVar[tuple[tuple[str, ...], ...]] = (("gpus", "processes"),)

    nodes: int = Field(default=1, ge=1, description="Number of machines; run the same `whet launch` on each.")
    gpus: int | None = Field(
        default=None,
        ge=1,
        description="GPUs to use on each machine, one process for each. Absent: all of them, or one process on a "
        "machine without GPUs.",
    )
    processes: int | None = Field(
        default=None, ge=1, description="Processes on each machine, instead of gpus: for machines without GPUs."
    )
    rendezvous: str | None = Field(
        default=None,
        pattern=r"^[^\s:]+:\d+$|^\[[0-9a-fA-F:]+\]:\d+$",
        description="HOST:PORT of the rendezvous of several machines: one of them and a free port on it; the same "
        "value on all.",
    )
    max_restarts: int = Field(
        default=3, ge=0, description="How many times a crashed run is restarted from its newest checkpoint."
    )
    wait: float = Field(
        default=1.0,
        gt=0,
        description="Seconds before the first restart; doubles with each restart, up to 60.",
    )
    env: dict[str, str] | list[str] = Field(
        default={},
        description="Environment variables for the processes: a mapping of names to values, or names alone, which must "
        "be set. The run folder keeps the names, never the values.",
    )

    def variables(self) -> dict[str, str | None]:
        """The variables by name; those given by name alone come from the environment, None if they are not set."""
        return {name: os.environ.get(name) for name in self.env} if isinstance(self.env, list) else dict(self.env)
