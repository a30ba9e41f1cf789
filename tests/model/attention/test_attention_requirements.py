"""Attention requirements of layers, recorded before training; unsupported ones are errors, however wide the window."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import AttentionInterface

from whet.core.errors import WhetError
from whet.model import attention
from whet.model.attention.dispatch import _classify_mask
from whet.model.loss.loss_model import LossModel
from whet.model.packing_check import choose_packing

ONLY_MASKED: dict[str, tuple[dict[str, Any], str]] = {
    "Phimoe": (
        {"sliding_window": 5000, "num_local_experts": 2},
        "no window as an argument, but a window of 5000 in its mask",
    ),
    "Qwen2Moe": (
        {"use_sliding_window": True, "sliding_window": 5000, "max_window_layers": 1, "num_experts": 2,
         "num_experts_per_tok": 2},
        "a window of 5000 in its mask",
    ),
    "Llama4Text": (
        {
            "head_dim": 16, "attention_chunk_size": 8192, "num_local_experts": 2, "intermediate_size_mlp": 48,
            "moe_layers": [], "no_rope_layers": [1, 1],
        },
        "chunks of 8192 tokens",
    ),
}  # fmt: skip


@pytest.mark.parametrize("architecture", ONLY_MASKED)
def test_a_model_with_a_window_in_the_mask_only_is_not_packed(
    architecture: str, make_model: Callable[..., Any]
) -> None:
    settings, reason = ONLY_MASKED[architecture]
    model = make_model(architecture, dtype=torch.float32, **settings)
    attention.install_backend(model, "sdpa")
    root = LossModel(model)
    choose_packing(root, 64, 16)
    assert reason in root.unpacked


def test_a_window_passed_as_an_argument_is_supported(make_model: Callable[..., Any]) -> None:
    model = make_model("Mistral", dtype=torch.float32, sliding_window=5000)
    attention.install_backend(model, "sdpa")
    root = LossModel(model)
    choose_packing(root, 64, 16)
    assert root.unpacked == ""


def test_inspection_reads_each_layer_and_leaves_the_model_unchanged(make_model: Callable[..., Any]) -> None:
    settings = {"head_dim": 16, "sliding_window": 6, "num_local_experts": 2, "num_experts_per_tok": 1}
    model = make_model("GptOss", dtype=torch.float32, **settings).train()
    attention.install_backend(model, "eager")
    first, second = attention.inspect_attention(model)
    assert (first.spec.window, first.mask, second.spec.window, second.mask) == (6, 6, None, None)
    assert first.spec.sinks is not None
    assert first.head_dim == 16
    assert (first.spec.scale, first.spec.softcap) == (0.25, None)
    assert attention.describe_backend(model) == "eager"
    assert model.training


def test_inspecting_a_model_that_fails_returns_nothing(make_model: Callable[..., Any]) -> None:
    model = make_model("Llama")
    model.model.norm = None
    assert len(attention.inspect_attention(model)) == 2
    model.model.embed_tokens = None
    assert attention.inspect_attention(model) == []
    assert model.config._attn_implementation == "sdpa"


@pytest.mark.parametrize("name", ["position_bias", "indices", "block_indices"])
def test_attention_arguments_that_no_backend_supports_are_errors(name: str, make_model: Callable[..., Any]) -> None:
    attention.install_backend(make_model("Llama"), "sdpa")
    attend = AttentionInterface()[attention.registered_name("sdpa")]
    states = torch.zeros(1, 1, 2, 4)
    documents = attention.document_kwargs(torch.tensor([0, 2]), 2, (0, 2))
    attend(None, states, states, states, None, **documents, **{name: None})
    with pytest.raises(WhetError, match=name):
        attend(None, states, states, states, None, **documents, **{name: states})


def test_masks_are_classified() -> None:
    from transformers import masking_utils as hf

    padding = torch.zeros(1, dtype=torch.long)
    assert _classify_mask(hf.causal_mask_function, None) is None
    assert _classify_mask(hf.sliding_window_causal_mask_function(100), 100) == 100
    assert _classify_mask(hf.sliding_window_causal_mask_function(1), 1) == 1
    assert _classify_mask(hf.chunked_causal_mask_function(100, padding), 100) == "chunks of 100 tokens"
    assert _classify_mask(hf.bidirectional_mask_function, None) == "a custom mask"
    packed = hf.packed_sequence_mask_function(torch.zeros(1, 4))
    assert _classify_mask(hf.and_masks(hf.causal_mask_function, packed), None) == "a custom mask"
