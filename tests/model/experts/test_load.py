"""The load of experts, against a count of what the routers chose."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tiny_architectures import tiny_model
from whet.execution.recompute import with_recompute
from whet.model.config import AdapterConfig
from whet.model.experts.install import install_experts
from whet.model.experts.routing import ExpertLoad, StepLoad
from whet.model.lora.peft_adapters import add_adapter, unwrap_peft
from whet.model.modules import decoder_layers

TOKENS = torch.randint(3, 90, (1, 5), generator=torch.Generator().manual_seed(0))
CPU = torch.device("cpu")


def identity(counts: Tensor) -> Tensor:
    return counts


@pytest.mark.parametrize("adapter", [False, True])
@pytest.mark.parametrize("recompute", [None, "full"])
def test_shares_are_those_of_the_routers_choices(adapter: bool, recompute: Any) -> None:
    """Recomputed layers are counted twice, which no share shows."""
    model: Any = tiny_model("qwen3_moe", torch.float32)
    model = unwrap_peft(add_adapter(model, AdapterConfig(rank=2), seed=0)) if adapter else model
    install_experts(model)
    chosen: list[Tensor] = []
    for layer in decoder_layers(model):
        layer.mlp.gate.register_forward_hook(lambda *args: chosen.append(args[-1][-1]))
    load = ExpertLoad(model, CPU)
    model.train()
    for layer in decoder_layers(model) if recompute else ():
        layer.forward = with_recompute(layer.forward, recompute)  # type: ignore[method-assign]
    model(input_ids=TOKENS, labels=TOKENS).loss.backward()
    counts = torch.stack([torch.bincount(index.flatten(), minlength=4) for index in chosen[:2]])
    found = StepLoad(*load.finish_step(identity).tolist())
    assert found.max_load == pytest.approx((counts.amax(dim=1) / counts.double().mean(dim=1)).max().item())
    assert found.idle == found.idle_so_far == (counts == 0).sum().item() == 1
    [(name, experts)] = load.idle_experts().items()
    assert experts == (counts[load.names.index(name)] == 0).nonzero().flatten().tolist()
    assert (load.experts, len(load.names)) == (8, 2)


def test_evaluation_is_not_counted_and_a_step_starts_at_zero() -> None:
    model = tiny_model("mixtral", torch.float32)
    install_experts(model)
    load = ExpertLoad(model, CPU)
    model.eval()(input_ids=TOKENS)
    with torch.no_grad():
        model.train()(input_ids=TOKENS)
    assert load.finish_step(identity).tolist() == [0, 8, 8]
    model(input_ids=TOKENS)
    _, idle, so_far = load.finish_step(identity).tolist()
    assert idle == so_far < 8
    assert load.finish_step(identity).tolist() == [0, 8, so_far]


def test_the_count_is_over_all_ranks() -> None:
    model = tiny_model("mixtral", torch.float32).train()
    install_experts(model)
    load = ExpertLoad(model, CPU)
    model(input_ids=TOKENS)
    assert load.finish_step(lambda counts: counts + 10 * torch.tensor([1, 1, 1, 1])).tolist()[1:] == [0, 0]
