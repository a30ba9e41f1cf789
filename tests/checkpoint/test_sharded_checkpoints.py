"""Sharded models: each rank writes its shards, and any number of ranks reads them."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorStorageMetadata

from whet.checkpoint import directory
from whet.checkpoint.dcp_storage import SafeStorageReader
from whet.checkpoint.load import load_checkpoint
from whet.core.distributed import Ranks

SCRIPT = str(Path(__file__).with_name("sharded_worker.py"))


def run(processes: int, *arguments: str) -> str:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}", SCRIPT]
    done = subprocess.run([*command, *arguments], capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_tensor_in_several_chunks_is_read_whole(tmp_path: Path) -> None:
    """Two tensors of one process stand for the shards of two."""
    halves = {"upper": torch.arange(6.0).view(2, 3), "lower": torch.arange(6.0, 15.0).view(3, 3)}
    dcp.save(halves, checkpoint_id=tmp_path, no_dist=True)
    reader = SafeStorageReader(tmp_path)
    metadata, chunks = reader.read_metadata(), []
    for name, row in (("upper", 0), ("lower", 2)):
        offsets = torch.Size([row, 0])
        chunks.append(ChunkStorageMetadata(offsets, halves[name].size()))
        metadata.storage_data[MetadataIndex("whole", offsets)] = metadata.storage_data[
            MetadataIndex(name, torch.Size([0, 0]))
        ]
    metadata.state_dict_metadata["whole"] = TensorStorageMetadata(
        metadata.state_dict_metadata["upper"].properties, torch.Size([5, 3]), chunks
    )
    for _ in range(2):  # the second time its layout is known
        reader.read_tensor("whole", whole := torch.empty(5, 3))
        assert torch.equal(whole, torch.arange(15.0).view(5, 3))
    with pytest.raises(ValueError, match="upper"):
        reader.read_tensor("upper", torch.empty(2, 4))


@pytest.mark.slow
def test_shards_of_two_ranks_load_on_two_three_and_one(tmp_path: Path) -> None:
    run(2, str(tmp_path), "save")
    run(3, str(tmp_path), "load")
    saved, loaded = (torch.load(tmp_path / f"{name}.pt") for name in ("save", "load"))
    assert saved.keys() == loaded.keys()
    assert len(saved) == 16
    assert all(torch.equal(saved[name], loaded[name]) for name in saved)
    model = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 7))
    load_checkpoint(tmp_path / "step-000003", model, None, Ranks(0, 1, torch.device("cpu")))
    assert all(torch.equal(parameter, saved[name]) for name, parameter in model.named_parameters())
    reader = SafeStorageReader(tmp_path / "step-000003" / "model")
    for name, parameter in model.named_parameters():  # one at a time, as an export reads
        reader.read_tensor(f"model.{name}", one := torch.empty_like(parameter))
        assert torch.equal(one, parameter)
    manifest = json.loads((tmp_path / "step-000003" / "manifest.json").read_text())
    assert manifest["world"] == 2
    assert {name.split("/")[1].split("_")[2] for name in manifest["files"] if name.endswith("distcp")} == {"0", "1"}


@pytest.mark.slow
def test_a_save_times_out_if_a_rank_is_missing(tmp_path: Path) -> None:
    output = run(2, str(tmp_path), "missing")
    found = re.match(r"after (\d+) s: .*saving a checkpoint failed after step 3", output)
    assert found is not None, output
    assert int(found[1]) < 20
    assert directory.list_steps(tmp_path) == []


@pytest.mark.slow
def test_a_rank_that_dies_while_loading_is_not_reported_as_a_bad_checkpoint(tmp_path: Path) -> None:
    """That would be exit code 1, which no launcher restarts."""
    run(2, str(tmp_path), "save")
    assert "lost: True" in run(2, str(tmp_path), "gone")
