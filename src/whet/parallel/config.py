"""Settings of the device mesh, activation recomputation and CPU offload."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from whet.core.config import Section
from whet.core.errors import WhetError


class ParallelConfig(Section):
    """How a run uses its devices. Memory and speed change, what the model learns does not."""

    replicate: int | None = Field(
        default=None,
        ge=1,
        description="Replicas of the model; each computes its share of a step's rows (data parallelism). Default: "
        "world size ÷ (shard × context × tensor × expert).",
    )
    shard: int | None = Field(
        default=None,
        ge=1,
        description="Processes over which the weights, gradients and optimizer states of a replica are sharded "
        "(FSDP2). Absent: every process holds all of them.",
    )
    context: int = Field(
        default=1,
        ge=1,
        description="Processes that compute each row together, each a slice of its tokens (context parallelism, "
        "Ulysses): for conversations too long for one device.",
    )
    tensor: int = Field(
        default=1,
        ge=1,
        description="Processes that compute each layer together, each a part of the heads and of the MLP width "
        "(tensor parallelism), following the model's own plan: for layers too large for one device. Keep these "
        "processes on one machine.",
    )
    expert: int = Field(
        default=1,
        ge=1,
        description="Processes over which the experts of each layer of a mixture are distributed (expert parallelism): "
        "tokens are sent to their experts and back. Each process computes its own rows.",
    )
    recompute: Literal["none", "selective", "full"] = Field(
        default="none",
        description="Activation recomputation (checkpointing): selective saves the results of matrix products and "
        "attention, full saves only each layer's input; the backward pass recomputes the rest.",
    )
    offload: Literal["none", "activations", "optimizer", "both", "weights"] = Field(
        default="none",
        description="CPU offload: activations saved for the backward pass, the optimizer state, or both; or, with "
        "shard, weights, gradients and optimizer state (weights), with the optimizer step on the CPU.",
    )
    timeout: float = Field(
        default=30.0,
        gt=0,
        description="Minutes without progress in any process after which a run of several processes ends; the error "
        "names the process the others wait for.",
    )

    def replicas(self, processes: int) -> int:
        """The size of the axis `replicate` for so many processes; an error if the mesh does not fit them."""
        fixed = (self.shard or 1) * self.context * self.tensor * self.expert
        replicate = self.replicate or max(1, processes // fixed)
        if replicate * fixed == processes:
            return replicate
        sizes = {
            "replicate": self.replicate, "shard": self.shard, "context": self.context if self.context > 1 else None,
            "tensor": self.tensor if self.tensor > 1 else None, "expert": self.expert if self.expert > 1 else None,
        }  # fmt: skip
        product = " · ".join(f"parallel.{key}={value}" for key, value in sizes.items() if value is not None)
        raise WhetError(
            f"{product} does not fit {processes:,} process{'es' if processes > 1 else ''}: the product must be the "
            f"number of processes{'' if self.replicate else ' or a divisor of it'}. Change these keys, or the number "
            "of processes (whet launch: launch.nodes, launch.gpus or launch.processes; torchrun: --nproc-per-node)"
        )

    @property
    def uses_fsdp(self) -> bool:
        """Sharding over one process would only copy every layer back and forth, except to offload weights."""
        if self.tensor > 1 or self.expert > 1:
            return True
        return self.shard is not None and (self.shard * self.context > 1 or self.offload == "weights")
