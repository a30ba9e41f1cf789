"""Which weights belong together: their rates, and which are pulled towards zero."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch import nn

from whet.core.errors import WhetError
from whet.model.config import AdapterConfig, ModelConfig
from whet.model.flops import matrix_costs
from whet.model.load.pretrained import load_model
from whet.model.lora.peft_adapters import add_adapter, unwrap_peft
from whet.model.loss.loss_model import LossModel
from whet.training.config import OptimizerConfig
from whet.training.optimizers.factory import build_optimizer, optimizer_step, set_learning_rates

NAMES = ["adamw", "adamw16bit", "adamw8bit", "muon"]
TINY = ModelConfig(path="builtin:tiny")


def names_in(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, list[str]]:
    names = {parameter: name for name, parameter in model.named_parameters()}
    return {group["name"]: [names[parameter] for parameter in group["params"]] for group in optimizer.param_groups}


def untied() -> nn.Module:
    """A language model whose head is its own, with stacked experts."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    return Qwen3MoeForCausalLM(
        Qwen3MoeConfig(
            vocab_size=50, hidden_size=16, intermediate_size=16, moe_intermediate_size=8, num_hidden_layers=1,
            num_attention_heads=2, num_key_value_heads=2, head_dim=8, num_experts=3, num_experts_per_tok=2,
            tie_word_embeddings=False,
        )
    )  # fmt: skip


def test_stacked_biases_of_experts_are_not_matrices() -> None:
    from transformers import GptOssConfig, GptOssForCausalLM

    model = GptOssForCausalLM(
        GptOssConfig(
            vocab_size=50, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
            num_key_value_heads=2, head_dim=8, num_local_experts=3, num_experts_per_tok=2,
        )
    )  # fmt: skip
    names = names_in(model, build_optimizer(model, OptimizerConfig(name="muon", weight_decay=0.1), 0))
    assert not [name for name in names["matrices"] if name.endswith("bias")]
    assert "model.layers.0.mlp.experts.gate_up_proj_bias" in names["scalars"]
    assert not [matrix for matrix in matrix_costs(model) if matrix.size == 3 * 32]


def test_scale_multiplies_the_rate_of_every_group() -> None:
    config = OptimizerConfig(lr=1e-3, head_lr=4e-3, scalar_lr=0.5)
    plain, scaled = (build_optimizer(untied(), each, 0) for each in (config, config.model_copy(update={"scale": 0.25})))
    before, after = (set_learning_rates(each, 0.5) for each in (plain, scaled))
    assert after == {name: 0.25 * rate for name, rate in before.items()}
    rates = [[group["lr"] for group in each.param_groups] for each in (plain, scaled)]
    assert rates[1] == [0.25 * rate for rate in rates[0]]
    assert len({*rates[0]}) == 3


@pytest.mark.parametrize("name", NAMES)
def test_decay_pulls_matrices_and_spares_vectors(name: Any) -> None:
    model = nn.Sequential(nn.Embedding(3, 4), nn.Linear(4, 5), nn.LayerNorm(5))
    config = OptimizerConfig(name=name, lr=0.5, weight_decay=0.1, betas=(0.8, 0.9), eps=1e-6)
    optimizer = build_optimizer(model, config, 0)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    for name, parameter in model.named_parameters():
        pulled = 1 - 0.5 * 0.1 if parameter.ndim == 2 else 1
        torch.testing.assert_close(parameter.detach(), before[name] * pulled)
    assert {(group["betas"], group["eps"]) for group in optimizer.param_groups} == {((0.8, 0.9), 1e-6)}


def test_frozen_weights_are_left_out_and_an_empty_group_too() -> None:
    model = nn.Linear(2, 3)
    model.bias.requires_grad_(False)
    optimizer = build_optimizer(model, OptimizerConfig(), 0)
    assert [[*group["params"]] for group in optimizer.param_groups] == [[model.weight]]


def test_a_model_is_sorted_into_embedding_head_matrices_and_scalars() -> None:
    root = LossModel(untied())
    groups = names_in(root, build_optimizer(root, OptimizerConfig(), 0))
    assert groups["embedding"] == ["language_model.model.embed_tokens.weight"]
    assert groups["head"] == ["language_model.lm_head.weight"]
    assert all("norm" in name for name in groups["scalars"])
    assert sum("experts" in name for name in groups["matrices"]) == 2, "stacked experts"
    assert sum(map(len, groups.values())) == len([*root.parameters()])


def test_a_tied_head_counts_as_embedding() -> None:
    root = LossModel(load_model(TINY, torch.float32))
    groups = names_in(root, build_optimizer(root, OptimizerConfig(), 0))
    assert groups["embedding"] == ["language_model.model.embed_tokens.weight"]
    assert "head" not in groups


@pytest.mark.parametrize("targets", ["all-linear", ["embed_tokens", "q_proj"]])
def test_the_matrices_of_adapters_are_matrices(targets: Any) -> None:
    adapted = add_adapter(load_model(TINY, torch.float32), AdapterConfig(rank=2, targets=targets), 0)
    root = LossModel(unwrap_peft(adapted))
    groups = names_in(root, build_optimizer(root, OptimizerConfig(), 0))
    assert list(groups) == ["matrices"]
    assert all("lora_" in name for name in groups["matrices"])


@pytest.mark.parametrize("name", NAMES)
def test_each_group_has_its_rate_and_only_differing_rates_are_reported(name: Any) -> None:
    root = LossModel(untied())
    config = OptimizerConfig(name=name, lr=1.0, embedding_lr=2.0, head_lr=3.0, matrix_lr=4.0, scalar_lr=1.0)
    optimizer = build_optimizer(root, config, 0)
    told = set_learning_rates(optimizer, 0.25)
    told.pop("momentum", None)
    assert told == {"lr": 0.25, "lr/embedding": 0.5, "lr/head": 0.75, "lr/matrices": 1.0}
    assert {group["name"]: group["lr"] for group in optimizer.param_groups} == {
        "embedding": 0.5, "head": 0.75, "matrices": 1.0, "scalars": 0.25,
    }  # fmt: skip


def test_the_rate_is_set_for_every_group() -> None:
    optimizer = build_optimizer(nn.Linear(2, 3), OptimizerConfig(lr=1.0), 0)
    assert set_learning_rates(optimizer, 0.25) == {"lr": 0.25}
    assert [group["lr"] for group in optimizer.param_groups] == [0.25, 0.25]


def test_a_rate_for_what_is_not_trained_is_refused() -> None:
    root = LossModel(load_model(TINY, torch.float32))
    with pytest.raises(WhetError, match=r"train\.optimizer\.head_lr: 0\.1, .*tied.*Remove it"):
        build_optimizer(root, OptimizerConfig(head_lr=0.1), 0)


def test_muons_settings_without_muon_are_an_error() -> None:
    assert OptimizerConfig(name="adamw", momentum=0.95).momentum == 0.95  # a complete config.yaml says so
    with pytest.raises(ValidationError, match="only Muon uses it"):
        OptimizerConfig(name="adamw", momentum=0.5)


@pytest.mark.parametrize("name", ["adamw", "adamw16bit", "adamw8bit", "muon"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=["fp64", "fp32", "bf16"])
def test_a_step_with_a_factor_is_one_with_scaled_gradients(name: Any, dtype: torch.dtype) -> None:
    ends = []
    for factor in (1.0, 0.25):
        torch.manual_seed(0)
        model = nn.Linear(32, 200).to(dtype)
        optimizer = build_optimizer(model, OptimizerConfig(name=name, lr=1e-2), 0)
        for weight in model.parameters():
            weight.grad = torch.randn_like(weight) * (0.25 if factor == 1 else 1)  # a power of two: nothing is rounded
        optimizer_step(optimizer, factor)
        ends.append([weight.detach().clone() for weight in model.parameters()])
    for one, other in zip(*ends, strict=True):
        assert torch.equal(one, other)
