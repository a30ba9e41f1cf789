"""Documents in one row attend as if each were alone, in every architecture, by every back-end.

The judge is each model's own eager attention, one document at a time, in fp64. Windows are narrower than the longer
documents and soft-caps lower than the scores, so that leaving one out would show.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from whet.model import attention
from whet.model.loss.loss_model import LossModel
from whet.model.modules import KeepFloat64

_HALF = ["sliding_attention", "full_attention"]
DENSE: dict[str, dict[str, Any]] = {
    "Llama": {},  # and SmolLM2
    "Qwen2": {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1},
    "Qwen3": {"head_dim": 16, "use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1},
    "Mistral": {"sliding_window": 6},
    "Gemma": {"head_dim": 16},
    "Gemma2": {"head_dim": 16, "sliding_window": 6, "attn_logit_softcapping": 0.5, "query_pre_attn_scalar": 1},
    "Gemma3Text": {"head_dim": 16, "sliding_window": 6, "layer_types": _HALF},
    "Phi": {},
    "Phi3": {"sliding_window": 6},
    "SmolLM3": {"no_rope_layers": [1, 0], "use_sliding_window": True, "sliding_window": 6, "layer_types": _HALF},
    "GPTNeoX": {},
    "Olmo": {},
    "Olmo2": {},
    "Olmo3": {"sliding_window": 6, "layer_types": _HALF},
    "Granite": {"attention_multiplier": 0.3},
    "GPT2": {},
}
MIXTURES: dict[str, dict[str, Any]] = {
    "GptOss": {
        "head_dim": 16, "sliding_window": 6, "num_local_experts": 4, "num_experts_per_tok": 2, "layer_types": _HALF,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    },
    "Qwen3Moe": {"head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
    "Mixtral": {"sliding_window": 6, "num_local_experts": 4, "num_experts_per_tok": 2},
    "DeepseekV3": {  # values are narrower than queries
        "q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 12, "qk_rope_head_dim": 8, "v_head_dim": 10,
        "num_key_value_heads": 4, "first_k_dense_replace": 2,
    },
}  # fmt: skip
BACKENDS = ["sdpa", "eager"]


@pytest.fixture(scope="module")
def model_of(make_model: Callable[..., Any]) -> Callable[..., Any]:
    """The random model of an architecture, with sinks that are not zero and weights that make scores differ."""

    def make(architecture: str, dtype: torch.dtype = torch.float64) -> nn.Module:
        model = make_model(architecture, dtype, **(DENSE | MIXTURES)[architecture])
        for name, parameter in model.named_parameters():
            if "sinks" in name:
                nn.init.normal_(parameter)
            elif parameter.ndim > 1:
                parameter.data.mul_(5)
        if architecture in MIXTURES and dtype == torch.float64:
            model.set_experts_implementation("eager")  # grouped products know no fp64
        return model

    return make


def hidden_states(model: nn.Module, batch: Any) -> Tensor:
    """[T E] of the packed documents."""
    return LossModel(model).hidden(
        batch.tokens, batch.positions, batch.cu_seqlens, batch.max_seqlen, batch.cu_seqlens_host
    )


def states_alone(model: nn.Module, documents: list[Tensor]) -> Tensor:
    """[T E] of each document by itself, by the model's own attention."""
    model.set_attn_implementation("eager")  # type: ignore[operator]
    return torch.cat([
        model.base_model(input_ids=ids[None], use_cache=False).last_hidden_state[0]  # type: ignore[operator]
        for ids in documents
    ])  # fmt: skip


def gradients(model: nn.Module, states: Tensor) -> Tensor:
    """Of every parameter, for a loss that weighs each state differently."""
    generator = torch.Generator().manual_seed(2)
    model.zero_grad()
    (states * torch.randn(states.shape, dtype=states.dtype, generator=generator)).sum().backward()
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


@pytest.mark.parametrize("architecture", [*DENSE, *MIXTURES])
def test_packed_documents_have_the_states_and_gradients_that_the_model_gives_each_alone(
    architecture: str, model_of: Any, make_documents: Any, pack: Any
) -> None:
    model, documents = model_of(architecture), make_documents(5, 1, 23, 17)
    with KeepFloat64():
        alone = states_alone(model, documents)
        slopes = gradients(model, alone)
        assert slopes.abs().max() > 1e-3
        for backend in BACKENDS:
            attention.install_backend(model, backend)
            together = hidden_states(model, pack(documents))
            assert (together - alone).abs().max() <= 1e-9 * alone.abs().max()
            assert (gradients(model, together) - slopes).abs().max() <= 1e-9 * slopes.abs().max()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("architecture", ["Llama", "Mistral", "Gemma2", "Qwen3Moe", "GptOss"])
@torch.no_grad()
def test_changing_a_document_does_not_change_the_others(
    architecture: str, backend: str, model_of: Any, make_documents: Any, pack: Any
) -> None:
    model = model_of(architecture, torch.float32)
    attention.install_backend(model, backend)
    documents = make_documents(7, 20, 9)
    before = hidden_states(model, pack(documents))
    documents[1] = (documents[1] + 1) % 64
    after = hidden_states(model, pack(documents))
    moved = (after - before).abs().amax(dim=1)
    # experts are computed together, in an order that changes with their number of tokens
    allowed = 1e-6 * before.abs().max() if architecture in MIXTURES else 0.0
    assert torch.cat([moved[:7], moved[27:]]).max() <= allowed
    assert moved[7:27].min() > 1e-4


@pytest.mark.parametrize("backend", BACKENDS)
@torch.no_grad()
def test_empty_documents_at_the_end_of_a_batch_change_nothing(
    backend: str, model_of: Any, make_documents: Any, pack: Any
) -> None:
    model, batch = model_of("Gemma2"), pack(make_documents(4, 16))
    attention.install_backend(model, backend)
    plain = hidden_states(model, batch)
    batch.cu_seqlens_host = (0, 4, 20, 20, 20)
    batch.cu_seqlens = torch.tensor(batch.cu_seqlens_host, dtype=torch.int32)
    assert torch.equal(hidden_states(model, batch), plain)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("architecture", ["Llama", "Gemma2", "GptOss"])
@torch.no_grad()
def test_flex_computes_the_same_inside_a_model(
    architecture: str, model_of: Any, make_documents: Any, pack: Any
) -> None:
    model, documents = model_of(architecture, torch.float32), make_documents(5, 1, 23)
    alone = states_alone(model, documents)
    attention.install_backend(model, "flex")
    together = hidden_states(model, pack(documents))
    assert (together - alone).abs().max() <= 1e-4 * alone.abs().max()


@torch.no_grad()
def test_the_models_own_attention_keeps_its_soft_cap(model_of: Any, make_documents: Any) -> None:
    model, (ids,) = model_of("Gemma2"), make_documents(23)
    alone = states_alone(model, [ids])
    attention.install_backend(model, "sdpa")
    model._supports_sdpa = True  # as transformers said of this model for long
    with attention.native_attention(model):
        assert torch.equal(model.base_model(input_ids=ids[None], use_cache=False).last_hidden_state[0], alone)
    assert attention.describe_backend(model) == "sdpa"
