"""Runs whose weights or rows are divided among processes: equal to one process, and continued by any number of them."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from several_processes import RECIPE, on_gpu, torchrun
from tiny_architectures import save_tiny_model

Steps = Callable[[Path], list[dict[str, Any]]]


@pytest.fixture(scope="module")
def recipe() -> str:
    return RECIPE


def together(processes: int, *arguments: Any) -> subprocess.CompletedProcess[str]:
    return torchrun(processes, "-m", "whet", "train", *arguments, "launch.share_gpu=true")


def assert_equal(ours: list[dict[str, Any]], theirs: list[dict[str, Any]]) -> None:
    assert [line["step"] for line in ours] == [line["step"] for line in theirs]
    for key in ("loss", "grad_norm", "lr", "conversations", "tokens", "supervised_tokens"):
        assert [line[key] for line in ours] == pytest.approx([line[key] for line in theirs], rel=1e-9), key


def assert_same_effect(ours: Path, theirs: Path, rel: float) -> None:
    """`rel`: sketches of shards estimate the size of an update a little differently."""
    one, two = (json.loads((folder / "effect.json").read_text())["modules"] for folder in (ours, theirs))
    for a, b in zip(one, two, strict=True):
        changes = a.pop("change", 0.0), b.pop("change", 0.0)  # none for what was zero
        assert changes[0] == pytest.approx(changes[1], rel=rel)
        assert a == b


@pytest.mark.parametrize(
    ("processes", "mesh"),
    [
        (2, ["parallel.shard=2"]),
        (4, ["parallel.shard=2", "parallel.context=2", "train.micro_rows=2"]),
        on_gpu(2, []),
        on_gpu(2, ["parallel.shard=2"]),
        on_gpu(2, ["parallel.context=2"]),
        on_gpu(4, ["parallel.shard=4"]),
        on_gpu(4, ["parallel.shard=2", "parallel.context=2", "train.micro_rows=2"]),
    ],
)
def test_one_run_by_one_by_several_and_by_one_again(
    whet: Any, tiny_run: Path, recipe: str, tmp_path: Path, steps_of: Steps, processes: int, mesh: list[str]
) -> None:
    folder = tmp_path / "run"
    options = (recipe, f"run.dir={folder}", "train.precision=fp64", "export.at_end=merged", "--resume")
    assert whet("train", *options, "--until", "4").code == 0
    done = together(processes, *options, "--until", 8, *mesh)
    assert done.returncode == 0, done.stderr
    assert whet("train", *options).code == 0
    assert_equal(steps_of(folder), steps_of(tiny_run))
    certificate = json.loads((folder / "exports" / "merged" / "certificate.json").read_text())
    assert certificate["verified"]


def test_adapters_over_sharded_weights_learn_and_export_as_in_one_process(
    whet: Any, recipe: str, tmp_path: Path, steps_of: Steps
) -> None:
    options = ["train.precision=fp64", "train.steps=6", "adapter.rank=4", "eval.tasks=[orders]", "eval.examples=3"]
    options += ["export.at_end=merged"]
    assert whet("train", recipe, f"run.dir={tmp_path / 'one'}", *options).code == 0
    done = together(2, recipe, f"run.dir={tmp_path / 'two'}", *options, "parallel.shard=2")
    assert done.returncode == 0, done.stderr
    assert_equal(steps_of(tmp_path / "two"), steps_of(tmp_path / "one"))
    ours, theirs = (
        [line for line in map(json.loads, (tmp_path / name / "metrics.jsonl").open()) if "val_loss" in line]
        for name in ("two", "one")
    )
    assert_same_effect(tmp_path / "two", tmp_path / "one", 1e-6)
    for key in ("val_loss", "val_accuracy", "task/orders"):
        assert [line[key] for line in ours] == pytest.approx([line[key] for line in theirs], rel=1e-9), key
    certificate = json.loads((tmp_path / "two" / "exports" / "merged" / "certificate.json").read_text())
    assert certificate["verified"]


@pytest.mark.parametrize("kind", ["gpt_oss", pytest.param("jetmoe", marks=pytest.mark.slow)])
def test_sharded_experts_learn_as_in_one_process(
    whet: Any, recipe: str, tmp_path: Path, steps_of: Steps, kind: str
) -> None:
    """The MLPs of gpt-oss return a tuple; JetMoE fails on packed conversations inside FSDP and is trained unpacked."""
    options = [
        save_tiny_model(kind, tmp_path / "model"), "train.precision=fp64", "train.steps=2", "data.max_length=256",
        "data.validation=null", "export.at_end=none",
    ]  # fmt: skip
    assert whet("train", recipe, f"run.dir={tmp_path / 'one'}", *options).code == 0
    done = together(2, recipe, f"run.dir={tmp_path / 'two'}", *options, "parallel.shard=2")
    assert done.returncode == 0, done.stderr
    assert_equal(steps_of(tmp_path / "two"), steps_of(tmp_path / "one"))
    assert_same_effect(tmp_path / "two", tmp_path / "one", 0.2)


def test_one_process_may_shard_by_one(whet: Any, tiny_run: Path, recipe: str, tmp_path: Path, steps_of: Steps) -> None:
    folder = tmp_path / "run"
    assert whet("train", recipe, f"run.dir={folder}", "train.precision=fp64", "parallel.shard=1").code == 0
    assert_equal(steps_of(folder), steps_of(tiny_run))


def test_weights_may_be_offloaded_for_a_part_of_the_run(
    whet: Any, tiny_run: Path, recipe: str, tmp_path: Path, steps_of: Steps
) -> None:
    folder = tmp_path / "run"
    options = ("train", recipe, f"run.dir={folder}", "train.precision=fp64", "export.at_end=merged", "--resume")
    assert whet(*options, "--until", "4").code == 0
    assert whet(*options, "--until", "19", "parallel.shard=1", "parallel.offload=weights").code == 0
    assert whet(*options, "parallel.shard=1").code == 0
    assert_equal(steps_of(folder), steps_of(tiny_run))
    ours, theirs = (load_file(run / "exports/merged/model.safetensors") for run in (folder, tiny_run))
    assert ours.keys() == theirs.keys()
    for name, weight in theirs.items():
        torch.testing.assert_close(ours[name], weight, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["parallel.shard=3"], "parallel.shard=3 does not fit 1 process"),
        (["parallel.context=2"], "parallel.context=2 does not fit 1 process"),
        (
            ["parallel.replicate=2", "parallel.shard=1"],
            "parallel.replicate=2 · parallel.shard=1 does not fit 1 process",
        ),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_does_not_fit_the_processes_is_refused(
    whet: Any, recipe: str, tmp_path: Path, options: list[str], words: str
) -> None:
    result = whet("train", recipe, f"run.dir={tmp_path / 'run'}", *options)
    assert result.code == 1
    assert words in result.err
    assert not (tmp_path / "run").exists()
