"""The routers' choices of one pass, replayed in another: in the check of packed documents, which low precision would
fail otherwise."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tiny_architectures import VOCABULARY, tiny_model
from whet.model import attention
from whet.model.config import AdapterConfig
from whet.model.experts.install import install_experts
from whet.model.experts.routing import Routing
from whet.model.lora.peft_adapters import add_adapter, unwrap_peft
from whet.model.loss.loss_model import LossModel
from whet.model.packing_check import choose_packing, hidden_of_documents

DOCUMENTS = [torch.arange(3, 9), torch.arange(20, 31)]


def prepared(kind: str, adapter: bool) -> LossModel:
    model: Any = tiny_model(kind)
    if adapter:
        model = unwrap_peft(add_adapter(model, AdapterConfig(rank=2), seed=0).double())
    install_experts(model)
    attention.install_backend(model, "sdpa")
    return LossModel(model).eval()


def route_differently(model: nn.Module, packed: int) -> None:
    """In batches of `packed` tokens, all go to the next expert: what rounding may do to some, which depends on the
    shapes of products."""

    def reroute(module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...] | None:
        hidden, index, weights = inputs
        return (hidden, (index + 1) % 4, weights) if len(index) == packed else None

    for module in Routing(model).modules:
        module.register_forward_pre_hook(reroute)


@pytest.mark.parametrize("adapter", [False, True], ids=["plain", "lora"])
@pytest.mark.parametrize("kind", ["gpt_oss", "qwen3_moe"])
def test_a_pass_with_the_choices_of_another_has_its_hidden_states_and_gradients(kind: str, adapter: bool) -> None:
    root = prepared(kind, adapter)
    routing = Routing(root.language_model)
    embedding: Tensor = root.language_model.get_input_embeddings().weight  # type: ignore[operator]

    def compute(*rows: list[Tensor]) -> tuple[Tensor, Tensor]:
        hidden = torch.cat([hidden_of_documents(root, row) for row in rows])
        return hidden.detach(), torch.autograd.grad((hidden * hidden.detach().cos()).sum(), embedding)[0]

    embedding.requires_grad_()
    with routing.captured():
        alone = compute(*([each] for each in DOCUMENTS))
    with routing.replayed():
        torch.testing.assert_close(compute(DOCUMENTS), alone, rtol=1e-9, atol=1e-9)
    route_differently(root.language_model, 17)
    assert (compute(DOCUMENTS)[0] - alone[0]).abs().max() > 1e-3
    with routing.replayed():
        torch.testing.assert_close(compute(DOCUMENTS)[0], alone[0], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("kind", ["gpt_oss", "qwen3_moe"])
def test_a_router_that_rounds_differently_does_not_prevent_packing(kind: str) -> None:
    root = prepared(kind, adapter=True)
    route_differently(root.language_model, 16)
    choose_packing(root, VOCABULARY, 100)
    assert not root.unpacked
