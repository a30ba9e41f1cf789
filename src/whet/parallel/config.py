"""The knobs of how a run uses its devices."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from whet.core.config import Section


class ParallelConfig(Section):
    """How a run uses its devices. It changes memory and speed, not what is learned."""

    replicate: int | None = Field(
        default=None,
        ge=1,
        description="Copies of the model, each with its share of a step's rows; absent: as many as the processes make.",
    )
    shard: int | None = Field(
        default=None,
        ge=1,
        description="Processes among which each copy's weights, gradients and optimizer states are divided (FSDP2); "
        "absent: every process holds all of them.",
    )
    context: int = Field(
        default=1,
        ge=1,
        description="Processes that compute each row together, every one a slice of its tokens (Ulysses): for "
        "conversations that are too long for one device.",
    )
    tensor: int = Field(
        default=1,
        ge=1,
        description="Processes that compute each layer together, every one with its part of the heads and of the "
        "feed-forward width, by the model's own plan: for layers that are too large for one device. They should be on "
        "one machine.",
    )
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
