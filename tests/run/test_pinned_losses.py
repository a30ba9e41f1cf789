"""The layout does not matter: one process or two, packed or not, few rows at a time or many, pinned numbers."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Steps = Callable[[Path], list[dict[str, Any]]]


def under_torchrun(*arguments: Any) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [
        sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", str(port),
        "-m", "whet", "train", *map(str, arguments), "train.micro_rows=1",
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr


def assert_equal(ours: list[dict[str, Any]], theirs: list[dict[str, Any]], within: float, *keys: str) -> None:
    assert [line["step"] for line in ours] == [line["step"] for line in theirs]
    for key in keys:
        assert [line[key] for line in ours] == pytest.approx([line[key] for line in theirs], rel=within), key


PINNED = [
    6.0774938287, 5.8991943670, 5.6630428993, 5.4322029733, 5.2223452346, 5.0102844258, 4.7816781698, 4.5839798306,
    4.4136247891, 4.2652301653, 4.1006899379, 3.9830000488, 3.8697088725, 3.7656883476, 3.7089624635, 3.6151365691,
    3.5323340472, 3.4815946337, 3.3902756151, 3.3563485477,
]  # fmt: skip
"""The first losses of recipes/tiny.yaml in fp64. They change when what is trained changes, and only then."""


def test_the_first_losses_are_the_pinned_ones(shared_run: Any, shipped_recipe: str, steps_of: Steps) -> None:
    options = ("train.precision=fp64", "eval.at_start=false", "export.at_end=none")
    lines = steps_of(shared_run("pinned", *options, recipe=shipped_recipe))
    assert len(lines) == 30
    assert [line["loss"] for line in lines[:20]] == pytest.approx(PINNED, rel=1e-8)


@pytest.mark.parametrize("packing", ["best-fit", pytest.param("none", marks=pytest.mark.slow)])
def test_two_processes_give_the_losses_and_norms_of_one(
    tiny_run: Path, recipe: str, tmp_path: Path, steps_of: Steps, packing: str
) -> None:
    """Packed, a step has two or three rows and both add in the same order; unpacked it has eight, and they do not."""
    under_torchrun(recipe, f"run.dir={tmp_path / 'two'}", "train.precision=fp64", f"data.packing={packing}")
    one, two = steps_of(tiny_run), steps_of(tmp_path / "two")
    assert len(two) == 12
    assert_equal(two, one, 1e-9, "loss", "grad_norm")
    assert_equal(two, one, 0, "lr", "epoch", "conversations", "tokens", "supervised_tokens", "flops")
    ours, theirs = (
        [line for line in map(json.loads, (folder / "metrics.jsonl").open()) if "val_loss" in line]
        for folder in (tmp_path / "two", tiny_run)
    )
    assert len(ours) == 2
    assert_equal(ours, theirs, 1e-9, "val_loss", "val_accuracy", "val_bpb")


@pytest.mark.slow
def test_two_processes_give_the_first_losses_of_one_in_fp32(
    whet: Any, recipe: str, tmp_path: Path, steps_of: Steps
) -> None:
    options = ["train.steps=5", "export.at_end=none"]
    assert whet("train", recipe, f"run.dir={tmp_path / 'one'}", *options).code == 0
    under_torchrun(recipe, f"run.dir={tmp_path / 'two'}", *options)
    assert_equal(steps_of(tmp_path / "two"), steps_of(tmp_path / "one"), 1e-5, "loss")


@pytest.mark.slow
def test_a_run_of_one_process_is_continued_by_two(tiny_run: Path, recipe: str, tmp_path: Path, steps_of: Steps) -> None:
    folder = tmp_path / "run"
    shutil.copytree(tiny_run, folder)
    shutil.rmtree(folder / "checkpoints" / "step-000012")
    (folder / "status.json").unlink()
    under_torchrun(recipe, f"run.dir={folder}", "train.precision=fp64", "--resume")
    assert_equal(steps_of(folder), steps_of(tiny_run), 1e-9, "loss", "grad_norm", "conversations", "tokens")


@pytest.mark.parametrize(
    "options",
    [
        ["data.packing=none"],
        ["train.micro_rows=2"],
        ["train.micro_rows=4"],
        ["data.packing=none", "train.micro_rows=8"],
    ],
    ids=" ".join,
)
def test_packing_and_micro_batches_change_nothing_but_speed(
    whet: Any, tiny_run: Path, recipe: str, tmp_path: Path, steps_of: Steps, options: list[str]
) -> None:
    folder = tmp_path / "run"
    ended = whet(
        "train", recipe, f"run.dir={folder}", "train.precision=fp64", "eval.at_start=false", "export.at_end=none",
        *options,
    )  # fmt: skip
    assert ended.code == 0, ended.err
    assert_equal(steps_of(folder), steps_of(tiny_run), 1e-9, "loss", "grad_norm")


@pytest.mark.slow
def test_sixteen_conversations_a_step_are_the_same_packed_or_not(
    whet: Any, recipe: str, tmp_path: Path, steps_of: Steps
) -> None:
    options = ["train.precision=fp64", "train.batch.conversations=16", "export.at_end=none"]
    for packing in ("best-fit", "none"):
        ended = whet("train", recipe, f"run.dir={tmp_path / packing}", *options, f"data.packing={packing}")
        assert ended.code == 0, ended.err
    assert_equal(steps_of(tmp_path / "best-fit"), steps_of(tmp_path / "none"), 1e-9, "loss", "grad_norm")
    plans = [json.loads((tmp_path / packing / "plan.json").read_text()) for packing in ("best-fit", "none")]
    assert plans[0]["rows"] < plans[1]["rows"]


def test_the_resolved_config_repeats_the_run(
    whet: Any, tiny_run: Path, tmp_path: Path, exact_of: Callable[[Path], list[Any]], state_of: Any
) -> None:
    ended = whet("train", tiny_run / "config.yaml", f"run.dir={tmp_path / 'again'}", "export.at_end=none")
    assert ended.code == 0, ended.err
    assert exact_of(tmp_path / "again") == exact_of(tiny_run)
    trained = [entry for entry in exact_of(tiny_run) if "tokens" in entry]
    assert f"together {trained[-1]['tokens'] / len(trained):,.0f} tokens on average" in ended.err
    assert state_of(tmp_path / "again") == state_of(tiny_run)
