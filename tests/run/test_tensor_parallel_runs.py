"""Runs whose layers are computed by several processes together: equal to one process, continued by any arrangement."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from test_sharded_runs import assert_equal, together

from several_processes import RECIPE, on_gpu
from whet.model.load.builtin_models import builtin_folder

Steps = Callable[[Path], list[dict[str, Any]]]


@pytest.fixture(scope="module")
def recipe() -> str:
    return RECIPE


def measured(folder: Path) -> list[dict[str, Any]]:
    return [line for line in map(json.loads, (folder / "metrics.jsonl").open()) if "val_loss" in line]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("processes", "mesh"),
    [(2, []), on_gpu(2, []), on_gpu(4, ["parallel.shard=2"]), on_gpu(4, ["parallel.replicate=2"])],
)
def test_a_run_becomes_tensor_parallel_in_the_middle(
    whet: Any, tiny_run: Path, recipe: str, tmp_path: Path, steps_of: Steps, processes: int, mesh: list[str]
) -> None:
    folder = tmp_path / "run"
    options = (recipe, f"run.dir={folder}", "train.precision=fp64", "export.at_end=merged", "--resume")
    assert whet("train", *options, "--until", "4").code == 0
    tasks = ("eval.tasks=[orders]", "eval.examples=2")
    done = together(processes, *options, "parallel.tensor=2", *mesh, *tasks, "--until", "8")
    assert done.returncode == 0, done.stderr
    assert whet("train", *options).code == 0
    assert_equal(steps_of(folder), steps_of(tiny_run))
    ours, theirs = measured(folder), measured(tiny_run)
    assert ours[-1]["val_loss"] == pytest.approx(theirs[-1]["val_loss"], rel=1e-9)
    assert json.loads((folder / "exports" / "merged" / "certificate.json").read_text())["verified"]


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model with norms of heads and a head of its own, whose heads divide by four."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    folder = tmp_path_factory.mktemp("models") / "qwen3"
    shutil.copytree(builtin_folder("builtin:tiny"), folder)
    shape = Qwen3Config(
        vocab_size=512, hidden_size=48, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=4, head_dim=8, max_position_embeddings=1024, tie_word_embeddings=False,
    )  # fmt: skip
    torch.manual_seed(0)
    Qwen3ForCausalLM(shape).save_pretrained(folder)
    return folder


@pytest.mark.slow
def test_one_run_by_two_by_four_in_three_ways_and_by_one(
    whet: Any, recipe: str, qwen3: Path, tmp_path: Path, steps_of: Steps
) -> None:
    """Each reads its own rows and columns from the files, and of checkpoints that others wrote."""
    options = (
        recipe,
        f"model.path={qwen3}",
        "train.precision=fp64",
        "train.optimizer.name=muon",
        "export.at_end=merged",
        "--resume",
    )
    assert whet("train", *options, f"run.dir={tmp_path / 'one'}").code == 0
    folder = tmp_path / "many"
    for processes, until, mesh in (
        (2, 2, ["parallel.tensor=2"]),
        (4, 4, ["parallel.tensor=4"]),
        (4, 6, ["parallel.tensor=2", "parallel.shard=2", "train.micro_rows=2"]),
        (4, 8, ["parallel.tensor=2", "parallel.replicate=2"]),
    ):
        done = together(processes, *options, f"run.dir={folder}", "--until", until, *mesh)
        assert done.returncode == 0, done.stderr
    assert whet("train", *options, f"run.dir={folder}", "--until", "10").code == 0
    done = together(2, *options, f"run.dir={folder}", "parallel.tensor=2", "parallel.recompute=full")
    assert done.returncode == 0, done.stderr
    assert_equal(steps_of(folder), steps_of(tmp_path / "one"))
    assert measured(folder)[-1]["val_loss"] == pytest.approx(measured(tmp_path / "one")[-1]["val_loss"], rel=1e-9)
    assert json.loads((folder / "exports" / "merged" / "certificate.json").read_text())["verified"]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["adapter.rank=4"], "2 cannot be combined with adapter: "),
        (["adapter.rank=4", "quantize=nf4"], "2 cannot be combined with quantize: "),
        (["train.precision=fp8"], "2 cannot be combined with train.precision: "),
        (["parallel.context=2"], "2 cannot be combined with parallel.context: "),
        (["train.optimizer.name=adamw8bit"], "2 cannot be combined with train.optimizer.name: "),
        (["model.path=random:smollm-135m", "model.tokenizer=builtin:tiny"], "2, but the model has 9 heads"),
        ([], "parallel.tensor=2 does not fit 1 process"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_does_not_go_together_is_refused(
    whet: Any, recipe: str, tmp_path: Path, options: list[str], words: str
) -> None:
    result = whet("train", recipe, f"run.dir={tmp_path / 'run'}", "parallel.tensor=2", *options)
    assert result.code == 1
    assert "Traceback" not in result.err
    assert "parallel.tensor" in result.err
    assert words in result.err
    assert not (tmp_path / "run").exists()


def test_a_model_without_a_tensor_parallel_plan_is_refused_before_any_data_is_prepared(
    whet: Any, recipe: str, tmp_path: Path
) -> None:
    result = whet(
        "train", recipe, f"run.dir={tmp_path / 'run'}", f"data.store={tmp_path / 'store'}", "parallel.tensor=4"
    )
    assert result.code == 1
    assert "parallel.tensor: 4, but the model has 2 key/value heads" in result.err
    assert not (tmp_path / "store").exists()


@pytest.mark.parametrize(("processes", "level"), [(2, "ok"), (4, "fault")])
def test_check_reports_whether_a_model_can_be_tensor_parallel(
    whet: Any, recipe: str, processes: int, level: str
) -> None:
    result = whet("check", recipe, f"parallel.tensor={processes}", "--json")
    [found] = [each for each in json.loads(result.out)["checks"] if each["check"] == "tensor"]
    assert found["level"] == level
    assert result.code == (0 if level == "ok" else 1)
