"""Runs of several processes, started by `whet launch` or torchrun, whose workers tests signal or kill."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from launch_options import OPTIONS, STEPS
from slurm_cluster import Cluster, missing_programs, slurm_cluster

import forkserver
from forkserver import fork_of
from several_processes import RECIPE

_SAME = ("step", "loss", "grad_norm", "lr", "conversations", "tokens", "supervised_tokens")


@dataclass
class Started:
    """A command and the folder of its run."""

    process: subprocess.Popen[str]
    folder: Path

    def wait_for_step(self, step: int) -> None:
        until = time.monotonic() + 300
        while steps_in(self.folder) < step:
            if self.process.poll() is not None:
                raise AssertionError(f"ended too early: {self.process.communicate()}")
            assert time.monotonic() < until, "the run did not reach the step"
            time.sleep(0.01)

    def wait_for_checkpoint(self, step: int) -> None:
        until = time.monotonic() + 300
        while not (self.folder / "checkpoints" / f"step-{step:06d}" / "manifest.json").exists():
            assert time.monotonic() < until, "the checkpoint was not written"
            time.sleep(0.01)

    def worker(self, rank: int) -> int:
        """The process id of a rank."""
        for pid, command, environment in processes():
            if str(self.folder) in command and "train" in command and f"\0RANK={rank}\0" in f"\0{environment}":
                return fork_of(pid)
        raise AssertionError(f"there is no rank {rank}")

    def ended(self) -> tuple[int, str, str]:
        out, err = self.process.communicate(timeout=150)
        return self.process.returncode, out, err

    @property
    def status(self) -> dict[str, Any]:
        return dict(json.loads((self.folder / "status.json").read_text()))

    @property
    def attempts(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.folder / "launch.jsonl").read_text().splitlines()]


def processes() -> Iterator[tuple[int, str, str]]:
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            command, environment = ((path / name).read_text(errors="replace") for name in ("cmdline", "environ"))
            yield int(path.name), command, environment


def steps_in(folder: Path) -> int:
    file = folder / "metrics.jsonl"
    return file.read_bytes().count(b'"loss"') if file.exists() else 0


@dataclass
class Start:
    """Starts commands on runs below a folder."""

    folder: Path
    started: list[Started] = field(default_factory=list)

    def __call__(self, *words: Any, run: str = "run", **settings: Any) -> Started:
        return self.command([sys.executable, "-m", *map(str, words), f"run.dir={self.folder / run}"], run, **settings)

    def command(self, words: list[str], run: str, **settings: Any) -> Started:
        process = forkserver.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **settings)
        self.started.append(Started(process, self.folder / run))
        return self.started[-1]

    def launch(self, *words: Any, **settings: Any) -> Started:
        return self("whet", "launch", *words, "launch.wait=0.1", **settings)

    def end_all(self) -> None:
        for one in self.started:
            one.process.kill()
        for pid, command, _ in processes():  # orphans of a killed parent, and workers that a test has stopped
            if str(self.folder) in command and pid != os.getpid():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        for one in self.started:
            one.process.communicate()


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    starting = Start(tmp_path)
    yield starting
    starting.end_all()


@pytest.fixture(scope="session")
def recipe() -> str:
    return RECIPE


@pytest.fixture(scope="session")
def whole(shared_run: Callable[..., Path]) -> Path:
    """An undisturbed run in one process, to compare with."""
    return shared_run("launch-whole", *OPTIONS)


@pytest.fixture(scope="session")
def assert_same() -> Callable[[Path, Path], None]:
    """Two runs have the same steps up to fp64 rounding, whatever their numbers of processes."""

    def compare(one: Path, other: Path) -> None:
        mine, theirs = (
            [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
            for folder in (one, other)
        )
        steps = [[line for line in lines if "loss" in line] for lines in (mine, theirs)]
        assert [line["step"] for line in steps[0]] == list(range(1, STEPS + 1))
        for a, b in zip(*steps, strict=True):
            assert [a[key] for key in _SAME] == pytest.approx([b[key] for key in _SAME], rel=1e-9)

    return compare


@pytest.fixture(scope="session")
def running() -> Iterator[Cluster]:
    missing = missing_programs()
    if missing:
        pytest.skip(f"needs the Debian packages slurm-wlm and munge (no {missing[0]}): make system-deps")
    folder = Path(tempfile.mkdtemp(prefix="whet-", dir="/tmp"))  # a short path: sockets have 108 bytes for it
    folder.chmod(0o755)  # munge wants its socket to be reachable by everyone
    try:
        with slurm_cluster(folder / "s") as cluster:
            yield cluster
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def cluster(running: Cluster, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    """A real Slurm of two nodes on this machine, with no job in it."""
    for name, value in running.environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [_source_folder(), os.environ.get("PYTHONPATH")])))
    yield running
    running.cancel_all()


def _source_folder() -> str:
    import whet

    return str(Path(whet.__file__).parents[1])
