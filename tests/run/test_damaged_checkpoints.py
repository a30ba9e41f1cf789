"""A run whose newest checkpoint is damaged says so, goes on from the one before, and ends as if nothing had been."""

from __future__ import annotations

import errno
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from whet.checkpoint import manifest
from whet.core import retry
from whet.core.files import hash_file

Exact = Callable[[Path], list[dict[str, Any]]]
WEIGHTS = "exports/merged/model.safetensors"
FULL = "train.precision=fp64"


@pytest.fixture
def broken_off(tiny_run: Path, tmp_path: Path) -> Path:
    """tiny_run as a crash after its last checkpoint would have left it; it has two, step-000020 and step-000030."""
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
def test_one_byte_is_enough(
    part: str, damage: Callable[[Path], None], whet: Any, recipe: str, broken_off: Path, tiny_run: Path, exact_of: Exact
) -> None:
    newest = broken_off / "checkpoints" / "step-000030"
    file = sorted(newest.glob(part))[0]
    damage(file)
    ended = whet("train", recipe, FULL, f"run.dir={broken_off}", "--resume")
    assert ended.code == 0, ended.err
    assert "continuing after step 20" in ended.err
    if file.name != "manifest.json" or damage is not Path.unlink:  # without a manifest it is not even a checkpoint
        assert str(file) in ended.err
        assert "set aside as damaged-step-000030; the run goes on from step 20" in ended.err
        assert (broken_off / "checkpoints" / "damaged-step-000030").is_dir()
    assert (broken_off / "checkpoints" / "latest").read_text() == "step-000030\n"
    assert exact_of(broken_off) == exact_of(tiny_run)
    assert (broken_off / WEIGHTS).read_bytes() == (tiny_run / WEIGHTS).read_bytes()


def test_without_a_whole_one_nothing_is_thrown_away(whet: Any, recipe: str, broken_off: Path) -> None:
    for number in (20, 30):
        altered(next((broken_off / f"checkpoints/step-0000{number}/model").glob("*.distcp")))
    metrics = (broken_off / "metrics.jsonl").read_bytes()
    for _ in range(2):
        ended = whet("train", recipe, FULL, f"run.dir={broken_off}", "--resume")
        assert ended.code == 1
        assert "step-000020" in ended.err
        assert "There is no other complete one" in ended.err
    assert (broken_off / "metrics.jsonl").read_bytes() == metrics
    shutil.rmtree(broken_off / "checkpoints")
    assert whet("train", recipe, FULL, f"run.dir={broken_off}", "--resume").code == 0


def test_a_disk_that_fails_ends_the_start_and_sets_nothing_aside(
    whet: Any, recipe: str, broken_off: Path, monkeypatch: pytest.MonkeyPatch, tiny_run: Path, exact_of: Exact
) -> None:
    file = sorted((broken_off / "checkpoints/step-000030/optimizer").glob("*.distcp"))[0]

    def fail(path: Path, **kind: Any) -> str:
        if path == file:
            raise OSError(errno.EIO, "Input/output error", str(path))
        return hash_file(path, **kind)

    monkeypatch.setattr(retry, "RETRY_DELAYS_S", (0.001, 0.001))
    monkeypatch.setattr(manifest, "hash_file", fail)
    ended = whet("train", recipe, FULL, f"run.dir={broken_off}", "--resume")
    assert ended.code == 1
    assert f"{file}: cannot be read: Input/output error (tried 3 times" in ended.err
    assert "Traceback" not in ended.err
    assert (broken_off / "checkpoints/step-000030").is_dir()
    monkeypatch.undo()
    assert whet("train", recipe, FULL, f"run.dir={broken_off}", "--resume").code == 0
    assert exact_of(broken_off) == exact_of(tiny_run)


def test_an_export_of_a_damaged_checkpoint_is_refused_and_another_can_be_had(whet: Any, broken_off: Path) -> None:
    file = next((broken_off / "checkpoints/step-000030/model").glob("*.distcp"))
    altered(file)
    ended = whet("export", broken_off)
    assert ended.code == 1
    assert str(file) in ended.err
    assert "RUN@STEP" in ended.err
    assert whet("export", f"{broken_off}@20").code == 0


def test_an_adapter_is_not_put_on_other_weights(whet: Any, recipe: str, tmp_path: Path) -> None:
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
