"""Random numbers in training are found by what the model does, whatever its code calls them."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from tiny_architectures import VOCABULARY, tiny_config
from whet.core.errors import WhetError
from whet.model import attention
from whet.model.loss.loss_model import LossModel
from whet.model.packing_check import choose_packing
from whet.model.randomness import ignored_attention_dropout, is_stochastic, require_no_layer_drop


def random_model(kind: str, **settings: Any) -> Any:
    config = tiny_config(kind)
    config.update(settings)
    return AutoModelForCausalLM.from_config(config)


@pytest.mark.parametrize(
    ("kind", "settings", "draws"),
    [
        ("llama", {}, False),
        ("llama", {"attention_dropout": 0.1}, False),  # whet's attention does not apply it
        ("gpt2", {}, True),  # nn.Dropout
        ("seed_oss", {"attention_dropout": 0.0}, True),  # functional dropout
        ("seed_oss", {"residual_dropout": 0.0, "attention_dropout": 0.0}, False),
        ("mixtral", {"router_jitter_noise": 0.1}, True),
        ("mixtral", {}, False),
        ("phimoe", {"router_jitter_noise": 0.0, "input_jitter_noise": 0.0}, True),  # samples experts
        ("opt", {"dropout": 0.0, "layerdrop": 0.5}, True),
        ("bloom", {"hidden_dropout": 0.0, "attention_dropout": 0.0}, False),
        ("stablelm", {"attention_dropout": 0.1}, True),  # unpacked, with its own attention
    ],
)
def test_a_model_that_is_stochastic_is_found(kind: str, settings: dict[str, Any], draws: bool) -> None:
    model = random_model(kind, **settings)
    attention.install_backend(model, "sdpa")
    root = LossModel(model).eval()
    choose_packing(root, VOCABULARY, 16)
    before = torch.get_rng_state(), random.getstate()
    assert is_stochastic(root, VOCABULARY) == draws
    assert torch.equal(torch.get_rng_state(), before[0])
    assert random.getstate() == before[1]
    assert not any(module.training for module in root.modules())


def test_python_random_numbers_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    model = random_model("llama")
    attention.install_backend(model, "sdpa")
    root = LossModel(model)
    model.model.layers[0].register_forward_pre_hook(lambda *_: random.random() and None)
    before = random.getstate()
    assert is_stochastic(root, VOCABULARY)
    assert random.getstate() == before


def test_dropout_of_attention_weights_is_named() -> None:
    assert ignored_attention_dropout(random_model("seed_oss")) == "attention_dropout=0.1"
    assert ignored_attention_dropout(random_model("gpt2")) == "attn_pdrop=0.1"
    assert ignored_attention_dropout(random_model("llama")) is None


def test_layers_skipped_at_random_are_refused_for_sharding() -> None:
    require_no_layer_drop(random_model("opt"))
    with pytest.raises(WhetError, match=r"model\.path: layerdrop is 0\.1.*Set layerdrop to 0.*parallel\.shard"):
        require_no_layer_drop(random_model("opt", layerdrop=0.1))
