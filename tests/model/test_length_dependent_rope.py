"""Length-dependent rotary embeddings: no packing for documents beyond the original context."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from whet.core.errors import WhetError
from whet.model import attention
from whet.model.loss.loss_model import LossModel
from whet.model.packing_check import LengthDependentRope, choose_packing, length_dependent_rope

_LONG = {
    "rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 4, "long_factor": [4.0] * 4,
    "original_max_position_embeddings": 32,
}  # fmt: skip
_DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}


@pytest.fixture(params=["longrope", "dynamic"])
def model(request: pytest.FixtureRequest, make_model: Callable[..., nn.Module]) -> nn.Module:
    """First trained on 32 tokens."""
    if request.param == "dynamic":
        return make_model("Llama", rope_parameters=_DYNAMIC, max_position_embeddings=32)
    return make_model("Phi3", rope_parameters=_LONG, max_position_embeddings=128, original_max_position_embeddings=32)


def test_with_dynamic_rope_a_long_document_changes_a_short_one_beside_it(
    model: nn.Module, make_documents: Any, pack: Any
) -> None:
    """What the refusal is about: whet cannot serve these models packed."""
    attention.install_backend(model, "sdpa")
    root = LossModel(model)
    short, long = make_documents(20, 60)
    with torch.no_grad():
        alone, beside = (
            root.hidden(batch.tokens, batch.positions, batch.cu_seqlens, batch.max_seqlen, batch.cu_seqlens_host)[:20]
            for batch in (pack([short]), pack([short, long]))
        )
    assert (alone - beside).abs().max() > 1e-3


def test_documents_within_the_original_context_are_packed(model: nn.Module) -> None:
    attention.install_backend(model, "sdpa")
    root = LossModel(model)
    choose_packing(root, 64, longest=32)
    assert root.unpacked == ""


def test_unpacked_a_document_gets_the_rope_of_its_own_length(
    make_model: Callable[..., nn.Module], make_documents: Any, pack: Any
) -> None:
    model = make_model("Phi3", rope_parameters=_LONG, max_position_embeddings=128, original_max_position_embeddings=32)
    root = LossModel(model)
    choose_packing(root, 64, longest=60)
    assert "(longrope) depends on the longest conversation of a row, here 60 tokens" in root.unpacked
    (document,) = make_documents(20)
    plain, padded = pack([document]), pack([document])
    padded.tokens = torch.cat([document, torch.zeros(60, dtype=torch.int64)])
    padded.labels = torch.cat([plain.labels, torch.full((60,), -100)])
    padded.cu_seqlens_host = (0, 20, 80)
    assert torch.equal(root(plain).nll, root(padded).nll)


def test_documents_on_both_sides_of_the_original_length_share_no_padded_batch(
    make_model: Callable[..., nn.Module], make_documents: Any, pack: Any
) -> None:
    model = make_model("Phi3", rope_parameters=_LONG, max_position_embeddings=128, original_max_position_embeddings=32)
    root = LossModel(model)
    choose_packing(root, 64, longest=60)
    assert (root.pads, root.rope_switch) == (True, 32)
    documents = make_documents(60, 40, 32, 7, 50)
    alone = sum(root(pack([document])).nll.sum() for document in documents)
    assert root(pack(documents)).nll.sum().item() == pytest.approx(alone.item(), rel=1e-12)
    root.rope_switch = None  # planted: short documents would get the rope of long ones
    assert root(pack(documents)).nll.sum().item() != pytest.approx(alone.item(), rel=1e-8)


def test_dynamic_rope_is_an_error_even_unpacked(make_model: Callable[..., nn.Module]) -> None:
    model = make_model("Llama", rope_parameters=_DYNAMIC, max_position_embeddings=32)
    with pytest.raises(WhetError, match="would not be reproducible"):
        choose_packing(LossModel(model), 64, longest=33)


@pytest.mark.parametrize("first", [16, 64])
def test_dynamic_rope_depends_on_max_position_embeddings_alone(
    make_model: Callable[..., nn.Module], first: int
) -> None:
    """transformers reads no original_max_position_embeddings there: 64 would hide that 33 tokens are too many, and 16
    would refuse 32."""
    rope = _DYNAMIC | {"original_max_position_embeddings": first}
    model = make_model("Llama", rope_parameters=rope, max_position_embeddings=32)
    assert length_dependent_rope(model, 32) is None
    assert length_dependent_rope(model, 33) == LengthDependentRope("dynamic", 32)
