"""Experts on a GPU in bf16: against the definition in fp64, without waiting for the device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from whet.model.experts.operators import ExpertsShape, ExpertsWeights, LoraPair, experts
from whet.model.experts.steps import register_activation

pytestmark = pytest.mark.gpu
TOKENS, CHOICES, EXPERTS, HIDDEN, WIDTH, RANK = 700, 4, 16, 256, 128, 16
BOUND = 0.012


class Swiglu(nn.Module):
    """With the attributes that transformers' experts have; clamped, interleaved and with biases as in gpt-oss."""

    def __init__(self, clamped: bool) -> None:
        super().__init__()
        self.has_gate, self.clamped, self.alpha, self.limit = True, clamped, 1.702, 7.0

    def _apply_gate(self, row: Tensor) -> Tensor:
        if not self.clamped:
            gate, up = row.chunk(2, dim=-1)
            return nn.functional.silu(gate) * up
        gate, up = row[..., ::2].clamp(max=self.limit), row[..., 1::2].clamp(-self.limit, self.limit)
        return (up + 1) * gate * torch.sigmoid(gate * self.alpha)


def make(clamped: bool, rank: int) -> tuple[list[Tensor], Tensor, Swiglu]:
    """x, router's weights, up, down, biases (if clamped), A and B of both."""
    draw = torch.Generator("cuda").manual_seed(0)

    def drawn(*sizes: int, scale: float = 1.0, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return (torch.randn(sizes, generator=draw, device="cuda") * scale).to(dtype)

    ups = (EXPERTS, HIDDEN, 2 * WIDTH) if clamped else (EXPERTS, 2 * WIDTH, HIDDEN)
    downs = (EXPERTS, WIDTH, HIDDEN) if clamped else (EXPERTS, HIDDEN, WIDTH)
    tensors = [drawn(TOKENS, HIDDEN), drawn(TOKENS, CHOICES).abs(), drawn(*ups, scale=0.06), drawn(*downs, scale=0.09)]
    if clamped:
        tensors += [drawn(EXPERTS, 2 * WIDTH), drawn(EXPERTS, HIDDEN)]
    for inputs, outputs in ((HIDDEN, 2 * WIDTH), (WIDTH, HIDDEN)) if rank else ():
        tensors += [
            drawn(EXPERTS * rank, inputs, scale=0.06, dtype=torch.float32),
            drawn(outputs, rank * EXPERTS, scale=0.2, dtype=torch.float32),
        ]
    index = torch.rand(TOKENS, EXPERTS - 1, generator=draw, device="cuda").topk(CHOICES, 1).indices
    return tensors, index, Swiglu(clamped)


def run(tensors: list[Tensor], index: Tensor, module: Swiglu) -> list[Tensor]:
    """The output and the gradients of all tensors."""
    leaves = [tensor.detach().requires_grad_() for tensor in tensors]
    x, weights, up, down, *others = leaves
    biases = [others.pop(0), others.pop(0)] if module.clamped else [None, None]
    lora = [LoraPair(a, b, 0.5) for a, b in zip(others[::2], others[1::2], strict=True)] or [None, None]
    shape = ExpertsShape(EXPERTS, HIDDEN, 2 * WIDTH, WIDTH, int(module.clamped))
    y = experts(x, index, weights, ExpertsWeights(shape, [up], [down], *biases, *lora, register_activation(module)))  # type: ignore[arg-type]
    torch.manual_seed(2)
    return [y.detach(), *torch.autograd.grad(y, leaves, torch.randn(y.shape, device=y.device).bfloat16().to(y.dtype))]


@pytest.mark.parametrize("rank", [RANK, 0, 200])
@pytest.mark.parametrize("clamped", [False, True])
def test_values_and_gradients_are_those_in_fp64(clamped: bool, rank: int) -> None:
    """Weights, biases and adapters get gradients; a rank of 200 is computed without kernels."""
    tensors, index, module = make(clamped, rank)
    found, expected = run(tensors, index, module), run([tensor.double() for tensor in tensors], index, module)
    for number, (own, other) in enumerate(zip(found, expected, strict=True)):
        error = ((own.double() - other).norm() / other.norm()).item()
        assert error < BOUND, (number, error)


def test_repeated_they_give_the_same_bits() -> None:
    tensors, index, module = make(False, RANK)
    first, second = run(tensors, index, module), run(tensors, index, module)
    assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True))


def test_they_do_not_wait_for_the_device() -> None:
    """So a CUDA graph can capture them."""
    tensors, index, module = make(False, RANK)
    run(tensors, index, module)
    before: Any = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        run(tensors, index, module)
    finally:
        torch.cuda.set_sync_debug_mode(before)


def test_4_bit_experts_compute_as_their_dequantized_weights_do() -> None:
    pytest.importorskip("bitsandbytes")
    from transformers import AutoModelForCausalLM, Qwen3MoeConfig

    from whet.model.quantize import dequantize_parameter, quantize_

    shape = Qwen3MoeConfig(
        vocab_size=128, hidden_size=256, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1, head_dim=64,
        num_experts=8, num_experts_per_tok=2, moe_intermediate_size=128,
    )  # fmt: skip
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(shape, dtype=torch.bfloat16).requires_grad_(False)
    quantize_(model, torch.device("cuda"))
    model = model.to("cuda").eval()
    ids = torch.arange(3, 100, device="cuda")[None]
    found = model(input_ids=ids).logits
    layer = model.model.layers[0].mlp.experts
    for name in ("gate_up_proj", "down_proj"):
        layer.register_parameter(name, nn.Parameter(dequantize_parameter(getattr(layer, name)), requires_grad=False))
    assert torch.equal(model(input_ids=ids).logits, found)
