"""train.micro_rows: auto: what is chosen, that it changes no number, and what happens when memory runs out all the
same."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from simulated_card import AT_REST, PER_TOKEN, SimulatedCard

from several_processes import torchrun
from whet.config import read_config
from whet.core.errors import RunFailedError
from whet.run import assemble
from whet.run.lifecycle import run_training
from whet.run.memory_choice import bisect_largest, micro_row_sizes

ROW = 128
OPTIONS = (
    "train.precision=fp64", "train.steps=3", f"data.max_length={ROW}", "train.batch={conversations: 8}",
    "train.micro_rows=auto", "data.validation=null", "checkpoint.every=null",
)  # fmt: skip


def train(folder: Path, recipe: str, *options: str, resume: bool = False, until: int | None = None) -> dict[str, Any]:
    """A short run; returns its plan.json."""
    config = read_config(Path(recipe), [f"run.dir={folder}", *OPTIONS, *options, "track=[]", "export.at_end=none"])
    run_training(config, resume=resume, until=until)
    return dict(json.loads((folder / "plan.json").read_text()))


def steps(folder: Path) -> list[tuple[float, float]]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [(line["loss"], line["grad_norm"]) for line in lines if "loss" in line]


def weights(folder: Path) -> dict[str, bytes]:
    files = sorted((folder / "checkpoints" / "step-000003").rglob("*.distcp"))
    return {file.name: file.read_bytes() for file in files}


@given(rows=st.integers(1, 300), most=st.integers(1, 300))
def test_sizes_worth_trying_are_those_that_need_fewer_micro_batches(rows: int, most: int) -> None:
    sizes = micro_row_sizes(rows, most)
    every = range(1, min(rows, most) + 1)
    wanted = [size for size in every if size == 1 or -(-rows // size) < -(-rows // (size - 1))]
    assert sizes == wanted


@given(sizes=st.sets(st.integers(1, 99), min_size=1), limit=st.integers(0, 120))
def test_bisection_finds_the_largest_that_fits(sizes: set[int], limit: int) -> None:
    tried: list[int] = []
    found = bisect_largest(sorted(sizes), lambda size: tried.append(size) or size <= limit)  # type: ignore[func-returns-value]
    assert found == max((size for size in sizes if size <= limit), default=None)
    assert tried[0] == max(sizes)
    assert len(tried) == len(set(tried)) <= 2 + np.log2(len(sizes))


def test_the_largest_micro_batch_that_fits_is_used_and_cached(
    tmp_path: Path, recipe: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    plain = train(tmp_path / "plain", recipe)
    assert plain["micro_rows"] == 1  # a CPU has no memory of its own to fill
    assert plain["worst_batch_gib"] is None
    monkeypatch.setattr("whet.run.memory_choice.cache_dir", lambda: tmp_path / "cache")
    card = SimulatedCard(AT_REST + 3 * ROW * PER_TOKEN).install(monkeypatch)
    plan = train(tmp_path / "auto", recipe)
    assert 1 < plan["micro_rows"] < plan["rows"] / plan["steps"]
    assert (plan["recompute"], plan["offload"]) == ("none", "none")
    np.testing.assert_allclose(steps(tmp_path / "auto"), steps(tmp_path / "plain"), rtol=1e-9)
    assert max(card.passes) * PER_TOKEN + AT_REST > card.capacity  # it was found out, before step 1
    card.passes.clear()
    again = train(tmp_path / "again", recipe)
    assert again["worst_batch_gib"] == plan["worst_batch_gib"] == (max(card.passes) * PER_TOKEN + AT_REST) / 2**30
    assert max(card.passes) * PER_TOKEN + AT_REST <= card.capacity  # and is known now
    assert steps(tmp_path / "again") == steps(tmp_path / "auto")


def test_the_worst_batch_leaves_the_run_as_it_was(tmp_path: Path, recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Dropout and AdamW's lazy state included, to the last bit."""
    options = ("train.micro_rows=2", "adapter={rank: 4, dropout: 0.3}", "train.precision=fp32")
    train(tmp_path / "plain", recipe, *options)
    card = SimulatedCard(10**9).install(monkeypatch)
    train(tmp_path / "measured", recipe, *options)
    assert card.passes
    assert steps(tmp_path / "measured") == steps(tmp_path / "plain")
    assert weights(tmp_path / "measured") == weights(tmp_path / "plain") != {}


@pytest.mark.parametrize(
    ("share", "recompute", "offload"),
    [
        pytest.param(0.6, "full", "none", marks=pytest.mark.slow),
        (0.3, "full", "activations"),
    ],
)
def test_what_one_row_needs_to_fit_is_added(
    tmp_path: Path, recipe: str, monkeypatch: pytest.MonkeyPatch, share: float, recompute: str, offload: str
) -> None:
    monkeypatch.setattr("whet.run.memory_choice.cache_dir", lambda: tmp_path / "cache")
    SimulatedCard(AT_REST + int(share * ROW * PER_TOKEN)).install(monkeypatch)
    plan = train(tmp_path / "run", recipe, "train.steps=1")
    assert (plan["micro_rows"], plan["recompute"], plan["offload"]) == (1, recompute, offload)


def test_a_row_that_fits_in_no_way_is_an_error_before_step_1(
    tmp_path: Path, recipe: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    SimulatedCard(AT_REST).install(monkeypatch)
    with pytest.raises(RunFailedError, match="too little memory for one row"):
        train(tmp_path / "run", recipe)
    assert not (tmp_path / "run" / "metrics.jsonl").exists() or not steps(tmp_path / "run")


def test_out_of_memory_in_a_step_continues_in_smaller_micro_batches(
    tmp_path: Path, recipe: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    train(tmp_path / "plain", recipe, "train.micro_rows=4")
    card = SimulatedCard(10**9).install(monkeypatch)
    plan = train(tmp_path / "run", recipe, until=1)
    rows = plan["micro_rows"]
    done = len(card.passes)
    card.fails = lambda number: number == done + 1  # after the worst batch, in step 2
    plan = train(tmp_path / "run", recipe, resume=True)
    assert plan["micro_rows"] == -(-rows // 2) < rows
    np.testing.assert_allclose(steps(tmp_path / "run"), steps(tmp_path / "plain"), rtol=1e-9)
    [event] = [json.loads(line) for line in (tmp_path / "run" / "events.jsonl").read_text().splitlines()]
    assert (event["kind"], event["step"], event["micro_rows"]) == ("out-of-memory", 2, plan["micro_rows"])


def test_a_resumed_run_keeps_its_choice_on_the_same_card_only(
    tmp_path: Path, recipe: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("whet.run.memory_choice.cache_dir", lambda: tmp_path / "cache")
    card = SimulatedCard(AT_REST + 3 * ROW * PER_TOKEN).install(monkeypatch)
    small = train(tmp_path / "run", recipe, until=1)
    card.capacity = 10**9  # more is free now
    assert train(tmp_path / "run", recipe, resume=True, until=2)["micro_rows"] == small["micro_rows"]
    capsys.readouterr()
    monkeypatch.setattr("whet.run.memory_choice.device_name", lambda device: "another card")
    assert train(tmp_path / "run", recipe, resume=True)["micro_rows"] > small["micro_rows"]
    assert "is now on 1 × another card: its micro-batch is measured again" in capsys.readouterr().err.replace("\n", " ")


def test_rows_that_draw_random_numbers_stay_alone(tmp_path: Path, recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    SimulatedCard(10**9).install(monkeypatch)
    plan = train(tmp_path / "run", recipe, "adapter={rank: 4, dropout: 0.3}", "train.steps=1")
    assert plan["micro_rows"] == 1


@pytest.mark.parametrize("given", ["0", "-1", "many", "1.5", "true"])
def test_other_values_are_refused(whet: Callable[..., Any], recipe: str, given: str) -> None:
    ended = whet("train", recipe, f"train.micro_rows={given}")
    assert ended.code == 1
    assert "train.micro_rows" in ended.err
    assert "auto" in ended.err or "greater" in ended.err or "least" in ended.err


def test_memory_errors_of_other_kinds_are_not_swallowed(
    tmp_path: Path, recipe: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With one row in a micro-batch there is no smaller one: the advice says what to do."""
    card = SimulatedCard(10**9).install(monkeypatch)
    card.fails = lambda number: number == 2
    with pytest.raises(RunFailedError, match="the device has too little memory"):
        train(tmp_path / "run", recipe, "train.micro_rows=1", "train.batch={conversations: 2}")
    assert not torch.cuda.is_initialized()


WORKER = Path(__file__).parent / "out_of_memory_worker.py"


def test_all_processes_continue_as_the_one_that_ran_out_of_memory(tmp_path: Path, recipe: str) -> None:
    options = (*OPTIONS, "train.micro_rows=4", "track=[]", "export.at_end=none")
    train(tmp_path / "plain", recipe, "train.micro_rows=4")
    ended = torchrun(2, WORKER, recipe, f"run.dir={tmp_path / 'run'}", *options)
    assert ended.returncode == 0, ended.stderr
    np.testing.assert_allclose(steps(tmp_path / "run"), steps(tmp_path / "plain"), rtol=1e-9)
    [event] = [json.loads(line) for line in (tmp_path / "run" / "events.jsonl").read_text().splitlines()]
    assert (event["step"], event["micro_rows_before"], event["micro_rows"]) == (2, 4, 2)
    assert json.loads((tmp_path / "run" / "plan.json").read_text())["micro_rows"] == 2


@pytest.mark.slow
def test_a_shard_that_runs_out_of_memory_ends_the_run_for_all(tmp_path: Path, recipe: str) -> None:
    """The others wait in a collective inside the pass: they must not do so for ever."""
    options = (*OPTIONS, "train.micro_rows=4", "track=[]", "export.at_end=none", "parallel.shard=2")
    ended = torchrun(2, WORKER, recipe, f"run.dir={tmp_path / 'run'}", *options, timeout_s=100)
    assert ended.returncode != 0
    assert "the device has too little memory" in ended.stderr
    assert json.loads((tmp_path / "run" / "status.json").read_text())["exit_code"] == 3


@pytest.mark.slow
def test_an_optimizer_state_without_room_is_offloaded(
    tmp_path: Path, recipe: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """whet's own AdamW allocates it at once, before the worst batch runs."""
    train(tmp_path / "plain", recipe, "train.steps=2")
    SimulatedCard(10**9).install(monkeypatch)
    build = assemble.build_optimizer

    def limited(model: Any, config: Any, seed: int, offloaded: bool = False) -> Any:
        if not offloaded:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 GiB.")
        return build(model, config, seed, offloaded)

    monkeypatch.setattr(assemble, "build_optimizer", limited)
    plan = train(tmp_path / "run", recipe, "train.steps=2")
    assert (plan["offload"], plan["recompute"]) == ("optimizer", "none")
    np.testing.assert_allclose(steps(tmp_path / "run"), steps(tmp_path / "plain"), rtol=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("options", [(), ("parallel.shard=2",)], ids=["replicas", "shards"])
def test_processes_choose_together(
    tmp_path: Path, recipe: str, monkeypatch: pytest.MonkeyPatch, options: tuple[str, ...]
) -> None:
    """Shards try no size that is not predicted to fit: a rank that ran out of memory would leave the others waiting."""
    monkeypatch.setenv("SIMULATED_ROWS", "3")
    monkeypatch.setenv("WHET_CACHE", str(tmp_path / "cache"))
    options = (*OPTIONS, "track=[]", "export.at_end=none", "train.batch={conversations: 16}", *options)
    train(tmp_path / "plain", recipe, "train.batch={conversations: 16}")
    ended = torchrun(2, WORKER, recipe, f"run.dir={tmp_path / 'run'}", *options)
    assert ended.returncode == 0, ended.stderr
    assert json.loads((tmp_path / "run" / "plan.json").read_text())["micro_rows"] == 2
    np.testing.assert_allclose(steps(tmp_path / "run"), steps(tmp_path / "plain"), rtol=1e-9)
