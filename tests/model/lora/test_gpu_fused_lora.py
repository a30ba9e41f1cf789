"""Fused LoRA on CUDA: as exact as peft, compiled or not, in less memory, bit-identical from run to run."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from whet.model.config import AdapterConfig
from whet.model.fp8.conversion import convert_to_fp8_, fp8_unsupported_reason
from whet.model.lora.fuse import fuse_lora_
from whet.model.lora.peft_adapters import add_adapter, unwrap_peft
from whet.model.modules import KeepFloat64, decoder_layers

pytestmark = pytest.mark.gpu

Make = Callable[..., Any]
WIDE = {"hidden_size": 512, "intermediate_size": 1408, "num_attention_heads": 8, "num_key_value_heads": 2}


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def made(make_model: Make, architecture: str, dtype: torch.dtype, rank: int, **settings: Any) -> Any:
    model = make_model(architecture, dtype, **{**WIDE, "max_position_embeddings": 1024, **settings})
    model = add_adapter(model, AdapterConfig(rank=rank), seed=0).to("cuda").train()
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.02)
    return _as_loaded(model)


def _as_loaded(model: Any) -> Any:
    """Whatever type a model is loaded in, what turns positions stays in fp32; transformers 5.17 fails otherwise."""
    for module in model.modules():
        for name in ("inv_freq", "original_inv_freq"):
            if isinstance(getattr(module, name, None), Tensor):
                setattr(module, name, getattr(module, name).float())
    return model


def learn(model: Any, mixed: torch.dtype | None, tokens: int = 900) -> list[Tensor]:
    generator = torch.Generator("cuda").manual_seed(0)
    ids = torch.randint(3, 64, (1, tokens), device="cuda", generator=generator)
    outer = torch.randn(tokens, 64, device="cuda", generator=generator) * 64
    model.zero_grad()
    with torch.autocast("cuda", mixed) if mixed else KeepFloat64():
        logits = model(input_ids=ids, use_cache=False).logits[0]
    (logits.double() * outer).sum().backward()
    return [logits.detach(), *(weight.grad for weight in model.parameters() if weight.requires_grad)]


def errors(found: list[Tensor], true: list[Tensor]) -> list[float]:
    return [((a.double() - b).norm() / b.norm()).item() for a, b in zip(found, true, strict=True)]


@pytest.mark.parametrize("compile", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("architecture", "rank"), [("Llama", 16), ("Llama", 20), ("Qwen2", 64), ("Gemma", 8)])
def test_in_16_bits_the_error_is_no_larger_than_pefts(
    make_model: Make, architecture: str, rank: int, dtype: torch.dtype, compile: bool
) -> None:
    plain = made(make_model, architecture, dtype, rank, **({"head_dim": 64} if architecture == "Gemma" else {}))
    fused, exact = copy.deepcopy(plain), _as_loaded(copy.deepcopy(plain).double())
    assert fuse_lora_(fused) > 0
    if compile:
        for layer in decoder_layers(unwrap_peft(fused)):
            layer.forward = torch.compile(layer.forward, dynamic=False, fullgraph=True)
    true, one, other = learn(exact, None), learn(plain, dtype), learn(fused, dtype)
    assert [tensor.dtype for tensor in one] == [tensor.dtype for tensor in other]
    before, after = errors(one, true), errors(other, true)
    assert sum(after) <= 1.1 * sum(before)
    assert all(b <= 1.5 * a for a, b in zip(before, after, strict=True)), list(zip(before, after, strict=True))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_in_fp32_and_fp64_results_are_pefts(make_model: Make, dtype: torch.dtype) -> None:
    plain = _as_loaded(made(make_model, "Llama", dtype, 16).to(dtype))
    fused = copy.deepcopy(plain)
    assert fuse_lora_(fused) == 6
    bound = 1e-12 if dtype == torch.float64 else 1e-4
    assert max(errors(learn(fused, None), [found.double() for found in learn(plain, None)])) <= bound


@pytest.mark.parametrize("compile", [False, True])
@pytest.mark.parametrize("convert_if", [lambda *sizes: True, lambda high, wide: high >= wide], ids=["all", "some"])
def test_in_fp8_the_error_is_that_of_the_casts(make_model: Make, convert_if: Any, compile: bool) -> None:
    reason = fp8_unsupported_reason(torch.device("cuda"))
    if reason is not None:
        pytest.skip(reason)
    plain = made(make_model, "Llama", torch.bfloat16, 16)
    fused, exact = copy.deepcopy(plain), _as_loaded(copy.deepcopy(plain).double())
    assert fuse_lora_(fused) == 6
    for model in (plain, fused):
        convert_to_fp8_(unwrap_peft(model), convert_if=convert_if)
    if compile:
        for layer in decoder_layers(unwrap_peft(fused)):
            layer.forward = torch.compile(layer.forward, dynamic=False, fullgraph=True)
    true, one, other = learn(exact, None), learn(plain, torch.bfloat16), learn(fused, torch.bfloat16)
    before, after = errors(one, true), errors(other, true)
    assert min(before) > 0.005
    assert sum(after) <= 1.1 * sum(before)
    assert all(b <= 1.5 * a for a, b in zip(before, after, strict=True)), list(zip(before, after, strict=True))


@pytest.mark.parametrize("eight_bit", [False, True])
def test_two_runs_are_bit_equal(make_model: Make, eight_bit: bool) -> None:
    model = made(make_model, "Llama", torch.bfloat16, 16)
    fuse_lora_(model)
    if eight_bit:
        if fp8_unsupported_reason(torch.device("cuda")) is not None:
            pytest.skip("this card has no 8-bit products")
        convert_to_fp8_(unwrap_peft(model), convert_if=lambda *sizes: True)
    one, other = learn(model, torch.bfloat16), learn(model, torch.bfloat16)
    assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def kept_by(mlp: Any, x: Tensor) -> int:
    """Bytes that stay allocated between the forward and the backward pass, without the output."""
    before = torch.cuda.memory_allocated()
    with torch.autocast("cuda", torch.bfloat16):
        y = mlp(x)
    kept = torch.cuda.memory_allocated() - before - y.nbytes
    y.sum().backward()
    return kept


def test_an_mlp_saves_two_intermediate_matrices(make_model: Make) -> None:
    plain = made(make_model, "Llama", torch.bfloat16, 16, num_hidden_layers=1)
    fused = copy.deepcopy(plain)
    fuse_lora_(fused)
    x = torch.randn(1, 8192, 512, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    wide = 8192 * 1408 * 2
    for model, most in ((plain, 9.0), (fused, 2.2)):
        mlp = decoder_layers(unwrap_peft(model))[0].mlp
        kept_by(mlp, x)  # the first time kernels are compiled and libraries take their room
        assert kept_by(mlp, x) <= most * wide
