"""FLOPs of a step against torch's FlopCounterMode and a count of pairs."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode

from examples import examples
from tiny_architectures import tiny_model
from whet.model import attention
from whet.model.config import AdapterConfig
from whet.model.flops import AttentionCost, StepFlops, count_step_flops, flops_table, matrix_costs
from whet.model.lora.peft_adapters import add_adapter, unwrap_peft
from whet.model.loss.loss_model import LossModel

LENGTHS = (30, 11)


def full_pairs(work: StepFlops) -> int:
    """What the reference attention computes beyond pairs that see each other: it multiplies all of them."""
    tokens = np.array(LENGTHS)
    more = sum(LENGTHS) ** 2 - AttentionCost(None, 0, 0).pairs(tokens)
    return sum((span.forward_flops_per_pair + span.backward_flops_per_pair) * more for span in work.attention)


def counted(model: Any, pack: Any, make_documents: Any) -> tuple[int, int]:
    """FLOPs of a step as torch counts them, and as whet does."""
    attention.install_backend(model, "eager")
    root = LossModel(unwrap_peft(model))
    batch = pack(make_documents(*LENGTHS))
    own: Any = {
        torch.ops.aten.addmm_: lambda out, a, b, *rest, **options: 2 * a[0] * a[1] * b[1],  # of itself overlooked
        torch.ops.aten.bmm: lambda a, b, *rest, **options: 2 * a[0] * a[1] * a[2] * b[2] if a[2] > 1 else 0,
    }  # transformers 5.17 multiplies positions and angles as matrices
    with FlopCounterMode(display=False, custom_mapping=own) as counter:
        root(batch).objective.backward()
    work = count_step_flops(root.language_model)
    return counter.get_total_flops(), work.for_documents(np.array(LENGTHS), len(batch.supervised_at)) + full_pairs(work)


MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "decoder_sparse_step": 1}


@pytest.mark.parametrize(
    ("architecture", "options"),
    [
        ("Llama", {"tie_word_embeddings": True}),
        ("Llama", {"tie_word_embeddings": False, "head_dim": 16}),
        ("Qwen3", {"head_dim": 16}),
        ("Qwen3Moe", {"head_dim": 16, **MOE}),
        ("GPT2", {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}),
    ],
)
def test_a_steps_flops_are_those_that_torch_counts(
    architecture: str, options: dict[str, Any], make_model: Callable[..., Any], make_documents: Any, pack: Any
) -> None:
    model = make_model(architecture, **options)
    if architecture == "Qwen3Moe":
        model.set_experts_implementation("eager")  # torch does not count what grouped products cost
    theirs, ours = counted(model, pack, make_documents)
    assert ours == theirs


@pytest.mark.parametrize("layers", [1, 3])
@pytest.mark.parametrize(
    "targets",
    ["all-linear", ["q_proj"], ["v_proj"], ["o_proj"], ["up_proj"], ["down_proj"], ["q_proj", "down_proj"]],
    ids=str,
)
def test_adapters_cost_what_torch_counts(
    targets: Any, layers: int, make_model: Callable[..., Any], make_documents: Any, pack: Any
) -> None:
    model = make_model("Llama", num_hidden_layers=layers, tie_word_embeddings=True)
    theirs, ours = counted(add_adapter(model, AdapterConfig(rank=4, targets=targets), seed=0), pack, make_documents)
    # Where not all of q, k and v are trained, the first layer's attention needs some of its four products only.
    product = 2 * 4 * 8 * sum(LENGTHS) ** 2
    spared = {"q_proj": 2, "v_proj": 3}[targets[0]] if targets[0] in ("q_proj", "v_proj") else 0
    assert ours - spared * product == theirs


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    experts=st.integers(2, 12), active=st.integers(1, 2), rank=st.integers(1, 5), layers=st.integers(1, 2),
    shared=st.booleans(),
)  # fmt: skip
def test_adapters_of_experts_count_by_the_active_share(
    experts: int, active: int, rank: int, layers: int, shared: bool, make_model: Callable[..., Any]
) -> None:
    """A model with as many experts as are active computes as much, except for its router and the router's adapter."""
    sizes = {
        "moe_intermediate_size": 24, "decoder_sparse_step": 1, "num_hidden_layers": layers,
        "num_experts_per_tok": active, "shared_expert_intermediate_size": 20,
    }  # fmt: skip
    found = []
    for count in (experts, active):
        model = make_model("Qwen2Moe" if shared else "Qwen3Moe", num_experts=count, **sizes)
        adapted = unwrap_peft(add_adapter(model, AdapterConfig(rank=rank), seed=0))
        costs = [cost for cost in matrix_costs(adapted) if not re.search(r"\.mlp\.gate\b", cost.name)]
        found.append(sum(cost.forward_flops * cost.matmuls_per_step for cost in costs))
    assert found[0] == pytest.approx(found[1], abs=len(costs))  # each is rounded


def test_layers_below_the_first_trained_one_have_no_backward_pass(
    make_model: Callable[..., Any], make_documents: Any, pack: Any
) -> None:
    model = make_model("Llama", num_hidden_layers=4, tie_word_embeddings=False).requires_grad_(False)
    model.model.layers[2:].requires_grad_(True)
    theirs, ours = counted(model, pack, make_documents)
    assert ours == theirs


def test_experts_in_a_list_count_by_their_active_share(make_model: Callable[..., Any]) -> None:
    """As models with code of their own have them: experts.0, experts.1, …"""
    model = make_model("Qwen3Moe", **MOE)
    fused = count_step_flops(model)
    for layer in model.model.layers:
        up_down = ((32, 48), (24, 32))
        layer.mlp.experts = torch.nn.ModuleList(
            torch.nn.ModuleList(torch.nn.Linear(*widths, bias=False) for widths in up_down) for _ in range(4)
        )
    assert count_step_flops(model) == fused


@settings(max_examples=examples(60), deadline=None)
@given(lengths=st.lists(st.integers(0, 40), max_size=5), window=st.none() | st.integers(1, 50))
def test_pairs_are_the_visible_ones(lengths: list[int], window: int | None) -> None:
    seen = sum(
        1 for length in lengths for query in range(length) for key in range(query + 1) if query - key < (window or 99)
    )
    assert AttentionCost(window, 0, 0).pairs(np.array(lengths, dtype=np.int32)) == seen


def test_windows_are_the_models_own(make_model: Callable[..., Any]) -> None:
    from transformers.masking_utils import sliding_window_overlay

    window = make_model("Qwen2", use_sliding_window=True, sliding_window=8, max_window_layers=1, num_hidden_layers=3)
    cost = 4 * 4 * 8
    assert count_step_flops(window).attention == (
        AttentionCost(None, cost, 2 * cost),
        AttentionCost(8, 2 * cost, 4 * cost),
    )
    assert count_step_flops(make_model("Mistral", sliding_window=8)).attention == (
        AttentionCost(8, 2 * cost, 4 * cost),
    )
    sees = sliding_window_overlay(8)
    assert AttentionCost(8, 0, 0).pairs(np.array([20])) == sum(
        bool(sees(0, 0, q, k)) for q in range(20) for k in range(q + 1)
    )


@pytest.mark.parametrize(("kind", "layers"), [("bloom", 2), ("mpt", 2), ("minimax", 1), ("codegen", 2)])
def test_attention_modules_without_a_configuration_are_counted_and_linear_attention_has_no_pairs(
    kind: str, layers: int
) -> None:
    cost = layers * 4 * 4 * 8
    assert count_step_flops(tiny_model(kind)).attention == (AttentionCost(None, cost, 2 * cost),)


def test_a_million_tokens_in_one_document_do_not_overflow() -> None:
    assert AttentionCost(None, 0, 0).pairs(np.array([2**20], dtype=np.int32)) == 2**19 * (2**20 + 1)


def test_the_table_adds_up(make_model: Callable[..., Any]) -> None:
    model = make_model("Llama", tie_word_embeddings=False)
    lines = flops_table(model, 10, 0.5).splitlines()
    listed = {line.split("  ")[0].strip(): line.split() for line in lines[1:-2]}
    assert listed["model.layers.*.mlp.gate_proj"][1:4] == ["2", f"{2 * 32 * 48:,}", f"{4 * 32 * 48:,}"]
    forward = StepFlops(count_step_flops(model).per_token // 3, count_step_flops(model).per_target // 3)
    attended = 2 * 4 * 4 * 8 * 11 / 2
    assert math.isclose(float(lines[-2].split()[-1].replace(",", "")),
                        forward.per_token + attended + forward.per_target / 2, abs_tol=1)  # fmt: skip
