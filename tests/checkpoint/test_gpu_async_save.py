"""On CUDA: a save copies into staging buffers allocated ahead, and the copy is exact."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from whet.checkpoint.load import load_checkpoint
from whet.checkpoint.save import CheckpointSaver
from whet.core.distributed import Ranks

pytestmark = pytest.mark.gpu


def trained(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(1024, 2048), nn.Linear(2048, 3)).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.randn(5, 1024, device="cuda")).square().sum().backward()
    optimizer.step()
    return model, optimizer


def test_a_save_through_preallocated_buffers_loads_back(tmp_path: Path) -> None:
    ranks = Ranks(0, 1, torch.device("cuda", 0))
    for _ in range(2):  # the second maps memory at addresses that the first had registered
        model, optimizer = trained(0)
        with CheckpointSaver(tmp_path, model, optimizer, ranks) as saver:
            saver.prepare_first_save()
            saver.save(1, {})
            with torch.no_grad():
                model[0].weight.zero_()  # after the copy
        other, other_optimizer = trained(1)
        load_checkpoint(tmp_path / "step-000001", other, other_optimizer, ranks)
        again, _ = trained(0)
        for name, weight in again.state_dict().items():
            assert torch.equal(other.state_dict()[name], weight)
