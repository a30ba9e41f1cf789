"""What whet expects of transformers' private APIs."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import (
    AttentionMaskInterface,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedTokenizerFast,
)

MODULE = "transformers_private"


@pytest.fixture
def config() -> Any:
    return LlamaConfig(
        vocab_size=16, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        max_position_embeddings=64,
    )  # fmt: skip


def test_the_attention_implementation_is_read_back(private: ModuleType, config: Any) -> None:
    model = LlamaForCausalLM(config)
    for name in ("eager", "sdpa"):
        model.set_attn_implementation(name)
        assert private.attention_implementation(model) == name
    assert private.supports_sdpa(model)
    assert callable(AttentionMaskInterface.register)


def test_a_model_has_a_tensor_parallel_plan(private: ModuleType, config: Any) -> None:
    plan = private.tensor_parallel_plan(LlamaForCausalLM(config))
    assert plan["model.layers.*.self_attn.q_proj"] == "colwise"
    assert plan["model.layers.*.self_attn.o_proj"] == "rowwise"
    assert private.tensor_parallel_plan(torch.nn.Linear(1, 1)) == {}


def test_a_mixture_says_where_its_router_logits_are(private: ModuleType, config: Any) -> None:
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2, "num_key_value_heads": 2}
    mixture = MixtralForCausalLM(MixtralConfig(vocab_size=16, num_hidden_layers=2, num_local_experts=3, **sizes))
    found = private.router_logit_outputs(mixture)
    routers = [layer.mlp.gate for layer in mixture.model.layers]
    assert [module for module, _ in found] == routers
    for module, index in found:
        assert module(torch.randn(5, 16))[index].shape == (5, 3)
    assert private.router_logit_outputs(LlamaForCausalLM(config)) == []


def test_a_named_special_token_is_set(private: ModuleType) -> None:
    inner = Tokenizer(WordLevel({"a": 0, "<end>": 1}, unk_token="a"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner)
    private.set_special_token(tokenizer, "eot_token", "<end>")
    assert tokenizer.eot_token == "<end>"


def test_code_is_saved_only_of_models_that_bring_their_own(
    private: ModuleType, config: Any, tmp_path: Path
) -> None:  # fmt: skip
    model = LlamaForCausalLM(config)
    private.save_custom_code(model, tmp_path, model.config)
    assert not list(tmp_path.iterdir())
    assert model._auto_class is None


def test_plain_weights_keep_their_names_in_files(private: ModuleType, config: Any) -> None:
    model = LlamaForCausalLM(config)
    name, weight = next(iter(model.named_parameters()))
    assert private.to_checkpoint_tensors(model, name, weight).keys() == {name}


def test_fused_experts_are_separate_in_files_each_time(private: ModuleType) -> None:
    shape = MixtralConfig(
        hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1,
        vocab_size=16, num_local_experts=2,
    )  # fmt: skip
    model = MixtralForCausalLM(shape)
    fused = {name: weight for name, weight in model.named_parameters() if name.endswith("experts.gate_up_proj")}
    for _ in range(2):  # what is known of a model is kept
        for name, weight in fused.items():
            assert len(private.to_checkpoint_tensors(model, name, weight)) == 4  # gate and up of two experts
    assert fused


def test_rope_frequencies_of_llama_3(private: ModuleType, config: Any) -> None:
    config.rope_parameters = {
        "rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    }  # fmt: skip
    frequencies = private.rope_frequencies(config, "llama3")
    assert frequencies.shape == (4,)
    assert frequencies[0] == 1


def test_a_gguf_is_parsed_once(private: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    gguf = pytest.importorskip("gguf")
    made: list[str] = []
    original = gguf.get_tensor_name_map
    monkeypatch.setattr(gguf, "GGUFReader", lambda path: made.append(str(path)) or object())
    reader = gguf.GGUFReader
    with private.share_gguf_reads():
        assert gguf.GGUFReader("a") is gguf.GGUFReader(Path("a"))
        assert gguf.GGUFReader("b") is not gguf.GGUFReader("a")
        arch = gguf.MODEL_ARCH.LLAMA
        assert gguf.get_tensor_name_map(arch, 2) is gguf.get_tensor_name_map(arch, 2)
    assert made == ["a", "b"]
    assert (gguf.GGUFReader, gguf.get_tensor_name_map) == (reader, original)
