"""What whet expects of peft's internal classes."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

MODULE = "peft_private"


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.inner, self.head = nn.Embedding(8, 4), nn.Linear(4, 4), nn.Linear(4, 8)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.inner(self.embed(ids)))


@pytest.fixture
def model() -> Any:
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(
        r=2, target_modules=["inner"], modules_to_save=["head"], trainable_token_indices={"embed": [1, 2]}
    )
    return get_peft_model(Small(), config).get_base_model()


def test_wrappers_are_recognised(private: ModuleType, model: Any) -> None:
    assert private.is_lora_layer(model.inner)
    assert private.is_lora_linear(model.inner)
    assert not private.is_lora_layer(model.head)
    assert isinstance(model.inner, private.tuner_layer_type())
    assert isinstance(model.head, private.modules_to_save_type())
    assert isinstance(model.embed, private.trainable_tokens_type())


def test_wrappers_have_the_attributes_that_whet_reads(private: ModuleType, model: Any) -> None:
    layer, head, rows = model.inner, model.head, model.embed
    for name in ("lora_A", "lora_B", "lora_bias", "lora_dropout", "lora_variant", "scaling", "fan_in_fan_out"):
        assert hasattr(layer, name), name
    for name in ("active_adapters", "disable_adapters", "merged", "merged_adapters", "base_layer", "get_delta_weight"):
        assert hasattr(layer, name), name
    assert head.modules_to_save[head.active_adapters[0]] is not head.original_module
    assert rows.token_adapter.get_merged_weights(rows.active_adapters).shape == (8, 4)


def test_a_layer_whose_weight_is_put_back_forgets_that_it_was_merged(private: ModuleType, model: Any) -> None:
    layer, weight = model.inner, model.inner.base_layer.weight
    layer.lora_B["default"].weight.data.fill_(1)
    x = torch.ones(4)
    before = layer(x)
    layer.base_layer.register_parameter("weight", nn.Parameter(weight.detach().clone()))
    layer.merge()
    torch.testing.assert_close(nn.functional.linear(x, layer.base_layer.weight, layer.base_layer.bias), before)
    layer.merged_adapters.clear()
    layer.base_layer.register_parameter("weight", weight)
    torch.testing.assert_close(layer(x), before)
