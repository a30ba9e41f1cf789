"""Adapters through peft: what is trained, initialisation by the seed, and merging."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from whet.core.errors import WhetError
from whet.model.config import AdapterConfig
from whet.model.lora.peft_adapters import add_adapter, merge_adapter, unwrap_peft


def test_only_adapters_are_trained_and_the_head_has_none(make_model: Callable[..., Any]) -> None:
    model = add_adapter(make_model("Llama"), AdapterConfig(rank=4), seed=0)
    trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    assert trained
    assert all("lora_" in name for name in trained)
    assert not any("lm_head" in name or "embed" in name for name in trained)
    assert sum("lora_A" in name for name in trained) == 2 * 7  # q k v o gate up down in both layers
    assert {parameter.shape[0] for name, parameter in model.named_parameters() if "lora_A" in name} == {4}


def test_adapters_start_from_the_seed_and_do_not_change_outputs(make_model: Callable[..., Any]) -> None:
    def start(seed: int, drawn_before: int) -> dict[str, torch.Tensor]:
        model = make_model("Llama")
        torch.manual_seed(drawn_before)
        model = add_adapter(model, AdapterConfig(rank=4), seed)
        return {name: parameter for name, parameter in model.named_parameters() if "lora_A" in name}

    one, same, other = start(1, 10), start(1, 20), start(2, 10)
    assert all(torch.equal(one[name], same[name]) for name in one)
    assert not any(torch.equal(one[name], other[name]) for name in one)
    ids = torch.arange(9)[None]
    plain, adapted = make_model("Llama"), add_adapter(make_model("Llama"), AdapterConfig(), seed=1)
    assert torch.equal(plain(input_ids=ids).logits, adapted(input_ids=ids).logits)


def test_named_targets_get_adapters_and_no_others(make_model: Callable[..., Any]) -> None:
    model = add_adapter(make_model("Llama"), AdapterConfig(targets=["q_proj"]), seed=0)
    assert all("q_proj" in name for name, parameter in model.named_parameters() if parameter.requires_grad)


def test_targets_that_do_not_exist_are_an_error_with_a_remedy(make_model: Callable[..., Any]) -> None:
    with pytest.raises(WhetError, match=r"adapter\.targets: \['nonsense'\].*Set adapter\.targets=all-linear"):
        add_adapter(make_model("Llama"), AdapterConfig(targets=["nonsense"]), seed=0)


def test_a_merged_model_is_plain_and_answers_like_the_adapted(make_model: Callable[..., Any]) -> None:
    model = add_adapter(make_model("Llama"), AdapterConfig(rank=2, alpha=6), seed=0).eval()
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter)
    ids = torch.arange(9)[None]
    with torch.no_grad():
        adapted, inside = model(input_ids=ids).logits, unwrap_peft(model)(input_ids=ids).logits
        merged = merge_adapter(model)
        torch.testing.assert_close(merged(input_ids=ids).logits, adapted, rtol=1e-6, atol=1e-6)
    assert torch.equal(adapted, inside)
    assert not any("lora" in name for name, _ in merged.named_parameters())


def test_without_adapters_the_model_is_its_own_merge(make_model: Callable[..., Any]) -> None:
    model = make_model("Llama")
    assert merge_adapter(model) is model is unwrap_peft(model)
