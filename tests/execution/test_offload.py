"""CPU offload changes where tensors are kept, and no value."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from whet.checkpoint.load import load_checkpoint
from whet.checkpoint.save import CheckpointSaver
from whet.config import read_config
from whet.core.distributed import Ranks
from whet.execution import offload
from whet.execution.offload import offload_optimizer_state
from whet.execution.transform import transform_layers
from whet.parallel.config import ParallelConfig
from whet.run.resume import changed_settings
from whet.training.optimizers.adamw import AdamW

Make = Callable[..., Any]
ALONE = Ranks(0, 1, torch.device("cpu"))


@pytest.fixture
def moved(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """Every tensor that is offloaded, even the small ones of these models."""
    seen: list[Tensor] = []

    class Watched(offload._OffloadedTensor):
        def __init__(self, tensor: Tensor) -> None:
            seen.append(tensor)
            super().__init__(tensor)

    monkeypatch.setattr(offload, "_OffloadedTensor", Watched)
    monkeypatch.setattr(offload, "_MIN_BYTES", 3000)
    return seen


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_activation_offload_keeps_gradients(
    make_root: Make, make_batch: Make, moved: list[Tensor], recompute: Any
) -> None:
    plain, changed = make_root(), make_root()
    transform_layers(changed.language_model, ParallelConfig(recompute=recompute, offload="activations"), False)
    for root in (plain, changed):
        root(make_batch([9, 20, 8])).objective.backward()
    assert moved
    for one, two in zip(plain.parameters(), changed.parameters(), strict=True):
        assert torch.equal(one.grad, two.grad)


def test_with_full_recompute_only_layer_inputs_are_offloaded(
    make_root: Make, make_batch: Make, moved: list[Tensor]
) -> None:
    root = make_root()
    transform_layers(root.language_model, ParallelConfig(recompute="full", offload="activations"), False)
    root(make_batch([9, 20, 8])).objective.backward()
    assert [tuple(tensor.shape) for tensor in moved] == [(1, 48, 32)] * 4


@pytest.mark.parametrize("mixed", [False, True], ids=["one-type", "mixed"])
@pytest.mark.parametrize("dropout", [None, 0.0], ids=["whole", "lora"])
def test_weights_are_not_offloaded(
    make_root: Make, make_batch: Make, moved: list[Tensor], mixed: bool, dropout: float | None
) -> None:
    """Nor their copies in bf16. A row of 47 tokens: no weight has a side of that length, every activation does."""
    root = make_root(dtype=torch.bfloat16 if mixed and dropout is not None else torch.float32, dropout=dropout)
    transform_layers(root.language_model, ParallelConfig(offload="activations"), False)
    with torch.autocast("cpu", torch.bfloat16, enabled=mixed):
        root(make_batch([9, 20, 8], total=47))
    assert moved
    assert [tuple(tensor.shape) for tensor in moved if not {47, 9, 20, 8, 10} & set(tensor.shape)] == []


def small_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(600, 600), nn.Linear(600, 600), nn.Linear(600, 3))


def trained(step_in_chunks: bool, steps: int, make: Callable[..., torch.optim.Optimizer]) -> tuple[nn.Module, Any]:
    model = small_model()
    matrices = [parameter for parameter in model.parameters() if parameter.ndim == 2]
    vectors = [parameter for parameter in model.parameters() if parameter.ndim == 1]
    optimizer = make([{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}])
    if step_in_chunks:
        offload_optimizer_state(optimizer, chunk=500_000)
    advance(model, optimizer, steps)
    return model, optimizer


def named(groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{**group, "name": name} for group, name in zip(groups, ("matrices", "scalars"), strict=True)]


def advance(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    for step in range(steps):
        torch.manual_seed(step)
        optimizer.zero_grad()
        model(torch.randn(4, 600)).pow(2).sum().backward()
        optimizer.step()


@pytest.mark.parametrize(
    "make",
    [
        lambda groups: torch.optim.AdamW(groups, lr=1e-3, fused=True),
        lambda groups: torch.optim.AdamW(groups, lr=1e-3, foreach=True),
        lambda groups: torch.optim.SGD(groups, lr=1e-3, momentum=0.9),
        lambda groups: AdamW(named(groups), lr=1e-3, betas=(0.9, 0.95), eps=1e-8, seed=1, bits=16),
        lambda groups: AdamW(named(groups), lr=1e-3, betas=(0.9, 0.95), eps=1e-8, seed=1, bits=8),
    ],
    ids=["adamw-fused", "adamw-foreach", "momentum", "adamw16bit", "adamw8bit"],
)
def test_stepping_in_pieces_is_stepping(make: Callable[..., torch.optim.Optimizer]) -> None:
    (whole, one), (pieces, two) = (trained(in_pieces, 4, make) for in_pieces in (False, True))
    for a, b in zip(whole.parameters(), pieces.parameters(), strict=True):
        assert torch.equal(a, b)
        assert one.state[a].keys() == two.state[b].keys()
        assert all(torch.equal(one.state[a][key], two.state[b][key]) for key in one.state[a])
    assert [len(group["params"]) for group in two.param_groups] == [3, 3]


def test_state_comes_and_goes_piece_by_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three matrices of 360 000, 360 000 and 1 800 weights in pieces of half a million, then the vectors."""
    model, optimizer = trained(True, 1, lambda groups: torch.optim.AdamW(groups, lr=1e-3))
    seen: list[str] = []
    fetch, send = offload._fetch_state, offload._store_state
    monkeypatch.setattr(offload, "_fetch_state", lambda state, device: (seen.append("fetch"), fetch(state, device))[1])
    monkeypatch.setattr(
        offload, "_store_state", lambda state, hosts: (seen.append(f"send {len(hosts)}"), send(state, hosts))
    )
    hosts = [optimizer.state[parameter]["exp_avg"] for parameter in model.parameters()]
    advance(model, optimizer, 1)
    assert seen == [
        "fetch", "send 2", "fetch", "fetch", "send 2", "send 0", "fetch", "fetch", "fetch", *["send 0"] * 3
    ]  # fmt: skip
    now = [optimizer.state[parameter]["exp_avg"] for parameter in model.parameters()]
    assert all(a is b for a, b in zip(hosts, now, strict=True)), "CPU tensors are reused"


def test_a_failed_step_restores_the_parameter_groups() -> None:
    _, optimizer = trained(False, 0, lambda groups: torch.optim.AdamW(groups, lr=1e-3))

    def fail() -> None:
        raise ZeroDivisionError

    optimizer.step = fail  # type: ignore[assignment, method-assign]
    offload_optimizer_state(optimizer, chunk=500_000)
    with pytest.raises(ZeroDivisionError):
        optimizer.step()
    assert [len(group["params"]) for group in optimizer.param_groups] == [3, 3]


def test_checkpoints_with_and_without_offload_are_the_same(tmp_path: Path) -> None:
    """Saved with offload and resumed without, and the other way round."""

    def adamw(groups: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW(groups, lr=1e-3, fused=True)

    truth, _ = trained(False, 5, adamw)
    for first in (True, False):
        model, optimizer = trained(first, 3, adamw)
        with CheckpointSaver(tmp_path / str(first), model, optimizer, ALONE) as saver:
            saver.save(3, {})
        model, optimizer = trained(not first, 0, adamw)
        load_checkpoint(tmp_path / str(first) / "step-000003", model, optimizer, ALONE)
        for step in (3, 4):
            torch.manual_seed(step)
            optimizer.zero_grad()
            model(torch.randn(4, 600)).pow(2).sum().backward()
            optimizer.step()
        assert all(torch.equal(a, b) for a, b in zip(model.parameters(), truth.parameters(), strict=True))


def test_a_resumed_run_may_change_execution_settings(tiny_run: Path) -> None:
    changes = ["parallel.offload=both", "parallel.recompute=full", "model.compile=true", "model.attention=eager"]
    assert changed_settings(tiny_run, read_config(tiny_run / "config.yaml", changes)) == []
    assert len(changed_settings(tiny_run, read_config(tiny_run / "config.yaml", ["train.clip_norm=3"]))) == 1


def test_the_local_shard_of_sharded_state_is_offloaded() -> None:
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard, distribute_tensor

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        torch.manual_seed(0)
        weight = nn.Parameter(distribute_tensor(torch.randn(600, 600), mesh, [Shard(0)]))
        twin = nn.Parameter(copy.deepcopy(weight.detach().full_tensor()))
        sharded, plain = torch.optim.AdamW([weight], lr=1e-2), torch.optim.AdamW([twin], lr=1e-2)
        offload_optimizer_state(sharded)
        for _ in range(3):
            for parameter, optimizer in ((weight, sharded), (twin, plain)):
                optimizer.zero_grad()
                (parameter * parameter).sum().backward()
                optimizer.step()
        assert isinstance(sharded.state[weight]["exp_avg"], DTensor)
        assert torch.equal(weight.detach().full_tensor(), twin)
    finally:
        dist.destroy_process_group()
