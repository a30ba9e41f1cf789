"""What an adapter reaches, counted in parameters and by class of module."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tiny_architectures import tiny_model
from whet.model.config import AdapterConfig
from whet.model.lora.coverage import MIN_COVERAGE, adapter_coverage, covered_share, describe_coverage
from whet.model.lora.peft_adapters import add_adapter, unwrap_peft

ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]


def coverage_of(kind: str, **settings: Any) -> tuple[dict[str, Any], str]:
    config = AdapterConfig(**settings)
    found = adapter_coverage(unwrap_peft(add_adapter(tiny_model(kind, torch.float32), config, seed=0)))
    return {each.module: each for each in found}, describe_coverage(found, config.targets)


def test_every_matrix_of_a_dense_model() -> None:
    found, text = coverage_of("llama")
    assert list(found) == ["LlamaAttention", "LlamaMLP"]
    assert found["LlamaAttention"].reached == found["LlamaAttention"].parameters == 2 * (2 * 32 * 32 + 2 * 16 * 32)
    assert found["LlamaMLP"].reached_names == ["gate_proj", "up_proj", "down_proj"]
    assert text.startswith("the adapter reaches 100.0% of the layers' weights (15,360 of 15,360): LlamaAttention (")
    assert "Not reached" not in text
    assert "adapter.targets" not in text


def test_attention_alone_of_a_mixture_of_experts() -> None:
    found, text = coverage_of("gpt_oss", targets=ATTENTION)
    experts = found["GptOssExperts"]
    assert (experts.reached, experts.parameters) == (0, 2 * 4 * (32 * 96 + 48 * 32))
    assert experts.missed_names == ["gate_up_proj", "down_proj"]
    assert covered_share(list(found.values())) < MIN_COVERAGE
    assert "14.2%" in text
    assert "Not reached: GptOssTopKRouter (router: 256), GptOssExperts (gate_up_proj, down_proj: 36,864)" in text
    assert text.endswith("Set adapter.targets=all-linear, or add what is missing to adapter.targets by name")


def test_modules_that_are_trained_whole_are_reached() -> None:
    found, _ = coverage_of("llama", targets=["q_proj"], also_train=["down_proj"])
    assert found["LlamaMLP"].reached_names == ["down_proj"]
    assert found["LlamaMLP"].reached == 2 * 32 * 48
    assert found["LlamaMLP"].missed_names == ["gate_proj", "up_proj"]


@pytest.mark.parametrize(("kind", "module"), [("gpt2", "GPT2Attention"), ("falcon", "FalconAttention")])
def test_linear_layers_of_a_models_own_class_belong_to_the_module_around_them(kind: str, module: str) -> None:
    found, text = coverage_of(kind)
    assert found[module].reached == found[module].parameters > 0
    assert "100.0%" in text
