"""The output head against the model's own forward pass: loss and gradients of every parameter."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn

from whet.core.errors import WhetError
from whet.model import attention
from whet.model.lora.peft_adapters import unwrap_peft
from whet.model.loss.loss_model import LossModel
from whet.model.loss.output_head import read_output_head
from whet.model.modules import KeepFloat64

HEADS: dict[str, tuple[str, dict[str, Any]]] = {
    "plain": ("Llama", {"tie_word_embeddings": False}),
    "tied": ("Llama", {"tie_word_embeddings": True}),
    "scaled": ("Cohere", {"logit_scale": 0.0625}),
    "divided": ("Granite", {"logits_scaling": 4.0}),
    "multiplied by the same name": ("HyperCLOVAX", {"logits_scaling": 4.0}),
    "biased": ("Phi", {}),
    "capped": (
        "Gemma3Text",  # Gemma 2 takes its softmax in fp32
        {"head_dim": 16, "final_logit_softcapping": 0.5, "layer_types": ["full_attention"] * 2},
    ),
}  # fmt: skip

ADAPTERS: dict[str, dict[str, Any]] = {
    "head": {"target_modules": ["lm_head"]},
    "head and others": {"target_modules": ["lm_head", "q_proj"], "use_rslora": True},
    "trained beside": {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]},
}


def randomised(model: nn.Module) -> nn.Module:
    """Biases, and adapters that start at zero, as if they had learned something."""
    generator = torch.Generator().manual_seed(3)
    for name, parameter in model.named_parameters():
        if name.endswith("bias") or "lora_B" in name or "modules_to_save" in name:
            noise = torch.randn(parameter.shape, dtype=torch.float64, generator=generator)
            parameter.data.add_(0.3 * noise.to(parameter.dtype))
    return model


def gradients(model: nn.Module, objective: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    objective.backward()
    return {name: value.grad.clone() for name, value in model.named_parameters() if value.grad is not None}


def compare(model: nn.Module, documents: list[Tensor], batch: Any) -> None:
    attention.install_backend(model, "sdpa")
    with KeepFloat64():
        with attention.native_attention(model):
            logits = torch.cat([model(input_ids=ids[None]).logits[0, :-1] for ids in documents])
        own = F.cross_entropy(logits, torch.cat([ids[1:] for ids in documents]), reduction="sum")
        expected = gradients(model, own)
        result = LossModel(model)(batch)
        found = gradients(model, result.objective)
    assert result.loss.item() == pytest.approx(own.item(), rel=1e-10)
    assert found.keys() == expected.keys() == {n for n, value in model.named_parameters() if value.requires_grad}
    for name, gradient in expected.items():
        assert gradient.any(), name
        torch.testing.assert_close(found[name], gradient, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("kind", HEADS)
def test_loss_and_gradients_are_the_models_own(
    kind: str, make_model: Callable[..., Any], make_documents: Any, pack: Any
) -> None:
    architecture, settings = HEADS[kind]
    documents = make_documents(6, 11)
    compare(randomised(make_model(architecture, **settings)), documents, pack(documents))


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("kind", ADAPTERS)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_an_adapted_head_is_trained_and_counted(
    kind: str, tied: bool, make_model: Callable[..., Any], make_documents: Any, pack: Any
) -> None:
    adapted = adapt(make_model("Llama", tie_word_embeddings=tied), **ADAPTERS[kind])
    documents = make_documents(6, 11)
    compare(adapted, documents, pack(documents))


def test_an_adapted_head_keeps_its_bias(make_model: Callable[..., Any], make_documents: Any, pack: Any) -> None:
    documents = make_documents(6, 11)
    compare(adapt(randomised(make_model("Phi")), target_modules=["lm_head"]), documents, pack(documents))


def adapt(model: nn.Module, **settings: Any) -> nn.Module:
    torch.manual_seed(0)
    adapted = get_peft_model(model, LoraConfig(r=3, lora_alpha=5, **settings), autocast_adapter_dtype=False)
    return unwrap_peft(randomised(adapted.double()))


@pytest.mark.parametrize("kind", ["head", "trained beside"])
def test_a_head_with_a_disabled_adapter_is_the_base_head(kind: str, make_model: Callable[..., Any]) -> None:
    model = make_model("Llama", tie_word_embeddings=False)
    before = model.lm_head.weight.detach().clone()
    adapted = get_peft_model(model, LoraConfig(r=3, **ADAPTERS[kind]))
    inside = unwrap_peft(randomised(adapted))
    assert not torch.equal(read_output_head(inside).weight, before)
    with adapted.disable_adapter():
        assert torch.equal(read_output_head(inside).weight, before)


def test_a_merged_adapter_is_counted_once(make_model: Callable[..., Any]) -> None:
    model = adapt(make_model("Llama", tie_word_embeddings=False), target_modules=["lm_head"])
    apart = read_output_head(model).weight.detach().clone()
    model.lm_head.merge()
    torch.testing.assert_close(read_output_head(model).weight, apart)


def test_on_bf16_weights_an_adapter_is_fp32(make_model: Callable[..., Any]) -> None:
    model = make_model("Llama", dtype=torch.bfloat16, tie_word_embeddings=False)
    inside = unwrap_peft(randomised(get_peft_model(model, LoraConfig(r=3, target_modules=["lm_head"]))))
    layer = inside.lm_head
    with torch.autocast("cpu", torch.bfloat16):
        weight = read_output_head(inside).weight
    delta = layer.lora_B["default"].weight.double() @ layer.lora_A["default"].weight.double() * layer.scaling["default"]
    assert weight.dtype == torch.float32
    torch.testing.assert_close(weight.double(), layer.base_layer.weight.double() + delta, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("settings", "key"),
    [
        ({"use_dora": True}, r"adapter\.targets"),
        ({"lora_bias": True}, r"adapter\.targets"),
        ({"lora_dropout": 0.1}, r"adapter\.dropout: 0\.1"),
    ],
    ids=["dora", "bias", "dropout"],
)
def test_an_adapter_variant_on_the_head_is_an_error(
    settings: dict[str, Any], key: str, make_model: Callable[..., Any]
) -> None:
    model = make_model("Phi") if "lora_bias" in settings else make_model("Llama", tie_word_embeddings=False)
    inside = unwrap_peft(get_peft_model(model, LoraConfig(target_modules=["lm_head"], **settings)))
    with pytest.raises(WhetError, match=key):
        read_output_head(inside)


class Doubling(nn.Linear):
    def forward(self, hidden: Tensor) -> Tensor:
        return 2 * super().forward(hidden)


def test_a_head_that_is_not_linear_is_an_error(make_model: Callable[..., Any]) -> None:
    model = make_model("Llama")
    model.lm_head = Doubling(32, 64, bias=False)
    with pytest.raises(WhetError, match=r"model\.path: the output head of this model is a Doubling"):
        read_output_head(model)


def test_rope_settings_of_a_nested_text_config_are_found() -> None:
    import transformers

    text = {
        "vocab_size": 64, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "head_dim": 8,
        "num_attention_heads": 2, "num_key_value_heads": 1, "final_logit_softcapping": 7.0,
    }  # fmt: skip
    image = {
        "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28,
        "patch_size": 14,
    }  # fmt: skip
    config = transformers.Gemma3Config(text_config=text, vision_config=image, mm_tokens_per_image=4)
    head = read_output_head(transformers.Gemma3ForConditionalGeneration(config))
    assert (head.weight.shape, head.bias, head.scale, head.cap) == ((64, 16), None, 1.0, 7.0)
