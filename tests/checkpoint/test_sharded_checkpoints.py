"""A model in shards: each process writes its own, and any number of processes reads them."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from whet.checkpoint import directory
from whet.checkpoint.load import load_checkpoint
from whet.core.distributed import Ranks

SCRIPT = str(Path(__file__).with_name("sharded_worker.py"))


def run(processes: int, *arguments: str) -> str:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}", SCRIPT]
    done = subprocess.run([*command, *arguments], capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_shards_of_two_are_read_by_two_three_and_one(tmp_path: Path) -> None:
    run(2, str(tmp_path), "save")
    run(3, str(tmp_path), "load")
    saved, loaded = (torch.load(tmp_path / f"{name}.pt") for name in ("save", "load"))
    assert saved.keys() == loaded.keys()
    assert len(saved) == 16
    assert all(torch.equal(saved[name], loaded[name]) for name in saved)
    model = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 7))
    load_checkpoint(tmp_path / "step-000003", model, None, Ranks(0, 1, torch.device("cpu")))
    assert all(torch.equal(parameter, saved[name]) for name, parameter in model.named_parameters())
    manifest = json.loads((tmp_path / "step-000003" / "manifest.json").read_text())
    assert manifest["world"] == 2
    assert {name.split("/")[1].split("_")[2] for name in manifest["files"] if name.endswith("distcp")} == {"0", "1"}


@pytest.mark.slow
def test_a_process_that_does_not_come_to_save_is_not_waited_for_for_ever(tmp_path: Path) -> None:
    said = run(2, str(tmp_path), "missing")
    found = re.match(r"after (\d+) s: .*a checkpoint could not be saved after step 3", said)
    assert found is not None, said
    assert int(found[1]) < 20
    assert directory.list_steps(tmp_path) == []


@pytest.mark.slow
def test_a_process_that_dies_while_loading_is_not_a_fault_of_the_checkpoint(tmp_path: Path) -> None:
    """It would be the user's, whom nobody restarts."""
    run(2, str(tmp_path), "save")
    assert "lost: True" in run(2, str(tmp_path), "gone")
