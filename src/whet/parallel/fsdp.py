"""FSDP2: weights, gradients and optimizer states sharded over processes; gradients are summed, never averaged."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.tensor import DTensor

from whet.compat.torch_private import dtensor_local, dtensor_of_shape, local_shape_and_offset
from whet.core.distributed import Ranks
from whet.model.layers import decoder_layers
from whet.model.load.placeholder import WeightSource, is_placeholder
from whet.model.loss.loss_model import LossModel
from whet.parallel.mesh import Mesh
from whet.parallel.tensor_parallel import apply_tensor_parallel

# Sharding by FSDP2: weights, gradients and optimizer states divided among processes, whole only where they compute.
#
# Each layer is gathered before it computes and given back after it. Gradients are summed, never averaged: the loss is
# divided by the count of the whole step already.


def apply_fsdp(
    root: LossModel, mesh: Mesh, compute: torch.dtype, source: WeightSource | None = None, on_host: bool = False
) -> None:
    """Divide the weights of a model, layer by layer; what is in no layer (embedding, head, last norm) at the root.

    The rows of hollow weights are read from `source`, by each process its own. Where every weight is trained, and kept
    in more bits than `compute`, they travel in those fewer bits; adapters are small, and what they stand beside is kept
    in few bits already. What is at the root does not: hidden states are in the embedding's type, and mixed precision
    keeps them in fp32. Gradients are summed in fp32 at least. Weights in 4 bits stay whole. `on_host`: the parts, and
    their gradients, are in the host's memory, and on the device only what is gathered of them.
    """
    assert mesh.weights is not None
    kept = {parameter.dtype for parameter in root.parameters() if parameter.requires_grad}
    widest = max(kept, key=lambda dtype: dtype.itemsize)
    all_learn = all(parameter.requires_grad for parameter in root.parameters())
    exact = torch.promote_types(widest, torch.float32)
    travels = compute if all_learn and compute.itemsize < widest.itemsize else None
    whole = {parameter for parameter in root.parameters() if not parameter.is_floating_point()}  # in 4 bits
    place = torch.device("cpu") if on_host else mesh.ranks.device
    offload = CPUOffloadPolicy(pin_memory=mesh.ranks.device.type == "cuda") if on_host else OffloadPolicy()
    _placeholders_to_meta(root)
    if mesh.tensor is not None:  # before FSDP2, which divides what is left of each weight here
        apply_tensor_parallel(root, mesh.tensor)
    for module in (*decoder_layers(root.language_model), root):
        travelling = None if module is root else travels
        policy = MixedPrecisionPolicy(param_dtype=travelling, reduce_dtype=exact, cast_forward_inputs=False)
        fully_shard(module, mesh=mesh.weights, mp_policy=policy, offload_policy=offload, ignored_params=whole)
    if source is not None:
        _load_local_shards(root, source, place)
    for module in root.modules():  # each for itself: the root's setting does not reach the layers
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
    register_fsdp_forward_method(root, "within")


def _placeholders_to_meta(root: nn.Module) -> None:
    """Move hollow weights to no device at all, where they can be divided without being made."""
    moved: dict[int, nn.Parameter] = {}
    for module in root.modules():
        for name, weight in list(module.named_parameters(recurse=False)):
            if not is_placeholder(weight):
                continue
            if id(weight) not in moved:
                nowhere = torch.empty(weight.shape, dtype=weight.dtype, device="meta")
                moved[id(weight)] = nn.Parameter(nowhere, requires_grad=weight.requires_grad)
            module.register_parameter(name, moved[id(weight)])


def _load_local_shards(root: nn.Module, source: WeightSource, device: torch.device) -> None:
    """Read this process's rows of every weight that has no memory yet."""
    found: dict[str, nn.Parameter] = {}
    made: dict[int, nn.Parameter] = {}
    for name, weight in root.named_parameters(remove_duplicate=False):
        if not isinstance(weight, DTensor) or not weight.is_meta:
            continue
        if id(weight) not in made:
            part = _read_local_shard(weight, _name_in_checkpoint(name), source).to(device, weight.dtype, copy=True)
            made[id(weight)] = nn.Parameter(shard_like(weight, part), requires_grad=weight.requires_grad)
        found[name] = made[id(weight)]
    root.load_state_dict(found, strict=False, assign=True)


def _read_local_shard(weight: DTensor, name: str, source: WeightSource) -> Tensor:
    """This process's part: some rows; where processes compute the layer together, perhaps some columns of them."""
    shape, offset = local_shape_and_offset(weight)
    first, count = (offset[0], shape[0]) if shape else (0, 0)
    if len(shape) == 2 and shape[1] < weight.shape[1]:
        return source.rows(name, first, first + count, slice(offset[1], offset[1] + shape[1]))
    return source.rows(name, first, first + count)


def _name_in_checkpoint(name: str) -> str:
    return name.removeprefix("language_model.").replace(".base_layer.", ".")


def is_sharded(model: nn.Module) -> bool:
    return isinstance(model, FSDPModule)


def set_gradient_sync(model: nn.Module, now: bool) -> None:
    """Whether the next backward pass sums gradients over the processes: the last one of a step does."""
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(now)


def reshard(model: nn.Module) -> None:
    """Let go of what was gathered for a forward pass that no backward pass follows."""
    if isinstance(model, FSDPModule):
        model.reshard()


def local_tensor(tensor: Tensor) -> Tensor:
    """This process's part of a divided tensor, as it is, without a gradient; any other is whole."""
    return dtensor_local(tensor) if isinstance(tensor, DTensor) else tensor


def shard_like(weight: Tensor, part: Tensor) -> Tensor:
    """`part` as this process's part of a tensor that is divided as `weight` is; one of another width, in rows. It stays
    where it is; `from_local` would send it to the mesh's device."""
    if not isinstance(weight, DTensor):
        return part
    alike = part.shape == local_tensor(weight).shape
    shape = weight.shape if alike else torch.Size((len(weight), *part.shape[1:]))
    return dtensor_of_shape(weight, part, shape)


def local_shard_of(weight: Tensor, whole: Tensor) -> Tensor:
    """Of a whole tensor, the part that this process has of one that is divided as `weight` is."""
    if not isinstance(weight, DTensor):
        return whole
    shape, offset = local_shape_and_offset(weight)
    return whole[tuple(slice(first, first + count) for first, count in zip(offset, shape, strict=True))]


def shard_count(tensor: Tensor) -> int:
    """Into how many parts a tensor is divided."""
    return math.prod(count for _, count in _sharded_axes(tensor))


def shard_index(tensor: Tensor) -> int:
    """Which of these parts this process has."""
    number = 0
    for mine, count in _sharded_axes(tensor):
        number = number * count + mine
    return number


def replica_count(tensor: Tensor, ranks: Ranks) -> int:
    """How many processes hold the same part of a tensor that all of them have."""
    return ranks.world_size // shard_count(tensor)


def _sharded_axes(tensor: Tensor) -> list[tuple[int, int]]:
    """(this process's number, how many) along each axis of the mesh that divides a tensor."""
    if not isinstance(tensor, DTensor):
        return []
    mesh = tensor.device_mesh
    divides = [axis for axis, placed in enumerate(tensor.placements) if not placed.is_replicate()]
    return [(mesh.get_local_rank(axis), mesh.size(axis)) for axis in divides]
