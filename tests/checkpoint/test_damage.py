"""A checkpoint that is damaged, foreign or forged: an error that says so, and nothing left of a save that failed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from whet.checkpoint import save as checkpoints
from whet.checkpoint.metadata import SafeReader
from whet.core.errors import WhetError
from whet.core.ranks import Ranks

ALONE = Ranks(0, 1, torch.device("cpu"))


def make() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Linear(3, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    return model, optimizer


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return checkpoints.save(tmp_path, 5, *make(), {}, ALONE)


def test_a_checkpoint_of_another_model_is_an_error_that_says_so(path: Path) -> None:
    with pytest.raises(WhetError, match="step-000005: this checkpoint does not fit the model, or is damaged"):
        checkpoints.load(path, nn.Linear(7, 7), None, ALONE)


def test_a_truncated_checkpoint_is_an_error_that_says_so(path: Path) -> None:
    for part in path.glob("*.distcp"):
        part.write_bytes(part.read_bytes()[: part.stat().st_size // 2])
    with pytest.raises(WhetError, match=r"step-000005: .*damaged"):
        checkpoints.load(path, *make(), ALONE)


@pytest.mark.parametrize("content", [b"", b"nonsense", b"garbage\n", b"\x80\x04."])
def test_damaged_metadata_is_an_error_that_names_the_file_once(path: Path, content: bytes) -> None:
    (path / ".metadata").write_bytes(content)
    with pytest.raises(WhetError, match=r"\.metadata: not the metadata") as raised:
        checkpoints.load(path, *make(), ALONE)
    assert str(raised.value).count(".metadata") == 1


@pytest.mark.parametrize("name", ["os", "torch", "dataclass", "field", "Enum", "Any"])
def test_what_the_metadata_module_merely_imports_is_refused(tmp_path: Path, name: str) -> None:
    module = "torch.distributed.checkpoint.metadata"
    opcodes = b"\x80\x04\x8c" + bytes([len(module)]) + module.encode() + b"\x8c" + bytes([len(name)]) + name.encode()
    (tmp_path / ".metadata").write_bytes(opcodes + b"\x93}(\x8c\x04evilK\x01ub.")  # and sets an attribute `evil`
    with pytest.raises(WhetError, match="does not belong in a checkpoint"):
        SafeReader(tmp_path).read_metadata()


def test_a_save_that_torch_breaks_off_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.distributed.checkpoint.api import CheckpointException

    def broken(tensors: Any, checkpoint_id: Path, **options: Any) -> None:
        (checkpoint_id / "__0_0.distcp").write_bytes(b"half")
        raise CheckpointException("write", {})  # a BaseException, not an Exception

    monkeypatch.setattr(checkpoints, "dcp_save", broken)
    with pytest.raises(BaseException, match="CheckpointException"):
        checkpoints.save(tmp_path, 5, *make(), {}, ALONE)
    assert list(tmp_path.iterdir()) == []
