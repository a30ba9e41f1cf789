"""A run whose newest checkpoint is damaged resumes from the one before, with the same end result."""

from __future__ import annotations

import errno
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from whet.core import checksums, files
from whet.core.checksums import hash_block

Exact = Callable[[Path], list[dict[str, Any]]]
State = Callable[[Path], dict[str, bytes]]
FULL = "train.precision=fp64"


@pytest.fixture
def interrupted(tiny_run: Path, tmp_path: Path) -> Path:
    """tiny_run as a crash after its last checkpoint would have left it; it has two, step-000008 and step-000012."""
    folder = tmp_path / "run"
    shutil.copytree(tiny_run, folder)
    shutil.rmtree(folder / "exports")
    status = json.loads((folder / "status.json").read_text())
    (folder / "status.json").write_text(json.dumps({**status, "state": "running", "exit_code": None}))
    return folder


def altered(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def truncated(file: Path) -> None:
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


@pytest.mark.parametrize("damage", [altered, truncated, Path.unlink])
@pytest.mark.parametrize("part", ["model/*.distcp", "optimizer/*.distcp", "model/.metadata", "manifest.json"])
def test_damage_is_detected_and_the_previous_checkpoint_used(
    part: str,
    damage: Callable[[Path], None],
    whet: Any,
    recipe: str,
    interrupted: Path,
    tiny_run: Path,
    exact_of: Exact,
    state_of: State,
) -> None:
    newest = interrupted / "checkpoints" / "step-000012"
    file = sorted(newest.glob(part))[0]
    damage(file)
    ended = whet("train", recipe, FULL, f"run.dir={interrupted}", "--resume")
    assert ended.code == 0, ended.err
    assert "continuing after step 8" in ended.err
    if file.name != "manifest.json" or damage is not Path.unlink:  # without a manifest it is not a checkpoint
        assert str(file) in ended.err
        assert "set aside as damaged-step-000012; the run continues from step 8" in ended.err
        assert (interrupted / "checkpoints" / "damaged-step-000012").is_dir()
    assert (interrupted / "checkpoints" / "latest").read_text() == "step-000012\n"
    assert exact_of(interrupted) == exact_of(tiny_run)
    assert state_of(interrupted) == state_of(tiny_run)


def test_without_an_intact_checkpoint_nothing_is_deleted(whet: Any, recipe: str, interrupted: Path) -> None:
    for number in (8, 12):
        altered(next((interrupted / f"checkpoints/step-{number:06d}/model").glob("*.distcp")))
    metrics = (interrupted / "metrics.jsonl").read_bytes()
    for _ in range(2):
        ended = whet("train", recipe, FULL, f"run.dir={interrupted}", "--resume")
        assert ended.code == 1
        assert "step-000008" in ended.err
        assert "There is no other complete checkpoint" in ended.err
    assert (interrupted / "metrics.jsonl").read_bytes() == metrics
    shutil.rmtree(interrupted / "checkpoints")
    assert whet("train", recipe, FULL, f"run.dir={interrupted}", "--resume").code == 0


def test_a_failing_disk_aborts_the_resume_and_nothing_is_quarantined(
    whet: Any, recipe: str, interrupted: Path, monkeypatch: pytest.MonkeyPatch, tiny_run: Path, exact_of: Exact
) -> None:
    file = sorted((interrupted / "checkpoints/step-000012/optimizer").glob("*.distcp"))[0]

    def fail(path: Path, *part: Any) -> str:
        if path == file:
            raise OSError(errno.EIO, "Input/output error", str(path))
        return hash_block(path, *part)

    monkeypatch.setattr(files, "RETRY_DELAYS_S", (0.001, 0.001))
    monkeypatch.setattr(checksums, "hash_block", fail)
    ended = whet("train", recipe, FULL, f"run.dir={interrupted}", "--resume")
    assert ended.code == 1
    assert f"{file}: cannot be read: Input/output error (tried 3 times" in ended.err
    assert "Traceback" not in ended.err
    assert (interrupted / "checkpoints/step-000012").is_dir()
    monkeypatch.undo()
    assert whet("train", recipe, FULL, f"run.dir={interrupted}", "--resume").code == 0
    assert exact_of(interrupted) == exact_of(tiny_run)


def test_a_damaged_checkpoint_is_not_exported_but_an_earlier_one_is(whet: Any, interrupted: Path) -> None:
    file = next((interrupted / "checkpoints/step-000012/model").glob("*.distcp"))
    altered(file)
    ended = whet("export", interrupted)
    assert ended.code == 1
    assert str(file) in ended.err
    assert "RUN@STEP" in ended.err
    assert whet("export", f"{interrupted}@8").code == 0


def test_an_adapter_is_not_resumed_on_other_weights(whet: Any, recipe: str, tmp_path: Path) -> None:
    from whet.model.load.weight_files import locate_model

    base = tmp_path / "base"
    shutil.copytree(locate_model("builtin:tiny"), base)
    arguments = [
        "train", recipe, f"model.path={base}", f"run.dir={tmp_path / 'run'}", "adapter.rank=2", "train.steps=4",
        "checkpoint.every=2", "export.at_end=none",
    ]  # fmt: skip
    assert whet(*arguments, "--until", "2").code == 0
    manifest = json.loads((tmp_path / "run/checkpoints/step-000002/manifest.json").read_text())
    assert manifest["base"]
    assert manifest["versions"].keys() >= {"whet", "torch", "transformers", "python"}
    assert manifest["config"]["adapter"]["rank"] == 2
    weights = base / "model.safetensors"
    original = weights.read_bytes()
    altered(weights)
    ended = whet(*arguments, "--resume")
    assert ended.code == 1
    assert "its weights are not those that this run's adapter was trained on" in ended.err
    assert whet("export", tmp_path / "run").code == 1
    weights.write_bytes(original)
    assert whet(*arguments, "--resume").code == 0
