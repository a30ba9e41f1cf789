"""Runs whose experts are distributed over processes: equal to one process, continued and exported by any mesh."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from test_sharded_runs import assert_equal, together

from several_processes import on_gpu
from tiny_architectures import save_tiny_model

Steps = Callable[[Path], list[dict[str, Any]]]
SHORT = [
    "train.precision=fp64", "train.steps=8", "checkpoint.every=2", "eval.tasks=[orders]", "eval.examples=2",
    "data.packing=none", "train.micro_rows=1",
]  # fmt: skip
WAYS = {
    "all weights": ["train.router_aux_loss=0.1"],
    "adapter": ["adapter={rank: 4}", "train.optimizer.lr=2e-2"],
}


@pytest.fixture(scope="module", params=["qwen3_moe", "gpt_oss"])
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    """`model.path=FOLDER`; the experts of gpt-oss have biases and transposed weights."""
    return save_tiny_model(request.param, tmp_path_factory.mktemp(request.param))


@pytest.mark.slow
@pytest.mark.parametrize("how", WAYS)
@pytest.mark.parametrize("several", [4, on_gpu(4)])
def test_one_run_by_two_by_four_in_three_ways_and_by_one(
    whet: Any, recipe: str, family: str, how: str, several: int, tmp_path: Path, steps_of: Steps
) -> None:
    """Each process reads its own experts, from the files and from checkpoints that others wrote."""
    options = (recipe, family, *SHORT, *WAYS[how], "export.at_end=merged", "--resume")
    one, many = tmp_path / "one", tmp_path / "many"
    ended = whet("train", *options, f"run.dir={one}")
    assert ended.code == 0, ended.err
    for processes, until, mesh in (
        (2, 2, ["parallel.expert=2"]),
        (several, 3, ["parallel.expert=4"]),
        (several, 4, ["parallel.expert=2", "parallel.shard=2", "parallel.recompute=full"]),
        (several, 6, ["parallel.expert=2", "parallel.replicate=2"]),
        (2, 7, ["parallel.shard=2"]),
    ):
        done = together(processes, *options, f"run.dir={many}", "--until", until, *mesh)
        assert done.returncode == 0, done.stderr
    done = together(2, *options, f"run.dir={many}", "parallel.expert=2")  # evaluates and exports, too
    assert done.returncode == 0, done.stderr
    assert_equal(steps_of(many), steps_of(one))
    ours, theirs = (
        [line for line in map(json.loads, (run / "metrics.jsonl").open()) if "val_loss" in line] for run in (many, one)
    )
    for key in ("val_loss", "task/orders"):
        assert ours[-1][key] == pytest.approx(theirs[-1][key], rel=1e-9)
    assert json.loads((many / "exports" / "merged" / "certificate.json").read_text())["verified"]
    found, wanted = (load_file(run / "exports" / "merged" / "model.safetensors") for run in (many, one))
    assert found.keys() == wanted.keys()
    for name, weight in wanted.items():
        torch.testing.assert_close(found[name], weight, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["parallel.expert=3"], "parallel.expert: 3, but the model has 4 experts in a layer. Set it to a divisor of 4"),
        (["parallel.expert=2", "adapter.rank=4", "quantize=nf4", "train.precision=fp32"], "combined with quantize: "),
        (["parallel.expert=2", "parallel.context=2"], "2 cannot be combined with parallel.context: "),
        (["parallel.expert=2", "parallel.tensor=2"], "2 cannot be combined with parallel.tensor: "),
        (["parallel.expert=2", "train.optimizer.name=adamw8bit"], "2 cannot be combined with train.optimizer.name: "),
        (["parallel.expert=2"], "parallel.expert=2 does not fit 1 process"),
        (["parallel.expert=2", "model.path=builtin:tiny"], "2, but LlamaForCausalLM has no experts"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_does_not_go_together_is_refused(
    whet: Any, recipe: str, mixtral: str, tmp_path: Path, options: list[str], words: str
) -> None:
    given = ["train.precision=fp64", f"data.store={tmp_path / 'store'}"]
    result = whet("train", recipe, f"run.dir={tmp_path / 'run'}", mixtral, *given, *options)
    assert result.code == 1
    assert "Traceback" not in result.err
    assert "parallel.expert" in result.err
    assert words in result.err
    assert not (tmp_path / "run").exists()
    assert not (tmp_path / "store").exists()


@pytest.fixture(scope="module")
def mixtral(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tiny_model("mixtral", tmp_path_factory.mktemp("mixtral"))
