"""FSDP2: weights, gradients and optimizer states sharded over processes; gradients are summed, never averaged.

Each decoder layer is gathered before it computes and freed after it.
"""

from __future__ import annotations

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

from whet.compat.torch_private import local_shape_and_offset
from whet.core.distributed import Ranks
from whet.model.load.placeholder import WeightSource, is_placeholder
from whet.model.loss.loss_model import LossModel
from whet.model.modules import decoder_layers
from whet.parallel.dtensor import shard_like
from whet.parallel.expert_parallel import apply_expert_parallel
from whet.parallel.mesh import Mesh
from whet.parallel.tensor_parallel import apply_tensor_parallel


def apply_fsdp(
    root: LossModel, mesh: Mesh, compute: torch.dtype, source: WeightSource | None = None, on_host: bool = False
) -> None:
    """Shard a model in place: each decoder layer by itself, everything else (embedding, head, last norm) at the root.

    Each process reads its shards of placeholder weights from `source`. Where every weight is trained, layers are
    gathered in `compute`, if that is narrower than the weights; adapters are small, and the frozen weights beside them
    are narrow already. The root is not: hidden states have the embedding's dtype, and mixed precision keeps them in
    fp32. Gradients are reduced in fp32 at least. 4-bit weights are not sharded. `on_host`: shards and their gradients
    are in CPU memory; only what is gathered is on the device.
    """
    assert mesh.fsdp_mesh is not None
    widest = max({weight.dtype for weight in root.parameters() if weight.requires_grad}, key=lambda d: d.itemsize)
    all_trained = all(weight.requires_grad for weight in root.parameters())
    gathered_dtype = compute if all_trained and compute.itemsize < widest.itemsize else None
    reduce_dtype = torch.promote_types(widest, torch.float32)
    four_bit = {weight for weight in root.parameters() if not weight.is_floating_point()}
    device = torch.device("cpu") if on_host else mesh.ranks.device
    offload = CPUOffloadPolicy(pin_memory=mesh.ranks.device.type == "cuda") if on_host else OffloadPolicy()
    _placeholders_to_meta(root)
    if mesh.tensor_mesh is not None:  # first: FSDP2 shards what tensor parallelism leaves of each weight
        apply_tensor_parallel(root, mesh.tensor_mesh)
    if mesh.expert_mesh is not None:
        apply_expert_parallel(root, mesh.expert_mesh)
    for module in (*decoder_layers(root.language_model), root):
        param_dtype = None if module is root else gathered_dtype
        policy = MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=reduce_dtype, cast_forward_inputs=False)
        fully_shard(module, mesh=mesh.fsdp_mesh, mp_policy=policy, offload_policy=offload, ignored_params=four_bit)
    if source is not None:
        _load_local_shards(root, source, device)
    for module in root.modules():  # the root's setting does not reach the layers
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
    register_fsdp_forward_method(root, "with_full_weights")


def _placeholders_to_meta(root: nn.Module) -> None:
    """Move placeholder weights to the meta device, where they are sharded without being allocated."""
    moved: dict[int, nn.Parameter] = {}
    for module in root.modules():
        for name, weight in list(module.named_parameters(recurse=False)):
            if not is_placeholder(weight):
                continue
            if id(weight) not in moved:
                meta = torch.empty(weight.shape, dtype=weight.dtype, device="meta")
                moved[id(weight)] = nn.Parameter(meta, requires_grad=weight.requires_grad)
            module.register_parameter(name, moved[id(weight)])


def _load_local_shards(root: nn.Module, source: WeightSource, device: torch.device) -> None:
    """Read this process's shard of every weight that is still on the meta device."""
    state: dict[str, nn.Parameter] = {}
    made: dict[int, nn.Parameter] = {}  # tied weights are read once
    for name, weight in root.named_parameters(remove_duplicate=False):
        if not isinstance(weight, DTensor) or not weight.is_meta:
            continue
        if id(weight) not in made:
            shard = _read_local_shard(weight, _name_in_checkpoint(name), source).to(device, weight.dtype, copy=True)
            made[id(weight)] = nn.Parameter(shard_like(weight, shard), requires_grad=weight.requires_grad)
        state[name] = made[id(weight)]
    root.load_state_dict(state, strict=False, assign=True)


def _read_local_shard(weight: DTensor, name: str, source: WeightSource) -> Tensor:
    """Some rows; with rowwise tensor parallelism some columns of them."""
    shape, offset = local_shape_and_offset(weight)
    first, count = (offset[0], shape[0]) if shape else (0, 0)
    if len(shape) == 2 and shape[1] < weight.shape[1]:
        return source.read_rows(name, first, first + count, slice(offset[1], offset[1] + shape[1]))
    return source.read_rows(name, first, first + count)


def _name_in_checkpoint(name: str) -> str:
    return name.removeprefix("language_model.").replace(".base_layer", "")


def is_sharded(model: nn.Module) -> bool:
    return isinstance(model, FSDPModule)


def has_collectives_in_passes(model: nn.Module, ranks: Ranks) -> bool:
    """Whether ranks exchange tensors inside forward and backward passes, as shards and slices of rows do. A rank that
    leaves a pass then leaves the others waiting."""
    return is_sharded(model) or ranks.context_size > 1 or ranks.tensor_size > 1


def set_gradient_sync(model: nn.Module, enabled: bool) -> None:
    """Whether the next backward pass reduces gradients over the processes; only a step's last one does."""
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(enabled)


def reshard(model: nn.Module) -> None:
    """Free the weights gathered by a forward pass without a backward pass."""
    if isinstance(model, FSDPModule):
        model.reshard()
