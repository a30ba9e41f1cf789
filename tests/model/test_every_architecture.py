"""Every causal architecture of transformers: one step equals a plain loop over conversations in fp64, or is refused.

Packed where the model can be packed and unpacked elsewhere; nothing in the computation may be narrower than fp64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from test_keep_float64 import NarrowedOperations
from torch import Tensor, nn
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from tiny_architectures import VOCABULARY, tiny_model
from whet.core.errors import WhetError
from whet.model import attention
from whet.model.flops import flops_table
from whet.model.loss.loss_model import LossModel
from whet.model.modules import KeepFloat64, decoder_layers
from whet.model.packing_check import choose_packing
from whet.model.randomness import is_stochastic

REFUSED = {
    "bert", "big_bird", "camembert", "data2vec-text", "electra", "ernie", "megatron-bert", "modernbert-decoder",
    "prophetnet", "rembert", "roberta", "roberta-prelayernorm", "roc_bert", "roformer", "xlm-roberta",
    "xlm-roberta-xl", "xmod",  # their heads are more than a linear layer
    "cpmant", "xlm", "xlnet",  # not causal
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("kind", MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
def test_a_step_equals_a_plain_loop_or_is_refused(kind: str, make_documents: Any, pack: Any) -> None:
    try:
        model = tiny_model(kind)
        model(input_ids=torch.arange(5, 14)[None], use_cache=False)
    except Exception as error:
        pytest.skip(f"no tiny model: {error!r}"[:200])
    documents = make_documents(7, 2, 23, 12)
    attention.install_backend(model, "sdpa")
    root = LossModel(model)
    with KeepFloat64():
        if kind in REFUSED:
            with pytest.raises(WhetError, match=r"model\.path.*Use another model"):
                choose_packing(root, VOCABULARY, 23)
            return
        choose_packing(root, VOCABULARY, 23)
        is_stochastic(root, VOCABULARY)
        batches = [pack(documents)]  # packed, or each in a row of a padded batch
        with NarrowedOperations() as narrowed:
            ours = gradients(model, [root(batch).objective for batch in batches])
        attention.use_native_attention(model)
        plain = gradients(model, [own_loss(model, document) for document in documents])
    assert narrowed.found == set()
    assert ours[0] == pytest.approx(plain[0], rel=1e-11)
    assert (ours[1] - plain[1]).abs().max() <= 1e-9 * plain[1].abs().max()
    assert decoder_layers(model)
    assert flops_table(model, 10, 0.5)


def own_loss(model: Any, document: Tensor) -> Tensor:
    logits = model(input_ids=document[None], use_cache=False).logits[0]
    return F.cross_entropy(logits[:-1], document[1:], reduction="sum")


def gradients(model: nn.Module, losses: list[Tensor]) -> tuple[float, Tensor]:
    """The sum of the losses, and its gradient for every weight."""
    model.zero_grad()
    total = torch.stack(losses).sum()
    total.backward()
    every = [torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters()]
    return total.item(), torch.cat([gradient.flatten() for gradient in every])
