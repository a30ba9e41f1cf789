"""Local shards of DTensors. A plain tensor is its own only shard, so callers need no second path."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch import distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from whet.compat.torch_private import dtensor_local, dtensor_of_shape, local_shape_and_offset
from whet.core.distributed import Ranks


def local_tensor(tensor: Tensor) -> Tensor:
    """This process's shard, sharing its memory and outside autograd; a plain tensor itself."""
    return dtensor_local(tensor) if isinstance(tensor, DTensor) else tensor


def shard_like(weight: Tensor, part: Tensor) -> Tensor:
    """`part` as this process's shard of a tensor that is sharded like `weight`; its rows may have another width. `part`
    stays on its device."""
    if not isinstance(weight, DTensor):
        return part
    alike = part.shape == local_tensor(weight).shape
    shape = weight.shape if alike else torch.Size((len(weight), *part.shape[1:]))
    return dtensor_of_shape(weight, part, shape)


def unsharded(tensor: Tensor) -> Tensor:
    """The whole tensor, gathered on every process; a plain tensor itself.

    Where processes share a GPU (launch.share_gpu) it goes through the host: `full_tensor` of CUDA shards over Gloo ends
    in a segmentation fault (torch 2.11).
    """
    if not isinstance(tensor, DTensor):
        return tensor
    if tensor.device.type != "cpu" and dist.get_backend(tensor.device_mesh.get_group(0)) == "gloo":
        return _gather_on_host(tensor).to(tensor.device)
    return tensor.full_tensor()


def _gather_on_host(tensor: DTensor) -> Tensor:
    mesh, groups = tensor.device_mesh, tensor.device_mesh.get_all_groups()
    host = DeviceMesh.from_group(
        groups if len(groups) > 1 else groups[0], "cpu", mesh=mesh.mesh, mesh_dim_names=mesh.mesh_dim_names
    )
    local = dtensor_local(tensor).cpu()
    shards = DTensor.from_local(local, host, tensor.placements, shape=tensor.shape, stride=tensor.stride())
    return shards.full_tensor()


def local_shard_of(weight: Tensor, whole: Tensor) -> Tensor:
    """The slice of an unsharded tensor that this process would hold if it were sharded like `weight`."""
    if not isinstance(weight, DTensor):
        return whole
    shape, offset = local_shape_and_offset(weight)
    return whole[tuple(slice(first, first + count) for first, count in zip(offset, shape, strict=True))]


def shard_count(tensor: Tensor) -> int:
    """The number of shards of a tensor."""
    return math.prod(count for _, count in _sharded_axes(tensor))


def shard_index(tensor: Tensor) -> int:
    """The index of this process's shard."""
    index = 0
    for coordinate, count in _sharded_axes(tensor):
        index = index * count + coordinate
    return index


def replica_count(tensor: Tensor, ranks: Ranks) -> int:
    """How many processes hold the same shard."""
    return ranks.world_size // shard_count(tensor)


def _sharded_axes(tensor: Tensor) -> list[tuple[int, int]]:
    """(this process's coordinate, size) of each mesh axis over which the tensor is sharded."""
    if not isinstance(tensor, DTensor):
        return []
    mesh = tensor.device_mesh
    axes = [axis for axis, placement in enumerate(tensor.placements) if not placement.is_replicate()]
    return [(mesh.get_local_rank(axis), mesh.size(axis)) for axis in axes]
