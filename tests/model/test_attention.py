"""Documents in one row attend as if each were alone, in every architecture, by every back-end."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from whet.core.errors import WhetError
from whet.model import attention
from whet.model.loss import LossModel

ARCHITECTURES: dict[str, dict[str, Any]] = {
    "Llama": {},
    "Qwen2": {},
    "Qwen3": {"head_dim": 16},
    "Mistral": {"sliding_window": None},
    "Phi3": {"sliding_window": None},
    "Olmo2": {},
    "Gemma": {"head_dim": 16},
    "Granite": {"attention_multiplier": 0.3},
    "GPT2": {},
}


def hidden_states(model: nn.Module, batch: Any) -> Tensor:
    with torch.no_grad():
        return LossModel(model)._hidden(batch.tokens, batch.positions, batch.cu_seqlens, batch.longest, batch.edges)[0]


@pytest.mark.parametrize("backend", ["sdpa", "eager"])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_packed_documents_have_the_hidden_states_that_the_model_gives_each_alone(
    architecture: str, backend: str, make_model: Callable[..., Any], make_documents: Any, pack: Any
) -> None:
    model = make_model(architecture, **ARCHITECTURES[architecture])
    documents = make_documents(5, 1, 23, 17)
    with torch.no_grad():
        alone = [model.base_model(input_ids=ids[None], use_cache=False).last_hidden_state[0] for ids in documents]
    attention.install(model, backend)
    together = hidden_states(model, pack(documents))
    assert (together - torch.cat(alone)).abs().max() <= 1e-9


@pytest.mark.parametrize("backend", ["sdpa", "eager"])
def test_a_changed_document_leaves_the_others_bit_for_bit_alone(
    backend: str, make_model: Callable[..., Any], make_documents: Any, pack: Any
) -> None:
    model = make_model("Llama", dtype=torch.float32)
    attention.install(model, backend)
    documents = make_documents(7, 20, 9)
    before = hidden_states(model, pack(documents))
    documents[1] = (documents[1] + 1) % 64
    after = hidden_states(model, pack(documents))
    assert torch.equal(before[:7], after[:7])
    assert torch.equal(before[27:], after[27:])
    assert not torch.equal(before[7:27], after[7:27])


def test_empty_documents_at_the_end_of_a_batch_change_nothing(
    make_model: Callable[..., Any], make_documents: Any, pack: Any
) -> None:
    model = make_model("Llama")
    batch = pack(make_documents(4, 6))
    for backend in ("sdpa", "eager"):
        attention.install(model, backend)
        plain = hidden_states(model, batch)
        batch.edges = (0, 4, 10, 10, 10)
        assert torch.equal(hidden_states(model, batch), plain)
        batch.edges = (0, 4, 10)


@pytest.mark.parametrize(
    ("architecture", "settings", "feature"),
    [
        ("Mistral", {"sliding_window": 8}, "sliding_window"),
        ("Phi3", {"sliding_window": 8}, "sliding_window"),
        ("Gemma3Text", {"head_dim": 16, "sliding_window": 8}, "sliding_window"),
        ("Gemma2", {"head_dim": 16, "layer_types": ["full_attention"] * 2}, "softcap"),
        (
            "GptOss",
            {"head_dim": 16, "num_local_experts": 2, "num_experts_per_tok": 1, "layer_types": ["full_attention"] * 2},
            "s_aux",
        ),
    ],
)
def test_attention_that_whet_cannot_do_is_refused_not_ignored(
    architecture: str, settings: dict[str, Any], feature: str, make_model: Callable[..., Any],
    make_documents: Any, pack: Any,
) -> None:  # fmt: skip
    model = make_model(architecture, dtype=torch.float32, **settings)
    attention.install(model, "sdpa")
    batch = pack(make_documents(3, 9))
    with pytest.raises(WhetError, match=feature):
        hidden_states(model, batch)


@pytest.mark.parametrize("architecture", ["Mistral", "Phi3"])
def test_a_window_that_no_document_outgrows_is_no_window(
    architecture: str, make_model: Callable[..., Any], make_documents: Any, pack: Any
) -> None:
    model = make_model(architecture, sliding_window=9)
    documents = make_documents(3, 9)
    with torch.no_grad():
        alone = [model.base_model(input_ids=ids[None], use_cache=False).last_hidden_state[0] for ids in documents]
    attention.install(model, "sdpa")
    assert (hidden_states(model, pack(documents)) - torch.cat(alone)).abs().max() <= 1e-9


def test_the_best_backend_for_the_device_is_chosen() -> None:
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    assert attention.choose("auto", cpu, torch.float32) == "sdpa"
    assert attention.choose("auto", cuda, torch.bfloat16) == "varlen"
    assert attention.choose("auto", cuda, torch.float32) == "sdpa"
    assert attention.choose("eager", cuda, torch.bfloat16) == "eager"


@pytest.mark.parametrize(("device", "dtype"), [("cpu", torch.bfloat16), ("cuda", torch.float32)])
def test_varlen_is_refused_where_it_cannot_run(device: str, dtype: torch.dtype) -> None:
    with pytest.raises(WhetError, match=r"model\.attention"):
        attention.choose("varlen", torch.device(device), dtype)
