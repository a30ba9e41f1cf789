"""On CUDA: kernels in the trace, and a memory snapshot."""

from __future__ import annotations

import gzip
import json
import pickle
from pathlib import Path

import pytest
import torch

from whet.core.distributed import Ranks
from whet.training.config import ProfileConfig
from whet.training.metrics import peak_gib
from whet.training.profiler import make_profiler

pytestmark = pytest.mark.gpu


def test_kernels_and_memory(tmp_path: Path) -> None:
    device = torch.device("cuda", 0)
    profiler = make_profiler(ProfileConfig(steps=(1, 1), memory=True), tmp_path, Ranks(0, 1, device), 1, lambda: "")
    with profiler.step(1):
        torch.ones(512, 512, device=device) @ torch.ones(512, 512, device=device)
        torch.cuda.synchronize()
    trace = json.loads(gzip.decompress((tmp_path / "profile/rank-0.trace.json.gz").read_bytes()))
    assert any(event.get("cat") == "kernel" for event in trace["traceEvents"])
    snapshot = pickle.loads((tmp_path / "profile/rank-0.memory.pickle").read_bytes())
    assert any(snapshot["device_traces"])
    assert peak_gib(device) >= 3 * 2**20 / 2**30
