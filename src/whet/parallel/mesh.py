"""The device mesh: replicate × shard × context × tensor."""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import timedelta

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from whet.compat.torch_private import set_group_timeout
from whet.core.distributed import Ranks
from whet.core.errors import WhetError
from whet.core.watchdog import COLLECTIVE_MARGIN_S
from whet.parallel.config import ParallelConfig

# How the processes of a run are arranged: replicate × shard × context × tensor.
#
# Neighbours compute the same rows: rank = ((replica · shard + part) · context + slice) · tensor + share. What talks most
# is nearest.


@dataclass(frozen=True, slots=True)
class Mesh:
    """The processes, arranged."""

    ranks: Ranks
    replicate: int
    shard: int | None
    context: int
    weights: DeviceMesh | None
    """Over which weights are divided and gradients summed: (replicate, shard · context). None: nothing is divided."""
    slices: dist.ProcessGroup | None
    """Those that compute the same rows as this process. None: it computes its rows alone."""
    tensor: DeviceMesh | None = None
    """Those that compute each layer together. None: every layer is computed by one process."""


def build_mesh(config: ParallelConfig, ranks: Ranks) -> Mesh:
    """The arrangement that a configuration asks for, of all processes; one that does not fit is refused."""
    world, context = ranks.world_size, config.context
    fixed = (config.shard or 1) * context * config.tensor
    replicate = config.replicate or max(1, world // fixed)
    if replicate * fixed != world:
        asked = {
            "replicate": config.replicate, "shard": config.shard, "context": context if context > 1 else None,
            "tensor": config.tensor if config.tensor > 1 else None,
        }  # fmt: skip
        product = " · ".join(f"parallel.{key}={value}" for key, value in asked.items() if value is not None)
        raise WhetError(
            f"{product} does not fit {world} process{'es' if world > 1 else ''}: their product must be the number of "
            f"processes{'' if config.replicate else ', or divide it'}. Start others (torchrun --nproc-per-node), or "
            "change these"
        )
    ranks = replace(ranks, context_size=context, tensor_size=config.tensor)
    patience = timedelta(minutes=config.timeout, seconds=COLLECTIVE_MARGIN_S)  # the watchdog speaks first
    weights, slices, tensor = None, None, None
    if config.tensor > 1:  # also what is not divided by it is divided by FSDP2, if by one: the same code for both
        sizes = (replicate, (config.shard or 1) * context, config.tensor)
        whole = init_device_mesh(ranks.device.type, sizes, mesh_dim_names=("replicate", "shard", "tensor"))
        weights, tensor = whole["replicate", "shard"], whole["tensor"]
    elif config.divides_weights:
        if not dist.is_initialized():
            _init_single_process_group(ranks)
        divided = (config.shard or 1) * context
        weights = init_device_mesh(ranks.device.type, (replicate, divided), mesh_dim_names=("replicate", "shard"))
    for axes in (weights, tensor):
        for group in axes.get_all_groups() if axes is not None else ():
            set_group_timeout(patience, group)
    if context > 1:
        for first in range(0, world, context):  # every process takes part in making every group
            group = dist.new_group(list(range(first, first + context)), timeout=patience)
            if first <= ranks.rank < first + context:
                slices = group
    return Mesh(ranks, replicate, config.shard, context, weights, slices, tensor)


def _init_single_process_group(ranks: Ranks) -> None:
    """A single process divides its weights by one: the same code, and a group of processes that needs no network."""
    backend = "gloo" if ranks.device.type == "cpu" else None
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
