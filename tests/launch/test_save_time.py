"""How long a checkpoint takes, compared with the limits of a Slurm job."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from whet.config import Config, read_config
from whet.core.errors import WhetError
from whet.launch.slurm import SaveTime, find_save_time, require_time_to_save, save_problems

Make = Callable[..., Config]


@pytest.fixture
def make(recipe: str, tmp_path: Path) -> Callable[..., Config]:
    def config(*options: str) -> Config:
        return read_config(Path(recipe), [f"run.dir={tmp_path / 'run'}", *options])

    return config


def write_manifest(run: Path, step: int, content: object) -> None:
    folder = run / f"checkpoints/step-{step:06d}"
    folder.mkdir(parents=True)
    (folder / "manifest.json").write_text(content if isinstance(content, str) else json.dumps(content))


def test_a_checkpoint_records_how_long_it_took(whole: Path) -> None:
    for manifest in whole.glob("checkpoints/step-*/manifest.json"):
        content = json.loads(manifest.read_text())
        assert content["save_s"] >= content["blocked_s"] >= 0


def test_the_slowest_of_the_runs_checkpoints_counts_and_damaged_ones_do_not(make: Make, tmp_path: Path) -> None:
    assert find_save_time(make()) is None  # a random model: nothing is known
    for step, content in enumerate([{"save_s": 40}, {"save_s": 95.5}, "{", [], {"save_s": "long"}, {"step": 3}]):
        write_manifest(tmp_path / "run", step, content)
    assert find_save_time(make()) == SaveTime(95.5, is_measured=True)


def test_an_estimate_grows_with_the_model_and_is_said_to_be_one(make: Make, tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    with (tmp_path / "model/model.safetensors").open("wb") as file:
        file.truncate(16 * 10**9)
    whole = find_save_time(make(f"model.path={tmp_path / 'model'}"))
    assert whole == SaveTime(pytest.approx(112), is_measured=False)
    assert "112 s (estimated from the model's size" in str(whole)
    assert find_save_time(make(f"model.path={tmp_path / 'model'}", "launch.nodes=4-8")) == SaveTime(28.0, False)
    adapter = find_save_time(make(f"model.path={tmp_path / 'model'}", "adapter.rank=8"))
    assert adapter == SaveTime(pytest.approx(1.6), is_measured=False)


def test_a_time_limit_shorter_than_a_checkpoint_is_refused(make: Make) -> None:
    config = make("launch.slurm.time=2:00")
    require_time_to_save(config, None)
    require_time_to_save(config, SaveTime(119, is_measured=True))
    with pytest.raises(WhetError, match=r"launch\.slurm\.time: 2:00 is 120 s, and a checkpoint takes 120 s .* Give mo"):
        require_time_to_save(config, SaveTime(120, is_measured=True))


def test_limits_that_leave_too_little_time_to_save_are_named(make: Make) -> None:
    config = make("launch.slurm.time=60")
    assert save_problems(config, None, 30) == save_problems(config, SaveTime(20, is_measured=True), 30) == []
    [kill_wait] = save_problems(config, SaveTime(31, is_measured=True), 30)
    assert "31 s (like the last ones of this run), and a job that is cancelled or preempted has 30 s" in kill_wait
    warning, _ = save_problems(config, SaveTime(250, is_measured=True), 30)
    assert "Slurm warns 300 s before the time limit" in warning
    assert warning.endswith("Set launch.slurm.warning=540")
