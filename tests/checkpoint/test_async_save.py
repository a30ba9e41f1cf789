"""Asynchronous saves: the checkpoint is the state at the call, training waits for the copy alone, errors are raised."""

from __future__ import annotations

import errno
import os
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from whet.checkpoint import directory, save
from whet.checkpoint import save as saving
from whet.checkpoint.dcp_storage import ParallelStorageWriter
from whet.checkpoint.load import load_checkpoint
from whet.checkpoint.save import CheckpointSaver
from whet.core.distributed import Ranks
from whet.core.errors import RunFailedError, WhetError
from whet.core.signals import StopRequested

ALONE = Ranks(0, 1, torch.device("cpu"))


def make() -> tuple[nn.Linear, torch.optim.Optimizer]:
    model = nn.Linear(3, 4)
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.ones(1, 3)).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


class Gate:
    """Blocks the writing of checkpoints until it is opened."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._open, write = threading.Event(), saving.dcp_save

        def wait_and_write(*args: Any, **kwargs: Any) -> Any:
            self._open.wait()
            return write(*args, **kwargs)

        monkeypatch.setattr(saving, "dcp_save", wait_and_write)

    def open(self) -> None:
        self._open.set()


def test_a_save_holds_the_state_at_the_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate(monkeypatch)
    model, optimizer = make()
    step(model, optimizer)
    weight = model.weight.detach().clone()
    moment = optimizer.state[model.weight]["exp_avg"].clone()
    with CheckpointSaver(tmp_path, model, optimizer, ALONE) as saver:
        saver.save(1, {})
        for _ in range(3):  # training continues before a byte is written
            step(model, optimizer)
        assert directory.list_steps(tmp_path) == []
        gate.open()
    assert not torch.equal(model.weight, weight)
    other, others = make()
    load_checkpoint(tmp_path / "step-000001", other, others, ALONE)
    assert torch.equal(other.weight, weight)
    assert torch.equal(others.state[other.weight]["exp_avg"], moment)
    assert int(others.state[other.weight]["step"]) == 1


def test_a_save_waits_for_the_previous_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate(monkeypatch)
    with CheckpointSaver(tmp_path, *make(), ALONE, saving.Retention(9)) as saver:
        saver.save(1, {})
        threading.Timer(0.2, gate.open).start()
        saver.save(2, {})
        assert directory.list_steps(tmp_path)[:1] == [1]
    assert directory.list_steps(tmp_path) == [1, 2]


def test_an_error_is_raised_once_by_the_next_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saver = CheckpointSaver(tmp_path, *make(), ALONE)
    with monkeypatch.context() as patch:
        patch.setattr(saving, "replace_folder", lambda *args: (_ for _ in ()).throw(OSError(errno.EIO, "bad", "place")))
        saver.save(1, {})
        while not saver.has_failed:
            time.sleep(0.01)
        with pytest.raises(WhetError, match=r"place: the disk or its file system fails.*while saving a checkpoint"):
            saver.save(2, {})
    saver.save(3, {})
    saver.wait()
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["latest", "step-000003"]


def error_of(saver: CheckpointSaver) -> str | None:
    try:
        saver.wait()
    except WhetError as error:
        return str(error)
    return None


@pytest.mark.parametrize("call", ["fsync", "rename", "replace"])
def test_whichever_system_call_fails_earlier_checkpoints_stay_and_nothing_partial(
    call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first, the second, … of the calls that put a checkpoint on disk fails."""
    model, optimizer = make()
    with CheckpointSaver(tmp_path, model, optimizer, ALONE, saving.Retention(9)) as saver:
        saver.save(1, {})
    before = sorted(file.name for file in tmp_path.rglob("*"))
    real, failures = getattr(os, call), 0
    for number in range(40):
        count = iter(range(100))

        def fail(*args: Any, _count: Any = count, _number: int = number, **kwargs: Any) -> Any:
            if next(_count) == _number:
                raise OSError(errno.ENOSPC, "No space left on device")
            return real(*args, **kwargs)

        with monkeypatch.context() as patch:
            patch.setattr(os, call, fail)
            saver = CheckpointSaver(tmp_path, model, optimizer, ALONE, saving.Retention(9))
            saver.save(2, {})
            message = error_of(saver)
        if message is not None:
            failures += 1
            assert "the disk is full while saving a checkpoint" in message
            if directory.list_steps(tmp_path) == [1]:
                assert sorted(file.name for file in tmp_path.rglob("*")) == before
        for found in directory.list_steps(tmp_path):
            load_checkpoint(tmp_path / directory.checkpoint_name(found), *make(), ALONE)
        assert 1 in directory.list_steps(tmp_path)
        if next(count) <= number:
            break  # there are no more such calls
        directory.delete_checkpoints(tmp_path, [found for found in directory.list_steps(tmp_path) if found != 1])
        (tmp_path / "latest").write_text("step-000001\n")
    assert failures > 0
    assert number < 39


def test_after_an_exception_a_hanging_disk_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The process must still end."""
    monkeypatch.setattr(saving, "_ABORT_TIMEOUT_S", 0.1)

    may_end = threading.Event()

    def hang(*args: Any, **kwargs: Any) -> None:
        assert not may_end.wait(60), "the disk has come back, too late"

    monkeypatch.setattr(saving, "dcp_save", hang)
    saver = CheckpointSaver(tmp_path, *make(), ALONE)
    began = time.monotonic()
    saver.save(1, {})
    saver.__exit__(KeyboardInterrupt, KeyboardInterrupt(), None)
    assert time.monotonic() - began < 30
    (writing,) = (thread for thread in threading.enumerate() if thread.name == "checkpoint writer")
    assert writing.daemon
    may_end.set()
    writing.join(10)
    assert list(tmp_path.iterdir()) == []


def test_after_an_exception_a_running_save_finishes(tmp_path: Path) -> None:
    saver = CheckpointSaver(tmp_path, *make(), ALONE)
    saver.save(1, {})
    saver.__exit__(RunFailedError, RunFailedError("the model diverged"), None)
    assert directory.list_steps(tmp_path) == [1]


def test_without_memory_for_a_copy_the_save_is_synchronous(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(save, "available_memory", lambda: 100)
    with CheckpointSaver(tmp_path, *make(), ALONE) as saver:
        saver.save(1, {})
        assert directory.list_steps(tmp_path) == [1]
    load_checkpoint(tmp_path / "step-000001", *make(), ALONE)


def test_a_stop_request_during_a_synchronous_save_is_not_an_error_of_the_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(*_: Any) -> None:
        raise StopRequested

    monkeypatch.setattr(save, "available_memory", lambda: 100)
    monkeypatch.setattr(ParallelStorageWriter, "write_data", stop)
    with pytest.raises(StopRequested), CheckpointSaver(tmp_path, *make(), ALONE) as saver:
        saver.save(1, {})
    assert directory.list_steps(tmp_path) == []


def test_staging_buffers_are_reused() -> None:
    staging = save.HostStaging()
    first = staging.copy({"a": torch.ones(3)})["a"]
    second = staging.copy({"a": torch.zeros(3)})["a"]
    assert first.data_ptr() == second.data_ptr()
    assert torch.equal(second, torch.zeros(3))


def test_pinned_memory_is_allocated_on_the_device_of_the_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """A new thread starts on GPU 0, where each rank of a host would create a CUDA context of half a GB."""
    entered, allocated_on = [], []

    class OnDevice:
        def __init__(self, device: torch.device) -> None:
            self._device = device

        def __enter__(self) -> None:
            entered.append(self._device)

        def __exit__(self, *_: object) -> None:
            entered.pop()

    monkeypatch.setattr(torch.cuda, "device", OnDevice)
    staging = save.HostStaging()
    monkeypatch.setattr(staging._pinned, "empty_like", lambda tensor: allocated_on.append(list(entered)))
    on_gpu: Any = SimpleNamespace(is_cuda=True, device=torch.device("cuda", 3), nbytes=8)
    staging.allocate_async({"weight": on_gpu})
    staging._join_allocation()
    assert allocated_on == [[torch.device("cuda", 3)]]


@pytest.mark.parametrize("neighbour", [True, False])
def test_staging_is_preallocated_only_if_all_ranks_have_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, neighbour: bool
) -> None:
    """Ranks of a host share its memory: one that measures after another has allocated finds less."""

    class Two(Ranks):
        def all_gather(self, items: list[Any]) -> list[Any]:
            return [*items, neighbour]

    saver = CheckpointSaver(tmp_path, *make(), Two(0, 1, torch.device("cuda")))
    allocated: list[Any] = []
    monkeypatch.setattr(saver._staging, "allocate_async", allocated.append)
    saver.prepare_first_save()
    assert bool(allocated) == neighbour
