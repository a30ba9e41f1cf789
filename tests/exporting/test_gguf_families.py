"""Model families in GGUF: every weight comes back from its parts, and what llama.cpp lacks is refused by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from whet.core.errors import WhetError
from whet.exporting.gguf.families import GGUFLayout, context_length, family_notes, require_family

pytest.importorskip("gguf")

EXPERTS = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
PLAIN_ROPE = {"rope_type": "default", "rope_theta": 1e4}
GEMMA = {"query_pre_attn_scalar": 16, "sliding_window": 16, "tie_word_embeddings": True, "pad_token_id": None}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama with biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "mistral with a window": ("mistral", {"sliding_window": 32}),
    "qwen3_moe": ("qwen3_moe", {**EXPERTS, "norm_topk_prob": True}),
    "phi3": ("phi3", {"pad_token_id": None}),
    "gemma3": ("gemma3_text", {**GEMMA, "layer_types": ["sliding_attention", "full_attention"]}),
    "gemma3 with windows only": ("gemma3_text", GEMMA),
    "gpt_oss": ("gpt_oss", {**EXPERTS, "sliding_window": 16, "rope_parameters": PLAIN_ROPE, "pad_token_id": None}),
}


def layout_of(model: Any) -> tuple[GGUFLayout, str]:
    architecture = require_family(model.config, has_llama_cpp=True)
    return GGUFLayout(model.config, architecture), architecture


@pytest.mark.parametrize("family", FAMILIES)
def test_every_weight_comes_back_from_its_parts(random_model: Callable[..., Any], family: str) -> None:
    kind, settings = FAMILIES[family]
    model = random_model(kind, **settings)
    layout, _ = layout_of(model)
    file: dict[str, torch.Tensor] = {}
    for name, weight in model.named_parameters():
        parts = layout.split(name, weight.detach())
        shapes = layout.split(name, torch.empty(weight.shape, device="meta"))
        assert {key: part.shape for key, part in parts.items()} == {key: part.shape for key, part in shapes.items()}
        assert not parts.keys() & file.keys()
        file |= parts
    for name, weight in model.named_parameters():
        torch.testing.assert_close(layout.join(name, file.__getitem__), weight.detach(), rtol=0, atol=1e-6)


def test_a_window_that_llama_cpp_does_not_compute_bounds_the_context(random_model: Callable[..., Any]) -> None:
    config = random_model("mistral", sliding_window=32).config
    assert context_length(config, "llama") == 32
    assert family_notes(config, "llama")[0].startswith("llama.cpp has no sliding window for mistral")
    config.sliding_window = None
    assert (context_length(config, "llama"), family_notes(config, "llama")) == (256, [])
    gemma = random_model("gemma3_text", **GEMMA, layer_types=["sliding_attention", "full_attention"]).config
    assert context_length(gemma, "gemma3") == 256


@pytest.mark.parametrize(
    ("kind", "settings", "words"),
    [
        ("gpt2", {}, "cannot write gpt2 models as GGUF, only llama"),
        ("qwen3", {"attention_bias": True}, r"has biases \(attention_bias\)"),
        ("qwen3_moe", {**EXPERTS, "norm_topk_prob": False}, "norm_topk_prob = false"),
        ("qwen3_moe", {**EXPERTS, "norm_topk_prob": True, "mlp_only_layers": [0]}, "layers without experts"),
        ("gemma3_text", {**GEMMA, "query_pre_attn_scalar": 8}, "query_pre_attn_scalar = 8 instead of 16"),
        ("llama", {"rope_parameters": {**PLAIN_ROPE, "rope_type": "dynamic", "factor": 2.0}}, "the RoPE type dynamic"),
    ],
)
def test_what_llama_cpp_lacks_is_refused_by_name(kind: str, settings: dict[str, Any], words: str) -> None:
    from transformers import AutoConfig

    shape = {"hidden_size": 64, "num_attention_heads": 4, "head_dim": 16, "num_hidden_layers": 2}
    with pytest.raises(WhetError, match=words):
        require_family(AutoConfig.for_model(kind, **{**shape, **settings}), has_llama_cpp=True)
