"""Every optimizer in a whole run: stopped in the middle, it goes on bit for bit; every schedule arrives."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Lines = Callable[[Path], list[dict[str, Any]]]
SHORT = ("export.at_end=none", "eval.at_start=false")
BF16 = ("model.dtype=bf16", "train.precision=bf16")


@pytest.fixture(scope="module")
def fp32(shared_run: Callable[..., Path], steps_of: Lines) -> list[float]:
    """The losses of AdamW in fp32."""
    return [line["loss"] for line in steps_of(shared_run("fp32-short", "train.steps=6", *SHORT))]


@pytest.mark.parametrize(
    ("options", "bound"),
    [
        (("adamw", *BF16), 0.02), (("adamw16bit",), 0.002), (("adamw8bit",), 0.01),
        (("muon",), 0.2), (("muon", "adapter.rank=4"), None),
        (("muon", "train.optimizer.flavour=nanochat", "train.optimizer.scalar_lr=0.01"), None),
    ],
    ids=["bf16 weights", "16 bits", "8 bits", "muon", "muon, adapters", "nanochat's muon"],
)  # fmt: skip
def test_a_run_continues_bit_for_bit_and_learns_like_fp32(
    options: tuple[str, ...], bound: float | None, whet: Any, recipe: str,
    tmp_path: Path, fp32: list[float], exact_of: Lines, steps_of: Lines, state_of: Any,
) -> None:  # fmt: skip
    name, *more = options
    arguments = ["train", recipe, "train.steps=6", "checkpoint.every=3", "eval.at_start=false"]
    arguments += [f"train.optimizer.name={name}", *more]
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    ended = whet(*arguments, f"run.dir={whole}")
    assert ended.code == 0, ended.err
    shutil.copytree(whole, stopped)
    shutil.rmtree(stopped / "checkpoints/step-000006")
    status = json.loads((stopped / "status.json").read_text())
    (stopped / "status.json").write_text(json.dumps({**status, "state": "running", "exit_code": None}))
    ended = whet(*arguments, f"run.dir={stopped}", "--resume")
    assert ended.code == 0, ended.err
    assert "continuing after step 3" in ended.err
    assert exact_of(stopped) == exact_of(whole)
    assert state_of(stopped) == state_of(whole)
    losses = [line["loss"] for line in steps_of(whole)]
    assert losses[-1] < losses[0]
    if bound is not None:
        assert losses == pytest.approx(fp32, rel=bound)


def test_rates_by_group_and_momentum_are_in_the_metrics(
    whet: Any, recipe: str, tmp_path: Path, steps_of: Lines
) -> None:
    ended = whet(
        "train", recipe, f"run.dir={tmp_path / 'run'}", "train.steps=3", "train.optimizer.name=muon",
        "train.optimizer.lr=1e-3", "train.optimizer.embedding_lr=1e-2", "train.optimizer.momentum_warmup=2",
        "train.schedule={name: linear, warmup: 0}", *SHORT,
    )  # fmt: skip
    assert ended.code == 0, ended.err
    lines = steps_of(tmp_path / "run")
    assert [line["lr"] for line in lines] == pytest.approx([1e-3, 2e-3 / 3, 1e-3 / 3])
    assert [line["lr/embedding"] for line in lines] == pytest.approx([1e-2, 2e-2 / 3, 1e-2 / 3])
    assert [line["momentum"] for line in lines] == pytest.approx([0.85, 0.9, 0.95])


def test_a_rate_for_a_head_that_is_tied_ends_with_a_reason(whet: Any, recipe: str, tmp_path: Path) -> None:
    ended = whet("train", recipe, f"run.dir={tmp_path / 'run'}", "train.optimizer.head_lr=1e-3")
    assert ended.code == 1
    assert "train.optimizer.head_lr" in ended.err


@pytest.mark.parametrize("by", ["epoch", "conversation", "token"])
def test_a_schedule_counts_what_the_run_has_seen(
    by: str, whet: Any, recipe: str, tmp_path: Path, steps_of: Lines
) -> None:
    """Packed by tokens, steps cover different numbers of conversations; the rate follows what was seen before them."""
    ended = whet(
        "train", recipe, f"run.dir={tmp_path / 'run'}", "train.epochs=0.6", "train.batch={tokens: 2048}",
        f"train.schedule={{name: linear, warmup: 0, by: {by}}}", "train.optimizer.lr=1", "train.optimizer.eps=1e30",
        *SHORT,
    )  # fmt: skip
    assert ended.code == 0, ended.err
    lines = steps_of(tmp_path / "run")
    key = {"epoch": "epoch", "conversation": "conversations", "token": "tokens"}[by]
    seen = [0, *(line[key] for line in lines)]
    assert [line["lr"] for line in lines] == pytest.approx([1 - place / seen[-1] for place in seen[:-1]])
    even = [1 - step / len(lines) for step in range(len(lines))]
    assert [line["lr"] for line in lines] != pytest.approx(even, abs=1e-4), "or by step would do as well"


def test_by_conversation_packing_changes_nothing(
    whet: Any, shipped_recipe: str, tmp_path: Path, steps_of: Lines
) -> None:
    rates = []
    for packing in ("best-fit", "none"):
        folder = tmp_path / packing
        ended = whet(
            "train", shipped_recipe, f"run.dir={folder}", "train.epochs=0.27", f"data.packing={packing}", *SHORT,
            "train.schedule={name: cosine, warmup: 12, by: conversation}",
        )  # fmt: skip
        assert ended.code == 0, ended.err
        rates.append([line["lr"] for line in steps_of(folder)])
    assert rates[0] == rates[1]
    assert rates[0][0] == pytest.approx(3e-3 * 8 / 12)
