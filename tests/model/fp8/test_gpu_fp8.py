"""fp8 products on CUDA: against fp64, against the emulated ones, compiled, in layers of realistic size."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from whet.model.fp8.conversion import convert_to_fp8_, fp8_unsupported_reason
from whet.model.fp8.linear import FP8Linear

pytestmark = pytest.mark.gpu

Make = Callable[..., Any]
SIZES = {"hidden_size": 2048, "intermediate_size": 4096, "num_attention_heads": 16, "num_key_value_heads": 16}
TOKENS = 1000  # no multiple of 16


@pytest.fixture(autouse=True)
def _able() -> Iterator[None]:
    reason = fp8_unsupported_reason(torch.device("cuda", 0))
    if reason is not None:
        pytest.skip(reason)
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def passes(function: Callable[..., Tensor], dtype: torch.dtype, device: str = "cuda") -> list[Tensor]:
    """Output and both gradients, in fp64 on the CPU."""
    draw = torch.Generator().manual_seed(0)
    input = torch.randn(TOKENS, 2048, generator=draw).bfloat16().to(device, dtype).requires_grad_()
    weight = (torch.randn(4096, 2048, generator=draw) / 45).bfloat16().to(device, dtype).requires_grad_()
    d_output = (1e-6 * torch.randn(TOKENS, 4096, generator=draw)).bfloat16().to(device, dtype)
    output = function(input, weight)
    return [each.detach().cpu().double() for each in (output, *torch.autograd.grad(output, (input, weight), d_output))]


def through_layer(emulate: bool) -> Callable[..., Tensor]:
    def run(input: Tensor, weight: Tensor) -> Tensor:
        layer = FP8Linear(2048, 4096, bias=False, device="meta")
        layer.emulate = emulate
        del layer.weight
        layer.weight = weight
        return layer(input)

    return run


def errors(found: list[Tensor], wanted: list[Tensor]) -> list[float]:
    return [((a - b).norm() / b.norm()).item() for a, b in zip(found, wanted, strict=True)]


def test_real_products_are_what_was_emulated() -> None:
    exact = passes(lambda input, weight: input @ weight.T, torch.float64)
    real = passes(through_layer(emulate=False), torch.bfloat16)
    emulated = passes(through_layer(emulate=True), torch.bfloat16)
    assert all(0.01 < error < 0.1 for error in errors(real, exact))
    assert all(error < 0.005 for error in errors(real, emulated))  # sums in another order, rounded to bf16


@pytest.mark.parametrize("weights", [torch.bfloat16, torch.float32])
def test_a_compiled_layer_computes_what_an_uncompiled_one_does(make_model: Make, weights: Any) -> None:
    def run(convert: bool, compile: bool) -> list[Tensor]:
        model = make_model("Llama", weights, **SIZES).cuda().train()
        if convert:
            assert len(convert_to_fp8_(model, convert_if=lambda *sizes: True)) == 14
        draw = torch.Generator().manual_seed(1)
        hidden = torch.randn(1, TOKENS, 2048, generator=draw).bfloat16().cuda().requires_grad_()
        places = model.model.rotary_emb(hidden, torch.arange(TOKENS, device="cuda")[None])
        layer = model.model.layers[0]
        function = torch.compile(layer, dynamic=False) if compile else layer
        with torch.autocast("cuda", torch.bfloat16):
            output = function(hidden, position_embeddings=places)
        output.float().square().mean().backward()
        found = [hidden.grad, *(parameter.grad for parameter in layer.parameters())]
        return [output.detach().double(), *(each.double() for each in found)]

    plain, eager, fast = run(False, False), run(True, False), run(True, True)
    # what is not rounded to bf16 between is scaled otherwise, so bits differ; the distance from 16 bits does not
    by_layer = zip(errors(fast, plain), errors(eager, plain), strict=True)
    assert all(compiled < 1.1 * uncompiled + 0.01 for compiled, uncompiled in by_layer)
    assert all(error < 0.15 for error in errors(fast, plain))
    assert max(errors(fast, plain)) > 0.02  # it was 8 bits


def test_zeros_and_nonfinite_values_propagate_on_cuda() -> None:
    layer = FP8Linear(2048, 2048, bias=False, device="cuda", dtype=torch.bfloat16)
    fast: Any = torch.compile(layer, dynamic=False)
    input = torch.zeros(32, 2048, device="cuda", dtype=torch.bfloat16)
    assert torch.equal(fast(input), torch.zeros_like(input))
    for broken in (float("nan"), float("inf")):
        input[3, 5] = broken
        for each in (layer, fast):
            assert not torch.isfinite(each(input)[3]).any()


def test_eval_mode_is_16_bit() -> None:
    layer = nn.Linear(2048, 2048, device="cuda", dtype=torch.bfloat16)
    input = torch.randn(40, 2048, device="cuda", dtype=torch.bfloat16)
    wanted = layer(input)
    layer.__class__ = FP8Linear
    assert torch.equal(layer.eval()(input), wanted)
    assert not torch.equal(layer.train()(input), wanted)
