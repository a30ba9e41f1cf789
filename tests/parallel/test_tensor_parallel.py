"""Tensor parallelism: which plans are supported, and that losses and gradients are those of one process."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from whet.core.distributed import Ranks
from whet.core.errors import WhetError
from whet.model.loss.loss_model import LossModel
from whet.parallel.tensor_parallel import _forward_few_tokens, read_tensor_parallel_plan

Make = Callable[..., LossModel]


def test_the_plan_is_read_from_the_model(make_root: Make) -> None:
    model: Any = make_root("Qwen3", num_hidden_layers=1, head_dim=8).language_model
    plan = read_tensor_parallel_plan(model, 2)
    attention, mlp = "model.layers.0.self_attn", "model.layers.0.mlp"
    assert sorted(plan.colwise) == [
        f"{mlp}.gate_proj", f"{mlp}.up_proj", f"{attention}.k_proj", f"{attention}.q_proj", f"{attention}.v_proj",
    ]  # fmt: skip
    assert sorted(plan.rowwise) == [f"{mlp}.down_proj", f"{attention}.o_proj"]
    assert sorted(plan.all_reduced) == [f"{attention}.k_norm", f"{attention}.q_norm"]


def test_norms_of_heads_are_summed_where_a_plan_forgets_them(make_root: Make) -> None:
    model: Any = make_root("Qwen3", num_hidden_layers=1, head_dim=8).language_model
    model._tp_plan = {name: style for name, style in model._tp_plan.items() if "norm" not in name}
    assert sorted(read_tensor_parallel_plan(model, 2).all_reduced) == [
        f"model.layers.0.self_attn.{letter}_norm" for letter in "kq"
    ]


@pytest.mark.parametrize(
    ("architecture", "settings", "processes", "words"),
    [
        ("GPT2", {"n_embd": 32, "n_head": 4}, 2, "GPT2LMHeadModel has no tensor-parallel plan"),
        ("Mixtral", {}, 2, "plan has moe_tp_experts for model.layers.0.mlp.experts"),
        ("Olmo2", {}, 2, "plan has colwise_gather_output for model.layers.0.self_attn.q_proj"),
        ("Apertus", {}, 2, "model.layers.0.mlp.act_fn.alpha_p is between sharded layers and not in the model's plan"),
        ("Llama", {}, 3, "the model has 4 heads. Set it to a divisor of 4"),
        ("Llama", {}, 4, "the model has 2 key/value heads. Set it to a divisor of 2"),
        ("Llama", {"intermediate_size": 49}, 2, "model.layers.0.mlp.gate_proj is 49 wide. Set it to a divisor of 49"),
    ],
    ids=lambda value: str(value)[:12],
)
def test_unsupported_models_are_refused(
    make_root: Make, architecture: str, settings: dict[str, Any], processes: int, words: str
) -> None:
    root = make_root(architecture, **settings)
    with pytest.raises(WhetError) as refused:
        read_tensor_parallel_plan(root.language_model, processes)
    assert str(refused.value).startswith(f"parallel.tensor: {processes}, but ")
    assert words in str(refused.value)


def test_a_plan_that_shards_a_single_weight_is_refused(make_root: Make) -> None:
    """As transformers' plan for Granite with windows does of its attention's sinks."""
    model: Any = make_root("Llama", num_hidden_layers=1).language_model
    model.model.layers[0].self_attn.sinks = nn.Parameter(torch.zeros(4))
    model._tp_plan = model._tp_plan | {"model.layers.*.self_attn.sinks": "colwise"}
    with pytest.raises(WhetError, match="sinks is a weight, not a plain linear layer"):
        read_tensor_parallel_plan(model, 2)


@pytest.mark.parametrize(
    "error", [RuntimeError("[gloo/transport/tcp/pair.cc] Connection closed by peer"), torch.OutOfMemoryError("full")]
)
def test_peer_failures_and_out_of_memory_are_not_blamed_on_the_model(
    make_root: Make, monkeypatch: pytest.MonkeyPatch, error: RuntimeError
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise error

    root = make_root("Llama", num_hidden_layers=1)
    monkeypatch.setattr(root.language_model.base_model, "forward", fail)
    with pytest.raises(type(error)) as raised:
        _forward_few_tokens(root, 2)
    assert raised.value is error


def test_tensor_neighbours_have_the_same_rows_and_the_first_one_counts() -> None:
    ranks = [Ranks(rank, 8, torch.device("cpu"), tensor_size=2) for rank in range(8)]
    assert [each.data_rank for each in ranks] == [0, 0, 1, 1, 2, 2, 3, 3]
    assert {each.data_size for each in ranks} == {4}
    assert {each.context_rank for each in ranks} == {0}
    assert [each.is_tensor_main for each in ranks] == [True, False] * 4
    sliced = [Ranks(rank, 8, torch.device("cpu"), context_size=2, tensor_size=2) for rank in range(8)]
    assert [(each.data_rank, each.context_rank) for each in sliced[::2]] == [(0, 0), (0, 1), (1, 0), (1, 1)]


@pytest.mark.slow
def test_two_processes_compute_the_gradients_of_one_in_many_architectures(tmp_path: Path) -> None:
    """Biases, norms of single heads, windows, soft-caps, MLPs without a gate; compiled layers stay one graph."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [
        sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", str(port),
        str(Path(__file__).with_name("tensor_parallel_worker.py")), str(tmp_path),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300, env=dict(os.environ))
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "found.json").read_text())
    assert len(found["differs"]) > 10
    assert {
        family: worst for family, worst in found["differs"].items() if isinstance(worst, str) or worst > 1e-12
    } == {}
    assert found["graphs"][1] == found["graphs"][0] == 1
    assert found["all_reduces"] == 4, "once for queries, keys and values together"
    assert found["held"] == [0.5]
    assert found["kept_inputs"] == [], "memory that recomputation should free"
    assert "the model fails with a part of its heads" in found["refusal"]
