"""The arithmetic of a step, against torch's own counting."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from torch.utils.flop_counter import FlopCounterMode

from whet.model import attention
from whet.model.config import AdapterConfig
from whet.model.flops import Work, work_of
from whet.model.lora import add_adapter, language_model
from whet.model.loss import LossModel


@pytest.mark.parametrize(("adapters", "within"), [(False, 0.02), (True, 0.15)])
def test_a_steps_flops_are_those_that_torch_counts(
    adapters: bool, within: float, make_model: Callable[..., Any], make_documents: Any, pack: Any
) -> None:
    model = make_model("Llama", num_hidden_layers=6, head_dim=16, tie_word_embeddings=True)
    attention.install(model, "eager")  # computes the masked half of attention too, so that is doubled below
    if adapters:
        model = add_adapter(model, AdapterConfig(rank=1), seed=0)
    batch = pack(make_documents(60))
    with FlopCounterMode(display=False) as counter:
        LossModel(language_model(model))(batch).objective.backward()
    matrices = sum(p.numel() for name, p in model.named_parameters() if p.ndim == 2 and "embed" not in name)
    work = work_of(model.config, matrices, adapters)
    assert work.of(60, 59, 2 * 60**2) == pytest.approx(counter.get_total_flops(), rel=within)


def test_unsupervised_tokens_cost_no_head_and_short_documents_little_attention() -> None:
    work = Work(per_token=100, per_target=10, per_square=1, backward=2)
    assert work.of(tokens=8, supervised=0, squares=64) == 3 * 800 + 3 * 64
    assert work.of(tokens=8, supervised=4, squares=32) == 3 * 800 + 3 * 40 + 3 * 32
