"""Batch arithmetic: new runs whose steps have too few rows are refused, and what the message proposes fits."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from several_processes import RECIPE, torchrun
from whet.config import Config, read_config
from whet.core.distributed import Ranks
from whet.core.errors import WhetError
from whet.preflight.run_checks import check_batch
from whet.run.assemble import check_rows
from whet.run.data import RunData, make_plan, prepare_data
from whet.run.step_rows import StepLayout, find_shortage, require_rows, step_layout, typical_rows
from whet.run.trial import smoke_config

SEED = ("launch.nodes=192", "launch.gpus=8", "train.micro_rows=3", "train.batch={rows: 192}")
"""The batch of the LUMI seed: 192 rows for 1,536 GCDs with three rows each."""


@pytest.fixture(scope="module")
def recipe() -> str:
    return RECIPE


def rows_of_ranks(rows: int, processes: int, context: int, tensor: int) -> dict[int, int]:
    """How many rows each data-parallel rank gets: deals them one by one."""
    ranks = [Ranks(rank, processes, torch.device("cpu"), context, tensor).data_rank for rank in range(processes)]
    dealt = dict.fromkeys(ranks, 0)
    for row in range(rows):
        dealt[row % len(dealt)] += 1
    return dealt


layouts = st.builds(
    lambda nodes, devices, context, tensor, shard, **rest: StepLayout(
        nodes=nodes, devices=devices * context * tensor * shard, model_parallel=context * tensor, shard=shard, **rest
    ),
    rows=st.integers(1, 200), micro_rows=st.integers(1, 5), nodes=st.integers(1, 9), devices=st.integers(1, 4),
    context=st.integers(1, 3), tensor=st.integers(1, 2), shard=st.integers(1, 2),
)  # fmt: skip


@given(layouts)
@example(StepLayout(rows=192, micro_rows=3, nodes=192, devices=8))
def test_a_layout_fits_if_every_rank_gets_its_rows(layout: StepLayout) -> None:
    dealt = rows_of_ranks(layout.rows, layout.nodes * layout.devices, layout.model_parallel, 1)
    assert layout.ranks == len(dealt)
    assert layout.needed == len(dealt) * layout.micro_rows
    assert layout.fits == (len(dealt) == 1 or min(dealt.values()) >= layout.micro_rows)


def config_of(recipe: str, *overrides: str) -> Config:
    return read_config(Path(recipe), overrides)


def proposals(message: str) -> list[list[str]]:
    """The overrides that a message proposes, each a list of settings to paste."""
    return [shlex.split(text.split(" (torchrun")[0]) for text in message.rpartition(". Set ")[2].split(", or ")]


def fits(config: Config) -> bool:
    devices = config.launch.gpus or config.launch.processes or 1
    rows = config.rows_per_step or config.train.batch.conversations or 0
    layout = step_layout(config, rows, config.launch.node_range()[1], devices)
    size = config.parallel.context * config.parallel.tensor * (config.parallel.shard or 1)
    assert layout.nodes * layout.devices == (config.parallel.replicate or layout.nodes * devices // size) * size
    dealt = rows_of_ranks(rows, layout.nodes * devices, config.parallel.context, config.parallel.tensor)
    return len(dealt) == 1 or min(dealt.values()) >= config.train.micro_rows


@settings(max_examples=40)
@given(
    unit=st.sampled_from(["rows", "tokens", "conversations"]), size=st.integers(1, 60), micro_rows=st.integers(1, 4),
    nodes=st.integers(1, 6), least=st.integers(1, 6), devices=st.integers(1, 4), context=st.integers(1, 3),
    shard=st.sampled_from([None, 1, 2]), key=st.sampled_from(["gpus", "processes"]), replicated=st.booleans(),
)  # fmt: skip
def test_what_is_refused_and_proposed_is_counted_out(
    recipe: str, unit: str, size: int, micro_rows: int, nodes: int, least: int, devices: int, context: int,
    shard: int | None, key: str, replicated: bool,
) -> None:  # fmt: skip
    """A run is refused exactly if some rank gets too few rows, and every proposal, pasted, is accepted."""
    devices *= context * (shard or 1)
    options = [
        f"train.batch={{{unit}: {size * 256 if unit == 'tokens' else size}}}", f"train.micro_rows={micro_rows}",
        f"launch.nodes={least}-{nodes}" if least < nodes else f"launch.nodes={nodes}", f"launch.{key}={devices}",
        f"parallel.context={context}",
    ]  # fmt: skip
    options += [f"parallel.shard={shard}"] if shard else []
    if replicated:
        options.append(f"parallel.replicate={nodes * devices // (context * (shard or 1))}")
    config = config_of(recipe, *options)
    if fits(config):
        require_rows(config, nodes, devices)
        return
    with pytest.raises(WhetError) as refused:
        require_rows(config, nodes, devices)
    found = [config_of(recipe, *options, *pasted) for pasted in proposals(str(refused.value))]
    assert found
    for proposed in found:
        assert fits(proposed), refused.value
        launch = proposed.launch
        require_rows(proposed, launch.node_range()[1], launch.gpus or launch.processes or 1)


@pytest.fixture(scope="module")
def data(recipe: str) -> RunData:
    return prepare_data(config_of(recipe))


def test_the_seed_of_lumi_is_refused_with_its_arithmetic(whet: Any, recipe: str, tmp_path: Path) -> None:
    ended = whet("launch", recipe, "--on", "slurm", f"run.dir={tmp_path / 'run'}", *SEED)
    assert ended.code == 1
    assert " ".join(ended.err.split()) == (
        "error: train.batch.rows: a step has 192 rows, fewer than 4,608: 192 nodes × 8 devices = 1,536 data-parallel "
        "ranks, with 3 rows each (train.micro_rows), so 1,344 of 1,536 would have none. Set train.batch.rows=4608, or "
        "launch.nodes=8, or train.micro_rows=1 launch.nodes=24"
    )
    assert not (tmp_path / "run").exists()
    ended = whet("launch", recipe, "--dry-run", "--on", "slurm", *SEED, "parallel.tensor=8")
    assert "192 nodes × 8 devices ÷ 8 (parallel.tensor) = 192 data-parallel ranks, with 3 rows each" in ended.err
    assert "so they would have 1 on average. Set train.batch.rows=576, or train.micro_rows=1, or launch" in ended.err
    assert (
        whet("launch", recipe, "--dry-run", "--on", "slurm", *SEED, "parallel.tensor=8", "train.micro_rows=1").code == 0
    )


def test_a_mesh_that_does_not_fit_is_refused_before_the_queue(whet: Any, recipe: str, data: RunData) -> None:
    options = ("launch.nodes=2", "launch.gpus=8", "parallel.shard=64")
    ended = whet("launch", recipe, "--on", "slurm", "--dry-run", *options)
    assert ended.code == 1
    assert "parallel.shard=64 does not fit 16 processes" in ended.err
    [found] = check_batch(config_of(recipe, *options), data, unpacked=False)
    assert found.level == "fault"
    assert whet("launch", recipe, "--on", "slurm", "--dry-run", "parallel.shard=64").code == 0, "the nodes know"


def test_a_local_launch_is_refused_before_a_process_starts(whet: Any, recipe: str, tmp_path: Path) -> None:
    ended = whet("launch", recipe, "launch.processes=6", f"run.dir={tmp_path / 'run'}")
    assert ended.code == 1
    assert "a step of 4 has at most 4 rows, fewer than 6: 6 devices = 6 data-parallel ranks" in ended.err
    assert "Set train.batch.conversations=6 data.packing=none, or launch.processes=4" in ended.err
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.yaml").touch()
    ended = whet("launch", recipe, "launch.processes=6", f"run.dir={tmp_path / 'run'}", "--resume", "--dry-run")
    assert ended.code == 0, "a run that exists keeps its steps on any number of processes"


def test_packed_conversations_are_counted_in_their_rows(recipe: str, data: RunData) -> None:
    """The proposed number of conversations fills the rows as they are packed."""
    config = config_of(recipe, "train.micro_rows=2")

    def rows_of(count: int) -> int:
        return typical_rows(make_plan(config_of(recipe, f"train.batch={{conversations: {count}}}"), data))

    message = find_shortage(config, data, make_plan(config, data), 1, 3, unpacked=False)
    assert message is not None
    assert "train.batch.conversations: a step of 4 has 2 rows, fewer than 6" in message
    [(key, count)] = [each[0].split("=") for each in proposals(message) if "conversations" in each[0]]
    assert key == "train.batch.conversations"
    assert rows_of(int(count)) >= 6 > rows_of(int(count) // 2)


def test_data_that_fills_no_such_step_gets_no_larger_batch(recipe: str, data: RunData) -> None:
    config = config_of(recipe, "train.batch={rows: 500}", "train.steps=null", "train.epochs=1", "launch.processes=200")
    message = find_shortage(config, data, make_plan(config, data), 1, 200, unpacked=False)
    assert message is not None
    assert "a step has 500 rows, but the data fills only " in message
    assert [key for [key] in proposals(message)] == [f"launch.processes={typical_rows(make_plan(config, data))}"]


def test_conversations_of_models_that_cannot_be_packed_are_rows(recipe: str, data: RunData) -> None:
    config = config_of(recipe, "train.micro_rows=2")
    plan = make_plan(config, data).unpacked(data.train.store.lengths)
    assert find_shortage(config, data, plan, 1, 4, unpacked=True) is None
    message = find_shortage(config, data, plan, 1, 5, unpacked=True)
    assert message is not None
    assert proposals(message) == [["train.batch.conversations=5"], ["launch.gpus=4"]]


@pytest.mark.parametrize(
    ("options", "level", "words"),
    [
        (["launch.processes=2"], "ok", "a step has 2 rows for 2 data-parallel ranks, 1 each"),
        (["launch.processes=4"], "fault", "a step of 4 has 2 rows, fewer than 4: 4 devices = 4 data-parallel ranks"),
        (["launch.processes=4", "parallel.context=2"], "ok", "2 rows for 2 data-parallel ranks"),
        (["launch.processes=4", "data.packing=none"], "ok", "4 rows for 4 data-parallel ranks"),
        (["launch.nodes=1-4"], "fault", "4 nodes × 1 device = 4 data-parallel ranks"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_check_counts_the_rows_of_a_step(
    recipe: str, data: RunData, options: list[str], level: str, words: str
) -> None:
    [found] = check_batch(config_of(recipe, *options), data, unpacked=False)
    assert (found.check, found.level) == ("batch", level)
    assert words in found.text


def test_check_has_nothing_to_say_of_one_process(recipe: str, data: RunData, monkeypatch: pytest.MonkeyPatch) -> None:
    assert list(check_batch(config_of(recipe, "train.micro_rows=9"), data, unpacked=False)) == []
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 8)
    [found] = check_batch(config_of(recipe), data, unpacked=False)
    assert found.level == "warning"
    assert found.text.endswith("launch.gpus=2. `whet train` uses one device")
    [found] = check_batch(config_of(recipe, "launch.gpus=9"), None, unpacked=False)
    assert found.level == "fault"


def test_check_refuses_what_has_too_few_rows(whet: Any, recipe: str) -> None:
    result = whet("check", recipe, "--json", "launch.processes=4")
    [found] = [each for each in json.loads(result.out)["checks"] if each["level"] == "fault"]
    assert (found["check"], result.code) == ("batch", 1)


def test_training_refuses_a_new_run_and_warns_of_a_resumed_one(
    whet: Any, recipe: str, data: RunData, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.setenv(name, "5")
    ended = whet("train", recipe, f"run.dir={tmp_path / 'run'}")  # by the configuration alone, before data is prepared
    assert ended.code == 1
    assert "a step of 4 has at most 4 rows, fewer than 5" in ended.err
    for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.setenv(name, "3")
    config = config_of(recipe)
    plan = make_plan(config, data)
    with pytest.raises(WhetError, match=r"2 rows, fewer than 3.*launch.gpus=2 \(torchrun: --nproc-per-node 2\)$"):
        check_rows(config, data, plan, unpacked=False, is_new=True)
    check_rows(config, data, plan, unpacked=False, is_new=False)
    warning = " ".join(capsys.readouterr().err.split())
    assert "warning: train.batch.conversations: a step of 4 has 2 rows, fewer than 3" in warning
    assert "Set launch.gpus=2 (torchrun: --nproc-per-node 2). Until then the run continues" in warning


@pytest.mark.slow
def test_three_processes_refuse_a_new_run_of_two_rows_and_continue_an_old_one(
    whet: Any, recipe: str, tmp_path: Path, steps_of: Any, tiny_run: Path
) -> None:
    options = (recipe, f"run.dir={tmp_path / 'run'}", "train.precision=fp64")
    refused = torchrun(3, "-m", "whet", "train", *options)
    assert refused.returncode != 0
    assert "error: train.batch.conversations: a step of 4 has 2 rows, fewer than 3" in refused.stderr
    assert not (tmp_path / "run").exists()
    assert whet("train", *options, "--until", "2").code == 0
    resumed = torchrun(3, "-m", "whet", "train", *options, "--resume", "--until", "4")
    assert resumed.returncode == 0, resumed.stderr
    assert resumed.stderr.count("warning: train.batch.conversations: a step of 4 has 2 rows, fewer than 3") == 1
    assert [line["loss"] for line in steps_of(tmp_path / "run")] == pytest.approx(
        [line["loss"] for line in steps_of(tiny_run)[:4]], rel=1e-9
    )


@pytest.mark.parametrize("batch", ["rows: 64", "tokens: 16384", "conversations: 64"])
def test_a_smoke_test_of_several_processes_has_rows_for_each(
    recipe: str, batch: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_of(recipe, f"train.batch={{{batch}}}", "train.micro_rows=3")
    monkeypatch.setenv("WORLD_SIZE", "8")
    require_rows(smoke_config(config), 1, 8)
