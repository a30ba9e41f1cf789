"""Damaged, foreign and forged checkpoints raise errors that name the file; a failed save leaves nothing behind."""

from __future__ import annotations

import errno
import io
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from whet.checkpoint import load as loading
from whet.checkpoint import save as saving
from whet.checkpoint.dcp_storage import SafeStorageReader
from whet.checkpoint.directory import DamagedCheckpointError
from whet.checkpoint.load import load_checkpoint
from whet.checkpoint.save import CheckpointSaver
from whet.core import files
from whet.core.distributed import Ranks
from whet.core.errors import WhetError

ALONE = Ranks(0, 1, torch.device("cpu"))


def make() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Linear(3, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    return model, optimizer


@pytest.fixture
def path(tmp_path: Path) -> Path:
    with CheckpointSaver(tmp_path, *make(), ALONE) as saver:
        saver.save(5, {"seen": {"tokens": 1234}})
    return tmp_path / "step-000005"


def test_a_checkpoint_of_another_model_is_refused(path: Path) -> None:
    with pytest.raises(WhetError, match="step-000005: this checkpoint does not fit the model"):
        load_checkpoint(path, nn.Linear(7, 7), None, ALONE)


def every_file(path: Path) -> list[Path]:
    return sorted(file for file in path.rglob("*") if file.is_file())


def test_one_altered_byte_in_any_file_is_detected(path: Path) -> None:
    files = every_file(path)
    assert {file.relative_to(path).parts[0] for file in files} == {"model", "optimizer", "manifest.json"}
    for file in files:
        whole = file.read_bytes()
        for at in (0, len(whole) // 2, len(whole) - 3):
            file.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
            model, optimizer = make()
            before = model.weight.clone()
            with pytest.raises(DamagedCheckpointError) as raised:
                load_checkpoint(path, model, optimizer, ALONE)
            assert str(file) in str(raised.value)
            assert torch.equal(model.weight, before)  # nothing was loaded
        file.write_bytes(whole)
    load_checkpoint(path, *make(), ALONE)


class FailingDisk:
    """Makes opening one file fail with an I/O error this many times."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, file: Path, times: int, error: int = errno.EIO) -> None:
        self.file, self.left, self.error, self._open = file, times, error, io.open
        monkeypatch.setattr(io, "open", self)
        monkeypatch.setattr(files, "RETRY_DELAYS_S", (0.001, 0.002))

    def __call__(self, file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        opened = self._open(file, mode, *args, **kwargs)
        if self.left and Path(file) == self.file and "r" in mode:
            self.left -= 1
            opened.close()
            raise OSError(self.error, os.strerror(self.error), str(file))
        return opened


@pytest.mark.parametrize("error", [errno.EIO, errno.ESTALE])
def test_a_read_that_fails_for_a_moment_is_retried(path: Path, monkeypatch: pytest.MonkeyPatch, error: int) -> None:
    for file in every_file(path):
        disk = FailingDisk(monkeypatch, file, times=2, error=error)
        load_checkpoint(path, *make(), ALONE)
        assert disk.left == 0, file
        monkeypatch.undo()


def test_a_read_that_keeps_failing_is_unreadable_not_damaged(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for file in every_file(path):
        FailingDisk(monkeypatch, file, times=99)
        model, optimizer = make()
        before = model.weight.clone()
        with pytest.raises(files.UnreadableError, match=r"Input/output error \(tried 3 times") as raised:
            load_checkpoint(path, model, optimizer, ALONE)
        assert str(file) in str(raised.value)
        assert raised.value.exit_code == 1
        assert torch.equal(model.weight, before)
        monkeypatch.undo()


def test_a_disk_that_fails_after_verification_is_unreadable_not_a_mismatch(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    verify_intact = loading.verify_checkpoint
    for file in every_file(path / "model"):
        disk = FailingDisk(monkeypatch, file, times=0)

        def verify(*args: Any, disk: FailingDisk = disk) -> Any:
            manifest = verify_intact(*args)
            disk.left = 99
            return manifest

        monkeypatch.setattr(loading, "verify_checkpoint", verify)
        with pytest.raises(files.UnreadableError) as raised:
            load_checkpoint(path, *make(), ALONE)
        assert str(file) in str(raised.value)
        monkeypatch.undo()


def test_permission_denied_is_not_retried(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = FailingDisk(monkeypatch, path / "manifest.json", times=99, error=errno.EACCES)
    with pytest.raises(files.UnreadableError, match=r"Permission denied\. It may be intact"):
        load_checkpoint(path, *make(), ALONE)
    assert disk.left == 98


@pytest.mark.skipif(not Path("/proc/self/mem").exists(), reason="needs a file that cannot be read")
def test_an_io_error_of_the_kernel_is_unreadable(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "RETRY_DELAYS_S", (0.001,))
    (path / "manifest.json").unlink()
    (path / "manifest.json").symlink_to("/proc/self/mem")  # its first page is never mapped: EIO
    with pytest.raises(files.UnreadableError, match="Input/output error"):
        load_checkpoint(path, *make(), ALONE)


@pytest.mark.parametrize("left", [0.0, 0.5])
def test_a_truncated_file_is_detected(path: Path, left: float) -> None:
    for file in every_file(path):
        whole = file.read_bytes()
        file.write_bytes(whole[: int(left * len(whole))])
        with pytest.raises(DamagedCheckpointError) as raised:
            load_checkpoint(path, *make(), ALONE)
        assert str(file) in str(raised.value)
        file.write_bytes(whole)


def test_a_missing_file_is_detected(path: Path) -> None:
    for file in every_file(path / "model"):
        file.rename(path / "elsewhere")
        with pytest.raises(DamagedCheckpointError, match="no such file") as raised:
            load_checkpoint(path, *make(), ALONE)
        assert str(file) in str(raised.value)
        (path / "elsewhere").rename(file)


def test_a_damaged_optimizer_state_does_not_matter_for_the_weights(path: Path) -> None:
    for file in every_file(path / "optimizer"):
        file.write_bytes(b"")
    load_checkpoint(path, make()[0], None, ALONE)


@pytest.mark.parametrize("content", [b"", b"nonsense", b"garbage\n", b"\x80\x04."])
def test_damaged_metadata_names_the_file_once(path: Path, content: bytes) -> None:
    (path / "model" / ".metadata").write_bytes(content)
    with pytest.raises(WhetError, match=r"\.metadata: not the metadata") as raised:
        SafeStorageReader(path / "model").read_metadata()
    assert str(raised.value).count(".metadata") == 1


@pytest.mark.parametrize("name", ["os", "torch", "dataclass", "field", "Enum", "Any"])
def test_names_that_the_metadata_module_merely_imports_are_refused(tmp_path: Path, name: str) -> None:
    module = "torch.distributed.checkpoint.metadata"
    opcodes = b"\x80\x04\x8c" + bytes([len(module)]) + module.encode() + b"\x8c" + bytes([len(name)]) + name.encode()
    (tmp_path / ".metadata").write_bytes(opcodes + b"\x93}(\x8c\x04evilK\x01ub.")  # and sets an attribute `evil`
    with pytest.raises(WhetError, match="is not allowed in a checkpoint"):
        SafeStorageReader(tmp_path).read_metadata()


@pytest.mark.parametrize(
    ("cause", "said"),
    [
        (None, "saving a checkpoint failed after step 5"),
        (RuntimeError("can't start new thread"), "failed after step 5: RuntimeError: can't start new thread. Earlier"),
        (OSError(errno.EFBIG, "File too large"), "larger than the file system or `ulimit -f` allows while saving"),
    ],
)
def test_a_save_that_torch_aborts_leaves_nothing_and_names_the_cause(
    cause: Exception | None, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torch.distributed.checkpoint.api import CheckpointException

    def broken(tensors: Any, storage_writer: Any, **options: Any) -> None:
        (storage_writer.path / "__0_0.distcp").write_bytes(b"half")
        failures = {} if cause is None else {0: (cause, "written through inline_container.cc")}
        raise CheckpointException("write", failures)  # type: ignore[arg-type]  # a BaseException, not an Exception

    monkeypatch.setattr(saving, "dcp_save", broken)
    saver = CheckpointSaver(tmp_path, *make(), ALONE)
    with pytest.raises(WhetError, match=said), saver:
        saver.save(5, {})
    assert list(tmp_path.iterdir()) == []
