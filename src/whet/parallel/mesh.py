"""The device mesh: replicate × shard × context × tensor, or replicate × shard × expert.

rank = ((replica · shard + shard_rank) · context + context_rank) · tensor + tensor_rank: processes that communicate most
are neighbours. Expert parallelism is not combined with context and tensor parallelism; its ranks are data-parallel.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import timedelta

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from whet.compat.torch_private import set_group_timeout
from whet.core.distributed import Ranks
from whet.core.watchdog import COLLECTIVE_MARGIN_S
from whet.parallel.config import ParallelConfig


@dataclass(frozen=True, slots=True)
class Mesh:
    """The processes of a run and their groups."""

    ranks: Ranks
    replicate: int
    shard: int | None
    context: int
    fsdp_mesh: DeviceMesh | None
    """(replicate, shard · context): weights are sharded over the second axis. None: without FSDP2."""
    context_group: dist.ProcessGroup | None
    """The processes that compute the same rows as this one. None: without context parallelism."""
    tensor_mesh: DeviceMesh | None = None
    """The processes that compute each layer together. None: without tensor parallelism."""
    expert_mesh: DeviceMesh | None = None
    """The processes over which the experts of a layer are distributed. None: without expert parallelism."""


def build_mesh(config: ParallelConfig, ranks: Ranks) -> Mesh:
    """Create the process groups of the configured mesh. Every process must call this."""
    world, context = ranks.world_size, config.context
    replicate = config.replicas(world)
    ranks = replace(ranks, context_size=context, tensor_size=config.tensor)
    # a little longer than parallel.timeout: the watchdog, which names the culprit, reports first
    timeout = timedelta(minutes=config.timeout, seconds=COLLECTIVE_MARGIN_S)
    fsdp_mesh, tensor_mesh, expert_mesh, context_group = None, None, None, None
    if config.tensor > 1:  # with FSDP2 even over one process: one code path for weights with and without a plan
        shape = (replicate, (config.shard or 1) * context, config.tensor)
        whole = init_device_mesh(ranks.device.type, shape, mesh_dim_names=("replicate", "shard", "tensor"))
        fsdp_mesh, tensor_mesh = whole["replicate", "shard"], whole["tensor"]
    elif config.expert > 1:
        shape = (replicate, config.shard or 1, config.expert)
        whole = init_device_mesh(ranks.device.type, shape, mesh_dim_names=("replicate", "shard", "expert"))
        fsdp_mesh, expert_mesh = whole["replicate", "shard"], whole["expert"]
    elif config.uses_fsdp:
        if not dist.is_initialized():
            _init_single_process_group(ranks)
        pair = (replicate, (config.shard or 1) * context)
        fsdp_mesh = init_device_mesh(ranks.device.type, pair, mesh_dim_names=("replicate", "shard"))
    for mesh in (fsdp_mesh, tensor_mesh, expert_mesh):
        for group in mesh.get_all_groups() if mesh is not None else ():
            set_group_timeout(timeout, group)
    if context > 1:
        for first in range(0, world, context):  # new_group is collective: every process creates every group
            group = dist.new_group(list(range(first, first + context)), timeout=timeout)
            if first <= ranks.rank < first + context:
                context_group = group
    return Mesh(ranks, replicate, config.shard, context, fsdp_mesh, context_group, tensor_mesh, expert_mesh)


def _init_single_process_group(ranks: Ranks) -> None:
    """FSDP2 needs a process group also for one process; this one needs no network."""
    backend = "gloo" if ranks.device.type == "cpu" else None
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
