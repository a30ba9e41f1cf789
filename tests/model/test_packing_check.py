"""The packing check: which models pass, which do not, and that it leaves the model unchanged."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model

from tiny_architectures import VOCABULARY, tiny_config
from whet.core.errors import WhetError
from whet.model import attention
from whet.model.load.pretrained import auto_class
from whet.model.lora.peft_adapters import unwrap_peft
from whet.model.loss.loss_model import LossModel
from whet.model.packing_check import choose_packing

_FULL = {"head_dim": 16, "attn_logit_softcapping": None, "layer_types": ["full_attention"] * 2}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("architecture", "settings"),
    [
        ("Llama", {"tie_word_embeddings": True}), ("Llama", {"tie_word_embeddings": False}), ("Phi", {}),
        ("Cohere", {"logit_scale": 0.0625}), ("Granite", {"logits_scaling": 4.0}),
        ("Gemma2", {"final_logit_softcapping": 5.0, **_FULL}), ("Gemma2", {"final_logit_softcapping": 30.0, **_FULL}),
    ],
    ids=["tied", "untied", "biased", "scaled", "divided", "capped hard", "capped gently"],
)  # fmt: skip
def test_heads_that_whet_knows_pass(
    architecture: str, settings: dict[str, Any], dtype: torch.dtype, make_model: Callable[..., Any]
) -> None:
    model = make_model(architecture, dtype=dtype, **settings)
    if architecture == "Phi":
        model.lm_head.bias.data.fill_(0.5)
    attention.install_backend(model, "sdpa")
    root = LossModel(model)
    choose_packing(root, 64, 16)
    assert root.unpacked == ""


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "said", [{"final_logit_softcapping": 5.0}, {"final_logit_softcapping": 30.0}, {"logit_scale": 0.9}], ids=str
)
def test_a_model_with_undeclared_logit_transforms_is_an_error(
    said: dict[str, float], dtype: torch.dtype, make_model: Callable[..., Any]
) -> None:
    """A cap of 30 moves none of these logits, all below 1, by more than 1e-4: it is heard when they are loud."""
    model = make_model("Llama", dtype=dtype, **said)
    attention.install_backend(model, "sdpa")
    with pytest.raises(WhetError, match="transforms its logits"):
        choose_packing(LossModel(model), 64, 16)


def test_the_head_of_an_image_text_model_passes() -> None:
    """Muse Glimmer multiplies its logits before their soft-cap."""
    config = tiny_config("muse_glimmer")
    config.projector_hidden_size = config.out_hidden_size = 32
    model = auto_class(config).from_config(config, dtype=torch.float64)
    attention.install_backend(model, "sdpa")
    root = LossModel(model)
    choose_packing(root, VOCABULARY, 16)
    assert root.unpacked == ""


def test_an_unknown_bias_is_an_error(make_model: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    from whet.model import packing_check as module
    from whet.model.loss.output_head import OutputHead, read_output_head

    model = make_model("Phi", dtype=torch.bfloat16)
    model.lm_head.bias.data.fill_(0.5)
    attention.install_backend(model, "sdpa")
    monkeypatch.setattr(module, "read_output_head", lambda model: OutputHead(read_output_head(model).weight))
    with pytest.raises(WhetError, match="transforms its logits"):
        choose_packing(LossModel(model), 64, 16)


@pytest.mark.parametrize(
    ("architecture", "settings", "passes"),
    [("Llama", {}, True), ("Llama", {"logit_scale": 0.5}, False), ("StableLm", {}, True)],
    ids=["packed", "refused", "unpacked"],
)
def test_every_module_is_left_in_the_mode_it_was_found_in(
    architecture: str, settings: dict[str, Any], passes: bool, make_model: Callable[..., Any]
) -> None:
    model = make_model(architecture, dtype=torch.float32, **settings)
    attention.install_backend(model, "sdpa")
    root = LossModel(model).train()
    model.get_output_embeddings().eval()
    before = {name: module.training for name, module in root.named_modules()}
    if passes:
        choose_packing(root, 64, 16)
    else:
        with pytest.raises(WhetError):
            choose_packing(root, 64, 16)
    assert {name: module.training for name, module in root.named_modules()} == before
    assert not model.get_output_embeddings()._forward_pre_hooks
    if architecture == "Llama" and passes:
        assert model.config._attn_implementation == attention.registered_name("sdpa")


def test_an_adapted_head_passes_and_one_with_dropout_is_an_error(make_model: Callable[..., Any]) -> None:
    for dropout in (0.0, 0.1):
        model = make_model("Llama", dtype=torch.float32, tie_word_embeddings=False)
        attention.install_backend(model, "sdpa")
        inside = unwrap_peft(
            get_peft_model(model, LoraConfig(target_modules=["lm_head", "q_proj"], lora_dropout=dropout))
        )
        inside.lm_head.lora_B["default"].weight.data.normal_()
        if dropout:
            with pytest.raises(WhetError, match=r"adapter\.dropout"):
                choose_packing(LossModel(inside), 64, 16)
        else:
            root = LossModel(inside)
            choose_packing(root, 64, 16)
            assert root.unpacked == ""
