"""4-bit weights: their definition, what is not quantized, and gradients through them."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from whet.core.errors import WhetError
from whet.model import attention, quantize
from whet.model.config import AdapterConfig, ModelConfig
from whet.model.flops import count_step_flops
from whet.model.load.pretrained import load_model
from whet.model.lora.peft_adapters import add_adapter, merge_adapter, unwrap_peft
from whet.model.loss.loss_model import LossModel
from whet.model.quantize import (
    count_weights,
    dequantize_linear,
    dequantize_weight,
    dequantized_bytes,
    is_quantized,
    quantize_,
    quantized_share,
    require_bitsandbytes,
    weight_bytes,
)

pytest.importorskip("bitsandbytes")

CPU = torch.device("cpu")
WIDE: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 128, "tie_word_embeddings": False}
FAMILIES = ["Llama", "Qwen2"]  # the second with biases
NF4 = [
    -1.0, -0.6961928, -0.5250731, -0.3949175, -0.2844414, -0.1847734, -0.0910500, 0.0,
    0.0795803, 0.1609302, 0.2461123, 0.3379152, 0.4407098, 0.5626170, 0.7229568, 1.0,
]  # fmt: skip
"""The quantiles of a normal distribution that the paper on QLoRA lists, to seven digits."""


@pytest.fixture
def make(make_model: Callable[..., Any]) -> Callable[..., Any]:
    """A model in 4 bits, with rows of whole blocks."""

    def build(architecture: str = "Llama", dtype: torch.dtype = torch.float32, **settings: Any) -> Any:
        model = make_model(architecture, dtype, **{**WIDE, **settings}).requires_grad_(False)
        quantize_(model, CPU)
        return model

    return build


def by_definition(weight: Tensor) -> tuple[Tensor, Tensor]:
    """The nearest of the sixteen values, times the largest of each 64 numbers; and that largest."""
    blocks = weight.double().reshape(-1, 64)
    largest = blocks.abs().amax(dim=1, keepdim=True)
    values = torch.tensor(NF4, dtype=torch.float64)
    nearest = (blocks / largest).unsqueeze(-1).sub(values).abs().argmin(dim=-1)
    return (values[nearest] * largest).reshape(weight.shape), largest.expand_as(blocks).reshape(weight.shape)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_a_weight_is_the_nearest_of_sixteen_values(make: Any, make_model: Any, dtype: torch.dtype) -> None:
    plain, packed = make_model("Llama", dtype, **WIDE), make("Llama", dtype)
    compared = 0
    for name, layer in packed.named_modules():
        if is_quantized(layer):
            found = dequantize_weight(layer)
            wanted, largest = by_definition(plain.get_submodule(name).weight)
            assert (found.dtype, found.shape) == (dtype, wanted.shape)
            # scales have 8 bits themselves; a number half-way between two values may fall to either side
            assert ((found - wanted).abs() <= 0.02 * largest).double().mean() > 0.999
            compared += found.numel()
    assert compared == 2 * (2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 128)


def test_a_layer_multiplies_with_its_dequantized_weight(make: Any) -> None:
    for layer in filter(is_quantized, make("Qwen2").modules()):
        torch.nn.init.normal_(layer.bias) if layer.bias is not None else None
        x = torch.randn(5, layer.in_features)
        wanted = nn.functional.linear(x, dequantize_weight(layer), layer.bias)
        assert torch.equal(layer(x), wanted)
        assert torch.equal(dequantize_linear(layer)(x), wanted)


def test_head_embedding_and_norms_stay_as_they_are(make: Any, make_model: Any) -> None:
    plain, packed = make_model("Llama", torch.float32, **WIDE), make()
    layers = {name for name, module in plain.named_modules() if type(module) is nn.Linear and ".layers." in name}
    assert {name for name, module in packed.named_modules() if is_quantized(module)} == layers
    assert len(layers) == 2 * 7
    kept = dict(packed.named_parameters())
    for name, parameter in plain.named_parameters():
        if name.rpartition(".")[0] not in layers:
            assert torch.equal(kept[name], parameter)


def test_trained_layers_are_not_quantized(make_model: Any) -> None:
    model = make_model("Llama", torch.float32, **WIDE).requires_grad_(False)
    model.model.layers[0].mlp.requires_grad_(True)
    quantize_(model, CPU)
    assert not any(map(is_quantized, model.model.layers[0].mlp.modules()))
    assert sum(map(is_quantized, model.modules())) == 2 * 7 - 3


def test_layers_with_partial_blocks_are_not_quantized(make: Any) -> None:
    model = make(intermediate_size=96)
    packed = {name.rpartition(".")[2] for name, module in model.named_modules() if is_quantized(module)}
    assert packed == {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj"}


def test_a_model_without_such_layers_is_refused(make_model: Any) -> None:
    model = make_model("GPT2", n_embd=64, n_layer=1, n_head=4, n_positions=64).requires_grad_(False)
    with pytest.raises(WhetError, match=r"quantize: nf4.*Remove quantize"):
        quantize_(model, CPU)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_weights_are_those_that_transformers_makes(dtype: torch.dtype) -> None:
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    from whet.model.load.builtin_models import builtin_folder

    how = BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True, bnb_4bit_compute_dtype=dtype
    )
    folder = builtin_folder("builtin:tiny")
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, quantization_config=how, device_map={"": "cpu"})
    ours = load_model(ModelConfig(path="builtin:tiny"), dtype).requires_grad_(False)
    quantize_(ours, CPU)
    other = dict(theirs.named_modules())
    for name, module in ours.named_modules():
        assert is_quantized(module) == is_quantized(other[name]), name
        if is_quantized(module):
            assert torch.equal(module.weight.data, other[name].weight.data)
            assert torch.equal(dequantize_weight(module), dequantize_weight(other[name]))


def undone(model: Any) -> Any:
    """The same model with plain layers that hold the numbers of the 4-bit ones."""
    for name in [name for name, module in model.named_modules() if is_quantized(module)]:
        model.set_submodule(name, dequantize_linear(model.get_submodule(name)))
    return model


def adapted(model: Any) -> Any:
    model = add_adapter(model, AdapterConfig(rank=4), seed=0)
    generator = torch.Generator().manual_seed(1)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.1, generator=generator)
    return model


@pytest.mark.parametrize("architecture", FAMILIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_gradients_are_those_of_plain_layers_with_the_same_numbers(
    make: Any, make_documents: Any, pack: Any, architecture: str, dtype: torch.dtype
) -> None:
    """Also after an evaluation, which on some CPUs would repack the weights for good, and end all gradients."""
    batch = pack(make_documents(20, 7))
    traces = []
    for model in (adapted(make(architecture, dtype)), adapted(undone(make(architecture, dtype)))):
        attention.install_backend(unwrap_peft(model), "sdpa")
        root = LossModel(unwrap_peft(model))
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
            with torch.no_grad():
                measured = root.eval()(batch).loss
            result = root.train()(batch)
        result.objective.backward()
        traces.append([measured, result.loss, *(weight.grad for weight in model.parameters() if weight.requires_grad)])
    for ours, theirs in zip(*traces, strict=True):
        assert ours is not None
        assert theirs.abs().max() > 0
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(traces[0][0], traces[0][1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_adapters_start_as_on_unquantized_weights(make: Any, make_model: Any, dtype: torch.dtype) -> None:
    starts = [
        {name: weight for name, weight in model.named_parameters() if weight.requires_grad}
        for model in (
            add_adapter(make("Llama", dtype), AdapterConfig(rank=4), seed=3),
            add_adapter(make_model("Llama", dtype, **WIDE), AdapterConfig(rank=4), seed=3),
        )
    ]
    assert starts[0].keys() == starts[1].keys()
    for name, weight in starts[0].items():
        assert weight.dtype == torch.float32
        assert torch.equal(weight, starts[1][name])


def test_each_weight_is_freed_before_the_next_is_quantized(make_model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model("Llama", torch.float32, **WIDE).requires_grad_(False)
    weights = [weakref.ref(m.weight) for n, m in model.named_modules() if type(m) is nn.Linear and ".layers." in n]
    alive, original = [], quantize._to_linear_4bit

    def counted(*arguments: Any) -> nn.Module:
        alive.append(sum(weight() is not None for weight in weights))
        return original(*arguments)

    monkeypatch.setattr(quantize, "_to_linear_4bit", counted)
    quantize_(model, CPU)
    assert alive == list(range(14, 0, -1))


def test_flops_are_those_of_the_plain_model(make: Any, make_model: Any) -> None:
    plain = add_adapter(make_model("Llama", torch.float32, **WIDE), AdapterConfig(rank=4), seed=0)
    packed = add_adapter(make(), AdapterConfig(rank=4), seed=0)
    assert count_step_flops(unwrap_peft(packed)) == count_step_flops(unwrap_peft(plain))


def test_weights_and_bytes_are_counted(make: Any, make_model: Any) -> None:
    plain, packed = make_model("Llama", torch.bfloat16, **WIDE), make("Llama", torch.bfloat16)
    assert sum(map(count_weights, packed.parameters())) == sum(weight.numel() for weight in plain.parameters())
    assert dequantized_bytes(packed) == dequantized_bytes(plain) == weight_bytes(plain)
    inside = sum(m.in_features * m.out_features for m in packed.modules() if is_quantized(m))
    assert quantized_share(packed) == pytest.approx(inside / sum(weight.numel() for weight in plain.parameters()))
    bits = 8 * (weight_bytes(packed) - dequantized_bytes(plain) + 2 * inside) / inside
    assert bits == pytest.approx(4 + 8 / 64 + 32 / (64 * 256), abs=0.01)  # a last fp32 scale is not full
    assert quantized_share(plain) == 0


@pytest.mark.parametrize("targets", ["all-linear", ["q_proj"]], ids=str)
def test_a_merged_model_is_plain_and_answers_like_the_adapted(make: Any, make_model: Any, targets: Any) -> None:
    model = add_adapter(make(), AdapterConfig(rank=4, targets=targets), seed=0).eval()
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.1)
    ids = torch.arange(9)[None]
    with torch.no_grad():
        wanted = model(input_ids=ids).logits
        merged = merge_adapter(model)
        torch.testing.assert_close(merged(input_ids=ids).logits, wanted, rtol=1e-5, atol=1e-5)
        other = make_model("Llama", torch.float32, **WIDE)(input_ids=ids).logits
    assert {type(m) for m in merged.modules() if isinstance(m, nn.Linear)} == {nn.Linear}
    assert (wanted - other).abs().max() > 1e-3


def test_an_adapter_around_a_layer_is_not_the_layer(make: Any) -> None:
    model = adapted(make())
    layer = unwrap_peft(model).model.layers[0].mlp.up_proj
    assert is_quantized(layer.base_layer)
    assert not is_quantized(layer)
    assert not is_quantized(nn.Linear(2, 2))


def test_without_bitsandbytes_the_extra_is_named(
    whet: Any, recipe: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    with pytest.raises(WhetError, match=r"pip install 'whet\[quantize\]'"):
        require_bitsandbytes()
    ended = whet("train", recipe, f"run.dir={tmp_path / 'run'}", "quantize=nf4", "adapter.rank=4")
    assert ended.code == 1
    assert "whet[quantize]" in ended.err
    assert "kept" not in ended.err  # before any data was prepared
