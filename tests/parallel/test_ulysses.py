"""Context parallelism: attention and its gradients over several processes are those of one."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.parametrize("world", [pytest.param(2, marks=pytest.mark.slow), 3, pytest.param(4, marks=pytest.mark.slow)])
def test_attention_over_processes_equals_attention_in_one(world: int) -> None:
    """Also for numbers of heads or key heads that are not a multiple of the processes; with windows and sinks."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [
        sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(world), "--master-port", str(port),
        str(Path(__file__).with_name("ulysses_worker.py")),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120, env=dict(os.environ))
    assert done.returncode == 0, done.stderr
