"""Checkpoints: complete or absent, loaded bit for bit, unpickled safely."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import FileSystemWriter

from whet.checkpoint import directory
from whet.checkpoint import save as saving
from whet.checkpoint.dcp_storage import SafeStorageReader
from whet.checkpoint.directory import Retention
from whet.checkpoint.load import CheckpointWeights, load_checkpoint
from whet.checkpoint.save import CheckpointSaver
from whet.core.distributed import Ranks
from whet.core.errors import WhetError
from whet.core.signals import StopRequested

ALONE = Ranks(0, 1, torch.device("cpu"))


def trained(seed: int, steps: int = 2) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model with one frozen parameter, and an optimizer after some steps."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    model[0].bias.requires_grad_(False)
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trainable, lr=0.1)
    for _ in range(steps):
        model(torch.randn(5, 3)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def save(folder: Path, step: int, model: nn.Module, optimizer: torch.optim.Optimizer, **options: Any) -> Path:
    with CheckpointSaver(folder, model, optimizer, ALONE, options.pop("retention", Retention(99)), **options) as saver:
        saver.save(step, {"note": step})
    return folder / f"step-{step:06d}"


def saved(folder: Path, *steps: int, **options: Any) -> None:
    for step in steps:
        save(folder, step, *trained(step), **options)


def names(folder: Path) -> list[str]:
    return sorted(entry.name for entry in folder.iterdir())


def test_weights_optimizer_and_state_load_bit_for_bit(tmp_path: Path) -> None:
    model, optimizer = trained(seed=1, steps=3)
    path = save(tmp_path, 7, model, optimizer, metadata=lambda: {"versions": {"whet": "1"}})
    other, others_optimizer = trained(seed=2, steps=0)
    frozen = other[0].bias.clone()
    manifest = load_checkpoint(path, other, others_optimizer, ALONE)
    assert (manifest["step"], manifest["state"], manifest["versions"]) == (7, {"note": 7}, {"whet": "1"})
    assert torch.equal(other[0].bias, frozen)
    assert others_optimizer.param_groups[0]["lr"] == 0.1
    for (name, mine), (_, theirs) in zip(model.named_parameters(), other.named_parameters(), strict=True):
        if mine.requires_grad:
            assert torch.equal(mine, theirs), name
            for key, value in optimizer.state[mine].items():
                assert torch.equal(value, others_optimizer.state[theirs][key]), key


def test_an_optimizer_without_a_step_loads_without_a_step(tmp_path: Path) -> None:
    """AdamW corrects its bias by the number of steps: one too many would make the first update too small."""
    model, optimizer = trained(seed=1, steps=0)
    fresh, fresh_optimizer = trained(seed=1, steps=0)
    path = save(tmp_path, 1, model, optimizer)
    other, others_optimizer = trained(seed=2, steps=0)
    load_checkpoint(path, other, others_optimizer, ALONE)
    other[0].bias.data.copy_(fresh[0].bias)
    for each, its in ((model, optimizer), (fresh, fresh_optimizer), (other, others_optimizer)):
        each(torch.ones(5, 3)).square().sum().backward()
        its.step()
    for expected, kept, loaded in zip(fresh.parameters(), model.parameters(), other.parameters(), strict=True):
        assert torch.equal(kept, expected)
        assert torch.equal(loaded, expected)


def test_a_stop_request_while_loading_is_not_reported_as_a_bad_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch wraps whatever is raised while loading."""
    model = nn.ModuleDict({"language_model": nn.Linear(3, 4)})
    optimizer = torch.optim.AdamW(model.parameters())
    path = save(tmp_path, 1, model, optimizer)

    def stop(*_: Any) -> None:
        raise StopRequested

    monkeypatch.setattr(SafeStorageReader, "read_data", stop)
    with pytest.raises(StopRequested):
        load_checkpoint(path, model, optimizer, ALONE)
    monkeypatch.setattr(SafeStorageReader, "_read_chunk", stop)
    with pytest.raises(StopRequested):  # the way an export reads
        CheckpointWeights(path).read("weight", torch.float32)


def test_parallel_reads_leave_no_dispatch_mode_behind(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(40)))
    optimizer = torch.optim.AdamW(model.parameters())
    load_checkpoint(save(tmp_path, 1, model, optimizer), model, optimizer, ALONE)
    assert not torch.utils._python_dispatch.is_in_torch_dispatch_mode()


def test_weights_can_be_loaded_without_the_optimizer(tmp_path: Path) -> None:
    model, optimizer = trained(seed=1)
    path = save(tmp_path, 1, model, optimizer)
    other, _ = trained(seed=2)
    load_checkpoint(path, other, None, ALONE)
    assert torch.equal(model[1].weight, other[1].weight)


def test_latest_names_the_newest_and_no_temporary_file_is_left(tmp_path: Path) -> None:
    saved(tmp_path, 5, 10)
    assert (tmp_path / "latest").read_text() == "step-000010\n"
    assert names(tmp_path) == ["latest", "step-000005", "step-000010"]
    assert directory.newest_checkpoint(tmp_path) == tmp_path / "step-000010"


def test_a_step_can_be_saved_again(tmp_path: Path) -> None:
    saved(tmp_path, 5, 5)
    assert directory.list_steps(tmp_path) == [5]
    assert names(tmp_path) == ["latest", "step-000005"]


def test_a_checkpoint_without_a_manifest_is_ignored(tmp_path: Path) -> None:
    saved(tmp_path, 5, 10)
    (tmp_path / "step-000010" / "manifest.json").unlink()
    assert directory.list_steps(tmp_path) == [5]
    assert directory.newest_checkpoint(tmp_path) == tmp_path / "step-000005"


def test_without_a_checkpoint_there_is_no_newest(tmp_path: Path) -> None:
    assert directory.newest_checkpoint(tmp_path / "nowhere") is None


def test_a_failed_save_leaves_the_earlier_checkpoints_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved(tmp_path, 5)

    def full(*args: Any, **kwargs: Any) -> None:
        raise OSError(28, "No space left on device", "somewhere")

    monkeypatch.setattr(saving, "dcp_save", full)
    with pytest.raises(WhetError, match="the disk is full while saving a checkpoint"):
        saved(tmp_path, 10)
    assert names(tmp_path) == ["latest", "step-000005"]
    assert (tmp_path / "latest").read_text() == "step-000005\n"


def test_retention_keeps_the_newest(tmp_path: Path) -> None:
    saved(tmp_path, 5, 10, 15, retention=Retention(2))
    assert names(tmp_path) == ["latest", "step-000010", "step-000015"]


class _Evil:
    """Creates a file when unpickled."""

    def __init__(self, file: Path) -> None:
        self._command = f"touch {file}"

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (self._command,)


def test_metadata_that_would_run_code_is_refused(tmp_path: Path) -> None:
    (tmp_path / ".metadata").write_bytes(pickle.dumps(_Evil(tmp_path / "evil")))
    with pytest.raises(WhetError, match=r"\.metadata: not the metadata.*system is not allowed"):
        SafeStorageReader(tmp_path).read_metadata()
    assert not (tmp_path / "evil").exists()


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("builtins", "eval"),
        ("torch", "load"),
        ("torch.distributed.checkpoint.metadata", "os.system"),
        ("torch.distributed.checkpoint.metadata", "torch.load"),
    ],
)
def test_a_global_outside_the_allow_list_is_refused(tmp_path: Path, module: str, name: str) -> None:
    opcodes = b"\x80\x04\x8c" + bytes([len(module)]) + module.encode() + b"\x8c" + bytes([len(name)]) + name.encode()
    (tmp_path / ".metadata").write_bytes(opcodes + b"\x93.")
    with pytest.raises(WhetError, match="is not allowed in a checkpoint"):
        SafeStorageReader(tmp_path).read_metadata()


def test_any_strides_dtypes_and_offsets_are_read_as_torch_reads_them(tmp_path: Path) -> None:
    """Also as other writers lay them out: not contiguous, empty, without gaps between tensors."""
    torch.manual_seed(0)
    tensors = {
        "odd": torch.arange(3, dtype=torch.uint8),
        "transposed": torch.randn(5, 7).t(),
        "strided": torch.randn(8, 6)[::2, 1:4],
        "bfloat16": torch.randn(33).bfloat16(),
        "float64": torch.randn(3, dtype=torch.float64),
        "scalar": torch.tensor(3.5),
        "empty": torch.empty(0, 4),
    }
    dcp.save(tensors, storage_writer=FileSystemWriter(tmp_path, single_file_per_rank=True), no_dist=True)
    found = {name: torch.full_like(tensor, 9) for name, tensor in tensors.items()}
    dcp.load(found, storage_reader=SafeStorageReader(tmp_path), no_dist=True)
    for name, tensor in tensors.items():
        assert torch.equal(found[name], tensor), name


def test_adapters_of_other_layers_are_refused_not_dropped(tmp_path: Path) -> None:
    """As of a mixture that an earlier version adapted: routers had adapters, and not all experts."""

    def adapted(*layers: str) -> nn.Module:
        found = nn.ModuleDict({name: nn.ModuleDict({"lora_A": nn.Linear(2, 2, bias=False)}) for name in layers})
        return nn.ModuleDict({"language_model": found})

    model = adapted("q_proj", "gate", "experts")
    path = save(tmp_path, 1, model, torch.optim.AdamW(model.parameters()))
    for other, reason in (
        (adapted("q_proj", "experts"), r"1 are only in the checkpoint \(.*gate\)\. An earlier version"),
        (adapted("q_proj", "gate", "experts", "shared"), r"1 only in the model \(.*shared\)\. An earlier version"),
    ):
        with pytest.raises(WhetError, match=f"adapters are on other layers than adapter.targets reaches now: {reason}"):
            load_checkpoint(path, other, None, ALONE)
        weights = {name.removeprefix("language_model."): weight for name, weight in other.named_parameters()}
        with pytest.raises(WhetError, match=r"run\.dir=FOLDER"):
            CheckpointWeights(path).require_fit(weights)
    load_checkpoint(path, adapted("q_proj", "gate", "experts"), None, ALONE)
