"""What whet expects of torch's private APIs."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.overrides import TorchFunctionMode

MODULE = "torch_private"


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def test_foreach_functions_work_on_lists_of_tensors(private: ModuleType) -> None:
    tensors = [torch.ones(3), torch.full((2,), 2.0)]
    assert [float(norm) for norm in private.foreach_norm(tensors, 2, dtype=torch.float64)] == [3**0.5, 8**0.5]
    assert [product.tolist() for product in private.foreach_mul(tensors, (2.0, 0.5))] == [[2.0] * 3, [1.0] * 2]
    private.foreach_mul_(tensors, torch.tensor(3.0))
    private.foreach_add_(tensors, [torch.ones(3), torch.ones(2)])
    assert [tensor.tolist() for tensor in tensors] == [[4.0] * 3, [7.0] * 2]
    private.foreach_copy_(tensors, [torch.ones(3, dtype=torch.float64), torch.ones(2)])
    assert [tensor.tolist() for tensor in tensors] == [[1.0] * 3, [1.0] * 2]


@pytest.mark.parametrize("is_skipped", [False, True])
def test_a_fused_step_is_that_of_torchs_optimizer(private: ModuleType, is_skipped: bool) -> None:
    ends = []
    for take_step in (private.fused_adamw_step, torch_fused_step):
        torch.manual_seed(0)
        weights = [nn.Parameter(torch.randn(shape)) for shape in ((3, 4), (5,), (2, 2))]
        groups = [{"params": weights[:1], "weight_decay": 0.1, "betas": (0.8, 0.9)}, {"params": weights[1:], "lr": 0.3}]
        optimizer = torch.optim.AdamW(groups, lr=0.1, fused=True)
        for number in range(4):
            for weight in weights:
                weight.grad = torch.randn_like(weight)
            if number == 0:
                optimizer.step()  # creates the states
                continue
            weights[2].grad = None if number == 2 else weights[2].grad
            found_inf = torch.ones(()) if is_skipped and number == 3 else torch.zeros(())
            take_step(optimizer, torch.tensor(2.0), found_inf)
        ends.append([*weights, *(value for weight in weights for value in optimizer.state[weight].values())])
    assert len(ends[0]) == 12
    for one, other in zip(*ends, strict=True):
        assert torch.equal(one, other)


def torch_fused_step(optimizer: Any, inverse_scale: torch.Tensor, found_inf: torch.Tensor) -> None:
    optimizer.grad_scale, optimizer.found_inf = inverse_scale, found_inf
    optimizer.step()
    optimizer.grad_scale = optimizer.found_inf = None


def test_a_flat_bucket_is_taken_apart_again(private: ModuleType) -> None:
    tensors = [torch.arange(6.0).view(2, 3), torch.arange(4.0)]
    flat = private.flatten_dense_tensors(tensors)
    assert flat.shape == (10,)
    for before, after in zip(tensors, private.unflatten_dense_tensors(flat, tensors), strict=True):
        assert torch.equal(before, after)


def test_scaled_mm_takes_scales_and_an_output(private: ModuleType) -> None:
    text = str(torch.ops.aten._scaled_mm.out._schema)
    assert private.scaled_mm is torch._scaled_mm
    for argument in ("scale_a", "scale_b", "out_dtype", "use_fast_accum", "Tensor(a!) out"):
        assert argument in text


def test_a_module_of_another_class_keeps_weights_and_hooks(private: ModuleType) -> None:
    class Negative(nn.Linear):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            return -super().forward(input)

    layer, seen = nn.Linear(2, 2), []
    layer.register_forward_hook(lambda *_: seen.append(True))
    x, weight = torch.ones(2), layer.weight
    before = layer(x)
    private.set_module_class(layer, Negative)
    assert torch.equal(layer(x), -before)
    assert layer.weight is weight
    assert seen == [True, True]


def test_a_module_calls_the_forward_assigned_to_it(private: ModuleType) -> None:
    layer = nn.Identity()
    private.replace_forward(layer, lambda x: x + 1)
    assert layer(torch.zeros(())) == 1


def test_an_optimizer_and_its_scheduler_take_another_step(private: ModuleType) -> None:
    weight, steps = nn.Parameter(torch.zeros(1)), []
    optimizer = torch.optim.SGD([weight], lr=0.1)
    private.replace_step(optimizer, lambda: steps.append(True))
    optimizer.step()
    assert steps == [True]


def test_a_copy_of_a_module_has_other_children(private: ModuleType) -> None:
    module = nn.Sequential(nn.Linear(2, 2))
    module.forward = lambda x: x  # type: ignore[method-assign]
    small = private.copy_module_without_children(module, {"0": nn.ReLU()})
    assert small(torch.tensor([-1.0])) == 0
    assert isinstance(module[0], nn.Linear)


def test_hooks_and_persistent_buffers_are_found(private: ModuleType) -> None:
    module = nn.BatchNorm1d(2)
    module.register_buffer("kept", torch.zeros(1))
    module.register_buffer("temporary", torch.zeros(1), persistent=False)
    own = {*dict(private.persistent_buffers(module)), *dict(module.named_parameters(recurse=False))}
    assert own == set(module.state_dict())
    assert not private.has_forward_hooks(module)
    module.register_forward_hook(lambda *_: None)
    assert private.has_forward_hooks(module)


def test_active_function_modes_are_listed(private: ModuleType) -> None:
    class Mode(TorchFunctionMode):
        pass

    with Mode() as mode:
        assert private.function_modes() == [mode]
    assert private.function_modes() == []


def test_dtensors_are_made_of_local_shards(private: ModuleType, mesh: DeviceMesh) -> None:
    whole = distribute_tensor(torch.arange(6.0).view(3, 2), mesh, [Shard(0)])
    assert torch.equal(private.dtensor_local(whole), torch.arange(6.0).view(3, 2))
    assert private.local_shape_and_offset(whole) == ((3, 2), (0, 0))
    like = private.dtensor_like(whole, torch.ones(3, 2))
    other = private.dtensor_of_shape(whole, torch.ones(3, 5, dtype=torch.int8), torch.Size((3, 5)))
    assert isinstance(like, DTensor)
    assert (other.shape, other.dtype, other.placements) == ((3, 5), torch.int8, whole.placements)
    private.set_dtensor_local(like, torch.zeros(3, 2))
    assert not like.full_tensor().any()


def test_a_group_takes_a_timeout_and_sums_in_the_graph(private: ModuleType, mesh: DeviceMesh) -> None:
    private.set_group_timeout(timedelta(minutes=7), mesh.get_group())
    assert private.functional_all_reduce(torch.ones(2), mesh.get_group().group_name).tolist() == [1, 1]


def test_a_tensor_is_read_at_its_offset_in_the_file(private: ModuleType, tmp_path: Path) -> None:
    path, numbers = tmp_path / "x.pt", torch.arange(5, dtype=torch.int64)
    torch.save(numbers, path)
    with path.open("rb") as file, threading.Lock():
        like = private.load_as_fake(file)
        file.seek(private.checkpoint_offset(like.untyped_storage()))
        assert torch.equal(torch.frombuffer(bytearray(file.read(40)), dtype=torch.int64), numbers)
    assert (like.shape, like.dtype) == (numbers.shape, numbers.dtype)


@pytest.mark.gpu
def test_a_failed_capture_releases_its_pool(private: ModuleType) -> None:
    pool, graph, stream = torch.cuda.graph_pool_handle(), torch.cuda.CUDAGraph(), torch.cuda.current_stream()
    generator = torch.cuda.default_generators[stream.device_index]
    tensor, before = torch.ones(4, device="cuda"), generator.clone_state()
    with pytest.raises(RuntimeError), torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
        (tensor + 1).sum().item()  # synchronizes, which a capture forbids
    torch.cuda.set_stream(stream)
    private.release_graph_pool(stream.device_index, pool)
    generator.graphsafe_set_state(before.graphsafe_get_state())
    assert (tensor + 1).sum().item() == 8
    assert torch.randn(4, device="cuda").isfinite().all()


@pytest.mark.gpu
def test_allocations_are_recorded(private: ModuleType, tmp_path: Path) -> None:
    private.start_memory_history(1000)
    torch.ones(4, device="cuda")
    private.dump_memory_history(tmp_path / "memory.pickle")
    assert (tmp_path / "memory.pickle").stat().st_size > 0
