"""The knobs of how a run uses its devices."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from whet.core.config import Section


class ParallelConfig(Section):
    """How a run uses its devices. It changes memory and speed, not what is learned."""

    recompute: Literal["none", "selective", "full"] = Field(
        default="none",
        description="What the backward pass computes again instead of keeping it: selective keeps matrix products and "
        "attention, full keeps the input of each layer only.",
    )
    offload: Literal["none", "activations", "optimizer", "both"] = Field(
        default="none",
        description="What waits in the host's memory until it is needed: what layers keep for the backward pass, the "
        "optimizer's state, or both.",
    )
    timeout: float = Field(
        default=30.0,
        gt=0,
        description="Minutes after which a run of several processes, none of which gets any further, ends with the "
        "name of the one that the others wait for.",
    )
