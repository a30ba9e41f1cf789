"""Run under torchrun by test_sharded_checkpoints.py: save a sharded model, change it meanwhile, load it again.

sharded_worker.py FOLDER save | load
sharded_worker.py FOLDER missing     one rank does not take part in the save
sharded_worker.py FOLDER gone        one rank dies while it loads
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from whet.checkpoint.dcp_storage import SafeStorageReader
from whet.checkpoint.load import load_checkpoint
from whet.checkpoint.save import CheckpointSaver
from whet.core.distributed import Ranks, init_distributed, is_peer_failure
from whet.core.errors import RunFailedError
from whet.parallel.dtensor import _gather_on_host, unsharded


def main(folder: Path, work: str) -> None:
    ranks = init_distributed()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 7))
    fully_shard(model, mesh=init_device_mesh("cpu", (ranks.world_size,)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    saved = {}
    if work == "missing":
        _save_without_the_others(CheckpointSaver(folder, model, optimizer, ranks, timeout_s=1.0), ranks)
        return
    if work == "save":
        model(torch.ones(2, 6)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        with CheckpointSaver(folder, model, optimizer, ranks) as saver:
            saver.save(3, {})
            saved = _full_tensors(model, optimizer)
            for parameter in model.parameters():
                parameter.data.zero_()
    if work == "gone":
        _lose_a_rank(folder / "step-000003", model, optimizer, ranks)
    load_checkpoint(folder / "step-000003", model, optimizer, ranks)
    found = _full_tensors(model, optimizer)
    if work == "save":
        assert all(torch.equal(found[name], tensor) for name, tensor in saved.items())
    if ranks.is_main:
        torch.save(found, folder / f"{work}.pt")
    ranks.shutdown()


def _save_without_the_others(saver: CheckpointSaver, ranks: Ranks) -> None:
    began = time.monotonic()
    if ranks.is_main:
        saver.save(3, {})
        try:
            saver.wait()
        except RunFailedError as error:
            sys.stdout.write(f"after {time.monotonic() - began:.0f} s: {error}\n")
    ranks.shutdown()


def _lose_a_rank(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer, ranks: Ranks) -> None:
    if not ranks.is_main:
        SafeStorageReader.read_data = lambda *_: os._exit(0)  # type: ignore[method-assign, assignment, misc]
    try:
        load_checkpoint(path, model, optimizer, ranks)
    except Exception as error:
        sys.stdout.write(f"lost: {is_peer_failure(error)}\n")
        sys.stdout.flush()
    os._exit(0)


def _full_tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    found = {}
    for name, parameter in model.named_parameters():
        assert isinstance(parameter, DTensor)
        assert torch.equal(_gather_on_host(parameter), parameter.full_tensor())  # the way of CUDA shards over Gloo
        found[name] = unsharded(parameter).detach().clone()
        for key, value in optimizer.state[parameter].items():
            found[f"{name}.{key}"] = unsharded(value).clone()
    return found


main(Path(sys.argv[1]), sys.argv[2])
