"""Several processes under torchrun, on the CPU or, in tests marked gpu, together on one GPU.

A test names its cases on the CPU plainly and those on a GPU by `on_gpu`; both run the same code. There all processes
share the first GPU, over Gloo (launch.share_gpu), because NCCL refuses two processes on one card.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import forkserver

RECIPE = str(Path(__file__).parent / "fixtures" / "two-processes.yaml")
"""fixtures/tiny.yaml, with a row of each step for each of two processes."""


def on_gpu(*values: Any) -> Any:
    """The parameters of a case for a GPU, named `gpu …`."""
    words = [" ".join(value) if isinstance(value, list) else str(value) for value in values]
    return pytest.param(*values, marks=pytest.mark.gpu, id=f"gpu {' '.join(words).rstrip()}")


def torchrun(processes: int, *arguments: Any, timeout_s: float = 180) -> subprocess.CompletedProcess[str]:
    """Run `python ARGUMENTS` in so many processes, at a port that torchrun finds free; nothing outlives the time."""
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes),
        *map(str, arguments),
    ]  # fmt: skip
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    env = os.environ | {"CUDA_VISIBLE_DEVICES": visible}
    running = forkserver.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env)
    try:
        out, err = running.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        running.terminate()  # torchrun ends its processes
        with contextlib.suppress(subprocess.TimeoutExpired):
            running.communicate(timeout=40)
        running.kill()
        raise
    return subprocess.CompletedProcess(command, running.returncode, out, err)
