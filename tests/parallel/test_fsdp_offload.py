"""CPU offload of weights: what is refused, and that tensors of host and device are never mixed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses import FakeTensorMode
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.testing._internal.distributed.fake_pg import FakeStore

from whet.config import read_config
from whet.core.distributed import Ranks
from whet.core.errors import WhetError
from whet.parallel import dtensor
from whet.parallel.dtensor import local_tensor, shard_like
from whet.training.config import OptimizerConfig
from whet.training.optimizers.adamw import AdamW
from whet.training.optimizers.factory import build_optimizer, optimizer_step
from whet.training.step import squared_gradient_norm

HAS_CUDA = pytest.mark.skipif(not torch.backends.cuda.is_built(), reason="torch is built without CUDA here")
TINY = Path(__file__).parents[2] / "recipes" / "tiny.yaml"


@pytest.mark.parametrize(
    ("others", "words"),
    [
        ([], "parallel.offload: weights, but only sharded weights can be offloaded"),
        (["parallel.shard=1", "adapter.rank=4", "quantize=nf4"], "weights, but nf4 weights stay on the device"),
    ],
)
def test_unsupported_combinations_are_refused(others: list[str], words: str) -> None:
    with pytest.raises(WhetError, match=words):
        read_config(TINY, ["parallel.offload=weights", *others])


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> Iterator[DeviceMesh]:
    """Two fake processes with a fake GPU each: tensors have a shape, a dtype and a device, and mixing devices is an
    error, as on a real one. Offsets of shards are computed outside: torch puts their numbers into tensors."""
    monkeypatch.setattr(dtensor, "local_shape_and_offset", unset_fake_temporarily()(dtensor.local_shape_and_offset))
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        mesh = init_device_mesh("cuda", (1, 2), mesh_dim_names=("replicate", "shard"))
        with FakeTensorMode():
            yield mesh
    finally:
        dist.destroy_process_group()


def offloaded(mesh: DeviceMesh, *shape: int, dtype: torch.dtype = torch.float32) -> nn.Parameter:
    """A weight sharded over the GPUs whose local shard is in CPU memory."""
    meta = TensorMeta(torch.Size(shape), torch.empty(shape, device="meta").stride(), dtype)
    part = torch.ones(shape[0] // 2, *shape[1:], dtype=dtype)
    return nn.Parameter(DTensor(part, DTensorSpec(mesh, (Replicate(), Shard(0)), meta), requires_grad=False))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["adamw", "adamw16bit", pytest.param("muon", marks=HAS_CUDA)])
def test_the_optimizer_step_runs_on_the_cpu(gpus: DeviceMesh, name: Any, dtype: torch.dtype) -> None:
    model = nn.ModuleDict({"a": nn.Linear(8, 8, bias=False), "b": nn.LayerNorm(8, bias=False)})
    model["a"].weight = offloaded(gpus, 512, 256, dtype=dtype)
    model["b"].weight = offloaded(gpus, 512, dtype=dtype)
    optimizer = build_optimizer(model, OptimizerConfig(name=name), seed=0)
    for weight in model.parameters():
        weight.grad = shard_like(weight, torch.ones_like(local_tensor(weight)))
        assert local_tensor(weight.grad).device.type == "cpu"
    if isinstance(optimizer, AdamW):  # its count of steps has no value here
        optimizer.gradient_scale = 0.5
        for group in optimizer.param_groups:
            for weight in group["params"]:
                optimizer._update(group, weight, weight.grad, 3)
    else:
        optimizer_step(optimizer, 0.5)
    kept = [value for state in optimizer.state.values() for value in state.values()]
    assert {local_tensor(value).device.type for value in (*kept, *model.parameters())} == {"cpu"}


@HAS_CUDA
def test_the_norm_of_cpu_gradients_is_added_on_the_device(gpus: DeviceMesh) -> None:
    weight = offloaded(gpus, 6, 4)
    weight.grad = shard_like(weight, torch.ones_like(local_tensor(weight)))
    sums = torch.zeros(5, dtype=torch.float64, device="cuda")
    sums[3] = squared_gradient_norm([weight], Ranks(0, 2, torch.device("cuda")))
    assert sums.device.type == "cuda"


def test_fake_gpus_refuse_mixed_devices(gpus: DeviceMesh) -> None:
    with pytest.raises(RuntimeError, match=r"two (different )?devices"):
        torch.ones(2, device="cuda") + torch.ones(2)


def test_an_expert_weight_inside_several_adapters_has_the_name_of_its_file() -> None:
    """peft wraps fused experts once for each of their weights."""
    from whet.parallel.fsdp import _name_in_checkpoint

    wrapped = "language_model.model.layers.0.mlp.experts.base_layer.base_layer.gate_up_proj"
    assert _name_in_checkpoint(wrapped) == "model.layers.0.mlp.experts.gate_up_proj"
