"""adapter.targets in models with experts: names of stacked weights, of an expert's layers, of routers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from tiny_architectures import tiny_model
from whet.compat.peft_private import is_lora_layer
from whet.core.errors import WhetError
from whet.model.config import AdapterConfig
from whet.model.lora.peft_adapters import (
    add_adapter,
    expert_stacks,
    frozen_routers,
    resolve_targets,
    router_names,
    unwrap_peft,
)


@pytest.fixture(scope="module")
def glm() -> nn.Module:
    """Layer 0 has a dense MLP, layer 1 experts and a shared expert, all with a down_proj."""
    return tiny_model("glm4_moe", torch.float32)


BOTH = ["experts.down_proj", "experts.gate_up_proj"]
CASES: list[tuple[Any, Any, list[str]]] = [
    (["q_proj"], ["q_proj"], []),
    (["q_proj", "down_proj"], ["q_proj", "down_proj"], ["experts.down_proj"]),
    (["gate_proj", "up_proj", "down_proj"], ["gate_proj", "up_proj", "down_proj"], BOTH),
    (["gate_proj"], ["gate_proj"], []),
    (["gate_up_proj"], [], ["experts.gate_up_proj"]),
    (["w1", "w2", "w3"], [], BOTH),
    (["experts"], [], BOTH),
    (["q_proj", "gate"], ["q_proj"], ["gate.weight"]),
    (["shared_experts.down_proj"], ["shared_experts.down_proj"], []),
    (r".*experts\.(gate_up|down)_proj", ["model.layers.1.mlp.shared_experts.down_proj"], BOTH),
    (r".*\.1\.self_attn\.q_proj", ["model.layers.1.self_attn.q_proj"], []),
    (["nonsense"], ["nonsense"], []),
]


@pytest.mark.parametrize(("targets", "modules", "parameters"), CASES, ids=str)
def test_names_reach_layers_and_experts(glm: nn.Module, targets: Any, modules: Any, parameters: list[str]) -> None:
    found = resolve_targets(glm, targets)
    assert (found.modules, found.parameters) == (modules, parameters)


def test_all_linear_reaches_dense_layers_and_experts_but_no_router(glm: nn.Module) -> None:
    found = resolve_targets(glm, "all-linear")
    assert found.parameters == BOTH
    ends = {name.rpartition(".")[2] for name in found.modules}
    assert ends == {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
    assert router_names(glm) == ["model.layers.1.mlp.gate"]
    assert len(expert_stacks(glm)) == 2


def test_all_linear_leaves_out_layers_that_would_learn_nothing() -> None:
    """Indexers of sparse attention, layers whose weights go to the kernels of Mamba, layers with a product of their
    own."""

    class GroupedLinear(nn.Linear):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            return input

    class Indexer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.wk = nn.Linear(4, 4)

    model: Any = tiny_model("jamba", torch.float32)
    mixer = next(
        module for module in model.modules() if "Mamba" in type(module).__name__ and hasattr(module, "in_proj")
    )
    mixer.indexer, mixer.grouped = Indexer(), GroupedLinear(4, 4)
    ends = {name.rpartition("mamba.")[2] for name in resolve_targets(model, "all-linear").modules if "mamba." in name}
    assert ends == {"in_proj", "x_proj"}
    assert resolve_targets(model, ["in_proj", "out_proj"]).modules == ["in_proj", "out_proj"]


@pytest.mark.parametrize(
    ("kind", "left_out"),
    [
        ("mamba", {"x_proj", "dt_proj", "out_proj"}),  # dt_proj is always read past an adapter, the others by kernels
        ("falcon_mamba", {"x_proj", "dt_proj", "out_proj"}),
        ("bamba", {"out_proj"}),
        ("gemma3n_text", {"correction_coefs"}),  # in training, when its weight is clamped
        ("falcon", set()),  # its linear layers have a forward of their own, which computes the same
    ],
)
def test_all_linear_leaves_them_out_of_dense_models_too(kind: str, left_out: set[str]) -> None:
    model = tiny_model(kind, torch.float32)
    layers = {name.rpartition(".")[2] for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    adapted = add_adapter(model, AdapterConfig(rank=2), seed=0)
    reached = {name.rpartition(".")[2] for name, module in adapted.named_modules() if is_lora_layer(module)}
    assert reached == layers - left_out - {"lm_head"}


@pytest.mark.parametrize("settings", [{"method": "dora"}, {"dropout": 0.1}], ids=str)
def test_the_remedy_for_what_experts_cannot_do_names_no_experts(settings: dict[str, Any]) -> None:
    """The names of dense layers and shared experts are those of the experts' layers, too."""
    with pytest.raises(WhetError, match=r"leave out the experts: adapter\.targets=\[.*\]$") as refused:
        add_adapter(tiny_model("glm4_moe", torch.float32), AdapterConfig(rank=2, **settings), seed=0)
    names = str(refused.value).rpartition("[")[2].removesuffix("]").split(", ")
    assert names == ["k_proj", "o_proj", "q_proj", "v_proj"]
    add_adapter(tiny_model("glm4_moe", torch.float32), AdapterConfig(rank=2, targets=names, **settings), seed=0)


def test_a_shared_expert_as_wide_as_there_are_experts_is_no_router() -> None:
    """Qwen3-Next has 512 experts, and a shared one of width 512."""
    from transformers import AutoModelForCausalLM, Qwen2MoeConfig

    shape = Qwen2MoeConfig(
        vocab_size=50, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2, num_experts=8,
        moe_intermediate_size=8, shared_expert_intermediate_size=8, intermediate_size=8,
    )  # fmt: skip
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(shape)
    assert router_names(model) == ["model.layers.0.mlp.gate"]
    assert "model.layers.0.mlp.shared_expert.gate_proj" in resolve_targets(model, "all-linear").modules


def test_half_of_a_fused_weight_is_refused() -> None:
    with pytest.raises(WhetError, match=r"w1 without w3: .*one weight for both. Name both, or gate_up_proj"):
        resolve_targets(tiny_model("mixtral", torch.float32), ["q_proj", "w1"])


def test_ranks_and_alphas_reach_experts_and_routers_stay_frozen() -> None:
    settings = AdapterConfig(rank=4, alpha=8, ranks={"gate_up_proj": 2, "q_proj": 1}, alphas={"experts.down_proj": 20})
    model = unwrap_peft(add_adapter(tiny_model("glm4_moe", torch.float32), settings, seed=0))
    outer: Any = model.get_submodule("model.layers.1.mlp.experts")
    inner = outer.base_layer
    assert (outer.parameter_name, outer.r["default"], outer.scaling["default"]) == ("down_proj", 4, 5.0)
    assert (inner.parameter_name, inner.r["default"], inner.scaling["default"]) == ("gate_up_proj", 2, 4.0)
    assert frozen_routers(model) == ["model.layers.1.mlp.gate"]
    with pytest.raises(WhetError, match=r"adapter\.ranks: 'gate' matches no layer with an adapter"):
        add_adapter(tiny_model("glm4_moe", torch.float32), AdapterConfig(ranks={"gate": 2}), seed=0)
