"""Settings of `whet launch`."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from whet.core.config import Section


class LaunchConfig(Section):
    """How `whet launch` starts a run. It changes nothing that is learned."""

    alternatives: ClassVar[tuple[tuple[str, ...], ...]] = (("gpus", "processes"),)

    nodes: int = Field(default=1, ge=1, description="Machines; on each of them the same `whet launch` is started.")
    gpus: int | None = Field(
        default=None,
        ge=1,
        description="GPUs of each machine to use, with a process each; absent: all it has, or one process without any.",
    )
    processes: int | None = Field(
        default=None, ge=1, description="Processes on each machine, instead of gpus: for machines without."
    )
    rendezvous: str | None = Field(
        default=None,
        pattern=r"^[^\s:]+:\d+$|^\[[0-9a-fA-F:]+\]:\d+$",
        description="HOST:PORT where several machines find each other: one of them, and a port that is free there.",
    )
    max_restarts: int = Field(
        default=3, ge=0, description="How many times a run that crashed is started again from its newest checkpoint."
    )
    wait: float = Field(
        default=1.0,
        gt=0,
        description="Seconds before the first restart; each further one waits twice as long, up to a minute.",
    )
    env: dict[str, str] = Field(default={}, description="Environment variables for the processes, by name.")
