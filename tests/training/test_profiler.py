"""What a profiler writes, and when."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from whet.core.distributed import Ranks
from whet.core.errors import WhetError
from whet.training.config import ProfileConfig
from whet.training.profiler import Profiler, make_profiler

ALONE = Ranks(0, 1, torch.device("cpu"))


def run(config: ProfileConfig | None, folder: Path, steps: range, ranks: Ranks = ALONE) -> Profiler:
    """Steps that multiply matrices as wide as their number."""
    profiler = make_profiler(config, folder, ranks, 9, lambda: "flops")
    for step in steps:
        with profiler.step(step):
            torch.ones(step, step) @ torch.ones(step, step)
    return profiler


def events(folder: Path, rank: int = 0) -> list[dict[str, Any]]:
    return json.loads(gzip.decompress((folder / f"profile/rank-{rank}.trace.json.gz").read_bytes()))["traceEvents"]


def widths(folder: Path) -> list[int]:
    return [event["args"]["Input Dims"][0][0] for event in events(folder) if event.get("name") == "aten::mm"]


def test_these_steps_are_seen_and_no_others(tmp_path: Path) -> None:
    run(ProfileConfig(steps=(3, 5), shapes=True), tmp_path, range(1, 10))
    assert widths(tmp_path) == [3, 4, 5]
    assert (tmp_path / "profile/flops.txt").read_text() == "flops"


def test_a_run_that_begins_or_ends_between_them_leaves_what_was_seen(tmp_path: Path) -> None:
    profiler = run(ProfileConfig(steps=(3, 5), shapes=True), tmp_path, range(4, 5))
    assert not (tmp_path / "profile").exists()
    profiler.close()
    assert widths(tmp_path) == [4]


@pytest.mark.parametrize("stack", [False, True])
def test_stacks_are_there_on_request(tmp_path: Path, stack: bool) -> None:
    run(ProfileConfig(steps=(1, 1), stack=stack), tmp_path, range(1, 2))
    assert any(event.get("cat") == "python_function" for event in events(tmp_path)) == stack


def test_it_comes_before_its_first_step_and_after_its_last(tmp_path: Path) -> None:
    on = make_profiler(ProfileConfig(steps=[3, 5]), tmp_path, ALONE, 9, lambda: "flops")
    assert [step for step in range(1, 10) if on.starts_or_stops_after(step)] == [2, 5]
    off = make_profiler(None, tmp_path, ALONE, 9, lambda: "flops")
    assert not any(off.starts_or_stops_after(step) for step in range(1, 10))


def test_only_the_named_ranks_are_watched(tmp_path: Path) -> None:
    config = ProfileConfig(steps=(1, 1), ranks=[1])
    for rank in range(2):
        run(config, tmp_path, range(1, 3), Ranks(rank, 2, torch.device("cpu")))
    found = {path.name for path in (tmp_path / "profile").iterdir()}
    assert found == {"rank-1.trace.json.gz", "rank-1.table.txt", "flops.txt"}


def test_off_leaves_nothing_and_steps_beyond_the_run_are_an_error(tmp_path: Path) -> None:
    run(None, tmp_path, range(1, 3)).close()
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(WhetError, match=r"profile\.steps: \[9, 10\], but the run has 9 steps"):
        run(ProfileConfig(steps=(9, 10)), tmp_path, range(1))
