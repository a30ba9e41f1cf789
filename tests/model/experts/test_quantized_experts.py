"""Experts in 4 bits: computed as their dequantized weights are, adapted by peft, exported merged and as an adapter."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from whet.compat.bitsandbytes_private import quant_state
from whet.model.config import AdapterConfig
from whet.model.experts.install import install_experts
from whet.model.flops import matrix_costs
from whet.model.lora.peft_adapters import add_adapter, unwrap_peft
from whet.model.quantize import dequantize_parameter, quantize_, quantized_share, weight_shape

pytest.importorskip("bitsandbytes")
CPU = torch.device("cpu")
IDS = torch.arange(3, 40)[None]


def model_of(kind: str) -> nn.Module:
    """Its hidden sizes are multiples of the block size of NF4."""
    from transformers import AutoModelForCausalLM, Glm4MoeConfig, GptOssConfig, Qwen3MoeConfig

    sizes = {
        "vocab_size": 96, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1,
        "head_dim": 32, "num_experts_per_tok": 2, "max_position_embeddings": 64,
    }  # fmt: skip
    shapes: dict[str, Any] = {
        "qwen3_moe": lambda: Qwen3MoeConfig(**sizes, num_experts=4, moe_intermediate_size=128, intermediate_size=64),
        "gpt_oss": lambda: GptOssConfig(
            **sizes,
            num_local_experts=4,
            intermediate_size=64,
            rope_parameters={"rope_type": "default", "rope_theta": 1e4},
        ),
    }
    shapes["glm4_moe"] = lambda: Glm4MoeConfig(
        **sizes, n_routed_experts=4, moe_intermediate_size=64, intermediate_size=128, first_k_dense_replace=1
    )
    torch.manual_seed(0)
    model: nn.Module = AutoModelForCausalLM.from_config(shapes[kind]()).eval().requires_grad_(False)
    for parameter in model.parameters():
        if parameter.ndim == 3:
            nn.init.normal_(parameter, std=0.1)
    return model


def adapted(model: nn.Module) -> nn.Module:
    model = add_adapter(model, AdapterConfig(rank=3, alpha=6), seed=0).eval()
    torch.manual_seed(1)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            nn.init.normal_(parameter, std=0.1)
    install_experts(unwrap_peft(model))
    return model


def results(model: nn.Module) -> list[torch.Tensor]:
    logits = model(input_ids=IDS, use_cache=False).logits
    logits.log_softmax(-1)[..., 3].sum().backward()
    return [logits.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]


@pytest.mark.parametrize("kind", ["qwen3_moe", "gpt_oss"])
def test_they_compute_as_their_dequantized_weights_do(kind: str) -> None:
    model = model_of(kind)
    names = [name for name, parameter in model.named_parameters() if parameter.ndim == 3]
    costs = [cost.size for cost in matrix_costs(model)]
    quantize_(model, CPU)
    assert [cost.size for cost in matrix_costs(model)] == costs
    assert all(quant_state(model.get_parameter(name)) is not None for name in names)
    assert quantized_share(model) > 0.85
    plain = copy.deepcopy(model)
    for name in names:
        module, _, key = name.rpartition(".")
        whole = dequantize_parameter(model.get_parameter(name))
        assert whole.shape == weight_shape(model.get_parameter(name))
        plain.get_submodule(module).register_parameter(key, nn.Parameter(whole, requires_grad=False))
    found, expected = results(adapted(model)), results(adapted(plain))
    assert len(found) == len(expected) > 10
    for own, other in zip(found, expected, strict=True):
        torch.testing.assert_close(own, other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", ["merged", "adapter"])
def test_they_are_exported(kind: str, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    from whet.exporting.dtypes import EXPORT_DTYPES
    from whet.exporting.exporter import write_export
    from whet.exporting.spec import ExportSpec, GenerationSettings
    from whet.exporting.trained_model import TrainedModel
    from whet.model.config import ModelConfig
    from whet.model.load.tokenizer import load_tokenizer

    base = model_of("glm4_moe")  # it has dense layers, too, which peft takes for experts by their names
    tokenizer = load_tokenizer(ModelConfig(path="builtin:tiny"))
    base.resize_token_embeddings(len(tokenizer))  # type: ignore[operator]
    base.save_pretrained(tmp_path / "base")  # type: ignore[operator]
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base")  # peft records where it comes from
    quantize_(base.requires_grad_(False), CPU)
    model = adapted(base)
    settings = GenerationSettings(tokenizer, [2], 2, {})
    spec = ExportSpec(TrainedModel(model), settings, EXPORT_DTYPES["f32"], 7)
    certificate = write_export(spec, kind, tmp_path / kind, [list(range(3, 40))])
    assert certificate.verified
    assert certificate.quantize == "nf4"
