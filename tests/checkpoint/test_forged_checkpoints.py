"""A forged checkpoint runs no code and reads no file outside of its folder, whatever its hashes say."""

from __future__ import annotations

import contextlib
import io
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, MetadataIndex

from examples import examples
from whet.checkpoint.dcp_storage import SafeStorageReader
from whet.checkpoint.directory import read_manifest, write_manifest
from whet.checkpoint.load import CheckpointWeights, load_checkpoint
from whet.checkpoint.save import CheckpointSaver
from whet.core.checksums import hash_files
from whet.core.distributed import Ranks
from whet.core.errors import WhetError

ALONE = Ranks(0, 1, torch.device("cpu"))


class Code:
    """Unpickling it writes the file in the environment variable FORGED."""

    def __reduce__(self) -> Any:
        return os.system, ('touch "$FORGED"',)


@pytest.fixture
def marker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FORGED", str(tmp_path / "code-ran"))
    return tmp_path / "code-ran"


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoints")
    model = nn.Linear(3, 4)
    with CheckpointSaver(folder, model, torch.optim.AdamW(model.parameters()), ALONE) as saver:
        saver.save(5, {})
    return folder / "step-000005"


@pytest.fixture
def path(saved: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved, tmp_path / "step-000005"))


def forge(path: Path, part: str, change: Callable[[Metadata], None]) -> None:
    """Change the metadata of a part, and make all hashes match."""
    file = path / part / ".metadata"
    metadata = pickle.loads(file.read_bytes())
    change(metadata)
    file.write_bytes(pickle.dumps(metadata))
    seal(path)


def seal(path: Path) -> None:
    manifest = {key: value for key, value in read_manifest(path).items() if key != "hash"}
    files = [file for file in path.rglob("*") if file.is_file() and file.name != "manifest.json"]
    write_manifest(path, {**manifest, "files": hash_files(path, files)})


def declare_as_bytes(path: Path, part: str) -> str:
    """Declare a tensor of this part as bytes, with code for its content; returns its name."""
    code = io.BytesIO()
    torch.save(Code(), code)
    named: list[str] = []

    def change(metadata: Metadata) -> None:
        name = sorted(metadata.state_dict_metadata)[-1]
        index = next(index for index in metadata.storage_data if index.fqn == name)
        info = metadata.storage_data.pop(index)
        file = path / part / info.relative_path
        info.offset, info.length = file.stat().st_size, len(code.getvalue())
        file.write_bytes(file.read_bytes() + code.getvalue())
        metadata.state_dict_metadata[name] = BytesStorageMetadata()
        metadata.storage_data[MetadataIndex(name)] = info
        named.append(name)

    forge(path, part, change)
    return named[0]


@pytest.mark.parametrize("part", ["model", "optimizer"])
def test_an_entry_of_bytes_is_refused_and_not_unpickled(path: Path, part: str, marker: Path) -> None:
    name = declare_as_bytes(path, part)
    model = nn.Linear(3, 4)
    with pytest.raises(WhetError, match=rf"{part}/\.metadata: {name} is stored as a pickled object"):
        load_checkpoint(path, model, torch.optim.AdamW(model.parameters()), ALONE)
    assert not marker.exists()


def test_code_in_the_place_of_a_tensor_is_refused(path: Path, marker: Path) -> None:
    """The entry says tensor; its content is a pickle."""
    code = io.BytesIO()
    torch.save(Code(), code)

    def change(metadata: Metadata) -> None:
        for info in metadata.storage_data.values():
            file = path / "model" / info.relative_path
            info.offset, info.length = file.stat().st_size, len(code.getvalue())
            file.write_bytes(file.read_bytes() + code.getvalue())

    forge(path, "model", change)
    with pytest.raises(WhetError, match="does not fit the model"):
        load_checkpoint(path, nn.Linear(3, 4), None, ALONE)
    assert not marker.exists()


@pytest.mark.parametrize("outside", ["../../secret.distcp", "/etc/passwd", "", ".", 7])
def test_files_outside_of_the_folder_are_refused(path: Path, outside: Any) -> None:
    (path.parent / "secret.distcp").write_bytes(b"secret")

    def change(metadata: Metadata) -> None:
        next(iter(metadata.storage_data.values())).relative_path = outside

    forge(path, "model", change)
    with pytest.raises(WhetError, match=r"\.metadata: .* outside of the checkpoint"):
        load_checkpoint(path, nn.Linear(3, 4), None, ALONE)


def test_a_link_out_of_the_folder_is_refused(path: Path, tmp_path: Path) -> None:
    file = next((path / "model").glob("*.distcp"))
    shutil.move(file, tmp_path / "elsewhere")
    file.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(WhetError, match="outside of the checkpoint"):
        load_checkpoint(path, nn.Linear(3, 4), None, ALONE)


def test_a_size_beyond_the_file_allocates_nothing(path: Path) -> None:
    """A tensor that claims 2^60 bytes is refused before memory is requested for it."""
    huge = io.BytesIO()
    torch.save(torch.empty(1).expand(2), huge)
    claim = huge.getvalue().replace(b"K\x01", b"\x8a\x08\0\0\0\0\0\0\0\x10", 1)

    def change(metadata: Metadata) -> None:
        for info in metadata.storage_data.values():
            file = path / "model" / info.relative_path
            info.offset, info.length = file.stat().st_size, len(claim)
            file.write_bytes(file.read_bytes() + claim)

    forge(path, "model", change)
    with pytest.raises(WhetError, match="does not fit the model"):
        load_checkpoint(path, nn.Linear(3, 4), None, ALONE)


@given(flips=st.lists(st.tuples(st.integers(0, 10_000), st.integers(0, 255)), min_size=1, max_size=4))
@settings(max_examples=examples(100), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_metadata_is_read_or_refused(saved: Path, tmp_path: Path, flips: list[tuple[int, int]]) -> None:
    content = bytearray((saved / "model" / ".metadata").read_bytes())
    for at, byte in flips:
        content[at % len(content)] = byte
    (tmp_path / ".metadata").write_bytes(content)
    with contextlib.suppress(WhetError):
        SafeStorageReader(tmp_path).read_metadata()


@pytest.mark.parametrize(
    "content", [[], {"step": "x"}, {"step": 5, "parts": 3}, {"step": 5, "parts": ["model"], "files": []}]
)
def test_a_manifest_of_another_shape_is_damaged(path: Path, content: Any) -> None:
    if isinstance(content, dict):
        write_manifest(path, content)
    else:
        (path / "manifest.json").write_text("[]")
    with pytest.raises(WhetError, match=r"manifest\.json"):
        load_checkpoint(path, nn.Linear(3, 4), None, ALONE)


@pytest.mark.parametrize("command", ["eval", "export", "resume"])
def test_commands_refuse_a_forged_run(
    command: str, whet: Any, recipe: str, tiny_run: Path, tmp_path: Path, marker: Path
) -> None:
    run = Path(shutil.copytree(tiny_run, tmp_path / "run"))
    name = declare_as_bytes(max((run / "checkpoints").glob("step-*")), "model")
    (run / "status.json").unlink()
    full = "train.precision=fp64"
    arguments = {
        "eval": ("eval", run),
        "export": ("export", run, "--out", tmp_path / "out"),
        "resume": ("train", recipe, full, f"run.dir={run}", "--resume"),
    }
    ended = whet(*arguments[command])
    assert ended.code == 1, ended.err
    assert name.removeprefix("model.language_model.") in ended.err
    assert "Traceback" not in ended.err
    assert not marker.exists()


def test_weights_read_one_by_one_are_tensors_too(path: Path, marker: Path) -> None:
    name = declare_as_bytes(path, "model")
    weights = CheckpointWeights(path)
    assert name not in weights
    assert not marker.exists()
