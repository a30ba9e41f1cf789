"""The last feed-forward part on supervised positions only: the same loss, the same gradients, less work."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from whet.execution.transform import transform_layers
from whet.model import attention
from whet.model.layers import decoder_layers
from whet.model.loss.loss_model import LossModel
from whet.model.modules import KeepFloat64
from whet.model.supervised_mlp import restrict_last_mlp
from whet.parallel.config import ParallelConfig

Make = Callable[..., Any]

KINDS = [
    ("Llama", {}),
    ("Gemma2", {"head_dim": 8, "backend": "eager"}),
    ("GPTNeoX", {}),
    ("GPT2", {"n_embd": 32, "n_layer": 4, "n_head": 4, "n_positions": 64, "resid_pdrop": 0, "embd_pdrop": 0}),
    ("Qwen3Moe", {"head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}),
]


def half_supervised(make_batch: Make, filled_up_to: int = 24) -> SimpleNamespace:
    """Every third position is learned; the rest of `padded_supervised_at` names one that is not."""
    batch = make_batch([9, 20, 8])
    batch.labels[torch.arange(len(batch.labels)) % 3 != 1] = -100
    batch.supervised_at = torch.nonzero(batch.labels >= 0)[:, 0]
    missing = filled_up_to - len(batch.supervised_at)
    batch.padded_supervised_at = torch.cat([batch.supervised_at, torch.zeros(missing, dtype=torch.int64)])
    return batch


def gradients(root: LossModel, batch: SimpleNamespace) -> list[Tensor]:
    with KeepFloat64():
        result = root(batch)
    result.objective.backward()
    return [result.nll, *(weight.grad for weight in root.parameters() if weight.grad is not None)]


@pytest.mark.parametrize(("architecture", "settings"), KINDS, ids=[kind[0] for kind in KINDS])
@pytest.mark.parametrize("change", ["plain", "recompute", "compile"])
def test_it_changes_nothing_that_is_learned(
    make_root: Make, make_batch: Make, architecture: str, settings: dict[str, Any], change: str
) -> None:
    if change == "compile" and architecture == "Qwen3Moe":
        pytest.skip("its experts are looped over, which is compiled for each number of tokens")
    torch._dynamo.reset()
    plain, few = (make_root(architecture, **settings) for _ in range(2))
    for root in (plain, few):
        if architecture == "Qwen3Moe":
            root.language_model.set_experts_implementation("eager")
    with KeepFloat64():
        assert restrict_last_mlp(few)
    recompute: Any = "full" if change == "recompute" else "none"
    transform_layers(few.language_model, ParallelConfig(recompute=recompute), change == "compile", "aot_eager")
    batch = half_supervised(make_batch)
    for one, other in zip(gradients(plain, batch), gradients(few, batch), strict=True):
        torch.testing.assert_close(other, one, rtol=1e-10, atol=1e-12)


def test_it_saves_the_work(make_root: Make, make_batch: Make) -> None:
    """Of the last layer's 48 positions half are computed: three products of 32 × 48, forward and twice backward."""
    batch, work = half_supervised(make_batch), []
    for narrowed in (False, True):
        root = make_root()
        if narrowed:
            with KeepFloat64():
                assert restrict_last_mlp(root)
        with FlopCounterMode(display=False) as counter:
            gradients(root, batch)
        work.append(counter.get_total_flops())
    assert work[0] - work[1] == 3 * 3 * 2 * (48 - 24) * 32 * 48


class Mixing(nn.Module):
    """A feed-forward part in which positions see each other."""

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden.cumsum(dim=-2)


class Tupled(nn.Module):
    def forward(self, hidden: Tensor) -> tuple[Tensor, None]:
        return hidden, None


@pytest.mark.parametrize("other", [Mixing, Tupled])
def test_what_would_change_is_left_alone(make_root: Make, make_batch: Make, other: type[nn.Module]) -> None:
    root = make_root()
    last: Any = decoder_layers(root.language_model)[-1]
    last.mlp = other()
    before = last.mlp.forward
    with KeepFloat64():
        assert not restrict_last_mlp(root)
    assert last.mlp.forward == before


def test_a_model_that_gets_conversations_one_by_one_is_left_alone(make_root: Make) -> None:
    root = make_root()
    root.alone = True
    assert not restrict_last_mlp(root)


def test_generating_is_not_narrowed(make_root: Make, make_batch: Make) -> None:
    """It goes through the same layers without documents, also right after a step."""
    plain, few = make_root(), make_root()
    with KeepFloat64():
        assert restrict_last_mlp(few)
    gradients(few, half_supervised(make_batch))
    tokens = torch.arange(3, 12)[None]
    found = []
    for root in (plain, few):
        with torch.no_grad(), KeepFloat64(), attention.native_attention(root.language_model):
            found.append(root.language_model(input_ids=tokens, use_cache=False).logits)
    assert torch.equal(found[0], found[1])
