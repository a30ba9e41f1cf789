"""Reading what a run left, and starting runs that can be killed."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import forkserver

_EXACT = (
    "step", "epoch", "loss", "grad_norm", "lr", "conversations", "tokens", "supervised_tokens", "flops", "val_loss",
    "val_accuracy", "val_bpb",
)  # fmt: skip


@pytest.fixture(scope="session")
def steps_of() -> Callable[[Path], list[dict[str, Any]]]:
    """The lines of metrics.jsonl that are about steps."""

    def read(folder: Path) -> list[dict[str, Any]]:
        lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        return [line for line in lines if "loss" in line]

    return read


@pytest.fixture(scope="session")
def exact_of() -> Callable[[Path], list[dict[str, Any]]]:
    """Everything in metrics.jsonl that a repetition must repeat bit for bit: all but times."""

    def read(folder: Path) -> list[dict[str, Any]]:
        lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        return [{key: line[key] for key in _EXACT if key in line} for line in lines]

    return read


@pytest.fixture(scope="session")
def state_of() -> Callable[[Path], dict[str, bytes]]:
    """The weights and the optimizer's state in a run's last checkpoint, as bytes by file."""

    def read(folder: Path) -> dict[str, bytes]:
        checkpoint = folder / "checkpoints" / (folder / "checkpoints/latest").read_text().strip()
        found = {str(file.relative_to(folder)): file.read_bytes() for file in checkpoint.glob("*/*.distcp")}
        assert found, f"{checkpoint} is empty"
        return found

    return read


@pytest.fixture
def start() -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Start `whet` in a process of its own; what is still running at the end of the test is killed."""
    started: list[subprocess.Popen[str]] = []

    def run(*arguments: Any) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "whet", *map(str, arguments)]
        started.append(forkserver.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True))
        return started[-1]

    yield run
    for process in started:
        process.kill()
        process.communicate()


@pytest.fixture(scope="session")
def wait_for_lines() -> Callable[[Path, int], None]:
    """Wait until a run's metrics.jsonl has so many lines."""

    def wait(folder: Path, count: int) -> None:
        file, until = folder / "metrics.jsonl", time.monotonic() + 60
        while not file.exists() or file.read_bytes().count(b"\n") < count:
            assert time.monotonic() < until, "the run did not come that far"
            time.sleep(0.002)

    return wait


@pytest.fixture(scope="session")
def wait_for_checkpoint() -> Callable[[Path, int], None]:
    """Wait until the checkpoint of a step is complete."""

    def wait(folder: Path, step: int) -> None:
        manifest, until = folder / "checkpoints" / f"step-{step:06d}" / "manifest.json", time.monotonic() + 60
        while not manifest.exists():
            assert time.monotonic() < until, "the checkpoint was not written"
            time.sleep(0.002)

    return wait
