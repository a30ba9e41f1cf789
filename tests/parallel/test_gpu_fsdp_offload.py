"""CPU offload of weights on CUDA: runs equal those that keep their weights on the device."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from whet.config import read_config
from whet.core.distributed import Ranks
from whet.model import attention
from whet.model.config import ModelConfig
from whet.model.load.pretrained import load_model
from whet.model.loss.loss_model import LossModel
from whet.parallel.config import ParallelConfig
from whet.parallel.dtensor import local_tensor
from whet.parallel.fsdp import apply_fsdp, reshard
from whet.parallel.mesh import build_mesh
from whet.run.lifecycle import run_training
from whet.run.models import model_builder

pytestmark = pytest.mark.gpu

TINY = Path(__file__).parents[2] / "recipes" / "tiny.yaml"
OFFLOAD = ("parallel.shard=1", "parallel.offload=weights")


@pytest.fixture(autouse=True)
def _destroy_process_group():
    """Destroy the process group of one, also after an error."""
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


def lines(folder, key):
    found = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line[key] for line in found if key in line]


def run(folder, *overrides, until=None):
    run_training(read_config(TINY, [f"run.dir={folder}", *overrides]), resume=True, until=until)
    return folder


@pytest.mark.parametrize("optimizer", ["adamw", "adamw8bit", "muon"])
def test_losses_equal_those_without_offload(tmp_path, optimizer):
    options = ("train.precision=fp32", "train.steps=10", f"train.optimizer.name={optimizer}")
    plain = run(tmp_path / "plain", *options)
    offloaded = run(tmp_path / "offloaded", *options, *OFFLOAD)
    coarse = 1 if optimizer == "adamw" else 100  # Muon's products are in bf16 on CUDA
    assert lines(offloaded, "val_loss")[0] == pytest.approx(lines(plain, "val_loss")[0], rel=1e-5)
    assert lines(offloaded, "loss")[:5] == pytest.approx(lines(plain, "loss")[:5], rel=1e-4 * coarse)
    assert lines(offloaded, "grad_norm")[:5] == pytest.approx(lines(plain, "grad_norm")[:5], rel=1e-3 * coarse)
    certificate = json.loads((offloaded / "exports/merged/certificate.json").read_text())
    assert certificate["verified"]


@pytest.mark.parametrize(
    "options", [(), ("adapter.rank=8",), ("model.dtype=bf16",), ("train.micro_rows=1", "parallel.recompute=full")]
)
def test_losses_equal_in_mixed_precision(tmp_path, options):
    plain = run(tmp_path / "plain", *options, "train.steps=10")
    offloaded = run(tmp_path / "offloaded", *options, "train.steps=10", *OFFLOAD)
    assert lines(offloaded, "loss") == pytest.approx(lines(plain, "loss"), rel=0.05)
    assert lines(offloaded, "loss")[-1] < lines(offloaded, "loss")[0]


def test_adapters_over_sharded_weights_are_fused(tmp_path, monkeypatch):
    fused, fuse = [], model_builder.fuse_lora_

    def note(model):
        fused.append(fuse(model))
        return fused[-1]

    monkeypatch.setattr(model_builder, "fuse_lora_", note)
    plain = run(tmp_path / "plain", "adapter.rank=8", "train.steps=10")
    whole = sum(fused)
    sharded = run(tmp_path / "sharded", "adapter.rank=8", "train.steps=10", *OFFLOAD)
    assert whole > 0
    assert sum(fused) == 2 * whole
    assert lines(sharded, "loss") == pytest.approx(lines(plain, "loss"), rel=0.02)


def test_a_run_resumes_without_offload(tmp_path):
    options = ("train.precision=fp32", "train.steps=10")
    plain = run(tmp_path / "plain", *options)
    run(tmp_path / "run", *options, *OFFLOAD, until=5)
    run(tmp_path / "run", *options)
    assert lines(tmp_path / "run", "loss") == pytest.approx(lines(plain, "loss"), rel=1e-3)


def test_only_gathered_weights_are_on_the_device():
    torch.cuda.set_device(0)
    ranks = Ranks(0, 1, torch.device("cuda", 0))
    mesh = build_mesh(ParallelConfig(shard=1, offload="weights"), ranks)
    model = load_model(ModelConfig(path="builtin:tiny"), torch.float32)
    attention.install_backend(model, "sdpa")
    root = LossModel(model)
    size = sum(weight.nbytes for weight in root.parameters())
    before = torch.cuda.memory_allocated()
    apply_fsdp(root, mesh, torch.float32, on_host=True)
    assert root.with_full_weights(lambda: next(root.parameters()).device).type == "cuda"
    reshard(root)
    shards = [local_tensor(weight) for weight in root.parameters()]
    assert {part.device.type for part in shards} == {"cpu"}
    assert all(part.is_pinned() for part in shards)
    assert torch.cuda.memory_allocated() - before < 0.3 * size
