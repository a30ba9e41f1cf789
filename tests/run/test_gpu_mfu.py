"""On CUDA: a run knows what part of the card it uses."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from whet.model.peak_flops import device_peak_flops

pytestmark = pytest.mark.gpu


def test_mfu_is_flops_over_what_the_card_could_do(whet: Any, shipped_recipe: str, tmp_path: Path) -> None:
    ended = whet(
        "train", shipped_recipe, f"run.dir={tmp_path}", "train.steps=4", "export.at_end=none", "profile.steps=[3,3]",
        "profile.memory=true",
    )  # fmt: skip
    assert ended.code == 0, ended.err
    peak = device_peak_flops(torch.device("cuda", 0), "bf16")
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "loss" in line]
    if peak is None:
        assert {line["mfu"] for line in steps} == {None}
        return
    steady = [(before, line) for before, line in itertools.pairwise(steps) if line["tokens_per_s"] is not None]
    assert steady  # the others compiled kernels or captured graphs: they have no rates
    for before, line in steady:
        flops = line["flops"] - before["flops"]
        assert line["mfu"] == pytest.approx(flops / (line["step_s"] * peak), rel=1e-9)
        assert 0 < line["mfu"] < 1
    assert (tmp_path / "profile/rank-0.memory.pickle").stat().st_size > 0
