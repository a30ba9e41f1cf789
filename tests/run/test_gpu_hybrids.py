"""Hybrids on a GPU, with the kernels that are installed there: packed rows have the losses and gradients of a plain
loop."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from test_hybrid_families import FAMILIES
from torch import Tensor
from transformers import AutoModelForCausalLM

from tiny_architectures import VOCABULARY, tiny_config
from whet.model import attention
from whet.model.attention.recurrent import recurrent_layers
from whet.model.loss.loss_model import LossModel
from whet.model.loss.output_head import read_output_head
from whet.model.packing_check import choose_packing, hidden_of_documents

LENGTHS = (200, 73, 5, 130)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", FAMILIES)
def test_packed_documents_are_a_plain_loop(kind: str) -> None:
    config = tiny_config(kind)
    for name in ("linear_key_head_dim", "linear_value_head_dim"):  # kernels need tiles of 16
        if hasattr(config, name):
            setattr(config, name, 32)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).to("cuda").eval()
    documents = [torch.randint(3, VOCABULARY, (length,), device="cuda") for length in LENGTHS]
    with torch.autocast("cuda", torch.bfloat16):
        plain, plain_gradients = gradients(model, lambda: [model(input_ids=ids[None]).logits[0] for ids in documents])
        attention.install_backend(model, attention.choose_backend("auto", documents[0].device, torch.bfloat16))
        root = LossModel(model)
        choose_packing(root, VOCABULARY, max(LENGTHS))
        assert root.unpacked == ""
        assert recurrent_layers(model)
        head = read_output_head(model)
        ours, our_gradients = gradients(model, lambda: [head.logits(hidden_of_documents(root, documents))])
    assert (ours - plain).abs().max() <= 3e-2 * plain.abs().max()
    assert (our_gradients - plain_gradients).norm() <= 3e-2 * plain_gradients.norm()


def gradients(model: Any, compute: Any) -> tuple[Tensor, Tensor]:
    """Logits, and the gradients of a loss for all weights."""
    model.zero_grad()
    logits = torch.cat(list(compute())).float()
    F.cross_entropy(logits, torch.arange(len(logits), device=logits.device) % VOCABULARY).backward()
    every = [weight.grad for weight in model.parameters() if weight.grad is not None]
    return logits.detach(), torch.cat([gradient.flatten() for gradient in every])
