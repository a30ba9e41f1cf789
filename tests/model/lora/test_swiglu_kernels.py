"""The SwiGLU kernels against their definition in fp64, in Triton's interpreter where there is no GPU."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from torch import Tensor

from whet.model.lora.swiglu import SwigluInputs, lora_swiglu, lora_swiglu_backward

ROUNDING = {torch.bfloat16: 2**-8, torch.float16: 2**-11}
# tokens, width, ranks of gate, up and down: tiles that are full and not, ranks below 16 and above a block
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SHAPES = [(64, 128, 16, 16, 16), (70, 130, 1, 3, 8), (3, 200, 64, 16, 20), (65, 64, 80, 100, 130), (0, 64, 4, 4, 4),
          (5, 900, 8, 64, 3), (3, 700, 65, 8, 8)]  # fmt: skip


def drawn(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype).to(DEVICE)


def inputs_of(shape: tuple[int, int, int, int, int], dtype: torch.dtype) -> tuple[SwigluInputs, list[Tensor]]:
    tokens, width, gate, up, down = shape
    xa = drawn((tokens, gate + up), dtype, 2)  # the two stand side by side, as a layer makes them
    inputs = SwigluInputs(
        drawn((tokens, width), dtype, 0), drawn((tokens, width), dtype, 1), xa[:, :gate], xa[:, gate:],
        drawn((width, gate), dtype, 3) / gate, drawn((width, up), dtype, 4) / up,
    )  # fmt: skip
    outer = [drawn((tokens, width), dtype, 5), drawn((tokens, down), dtype, 6), drawn((down, width), dtype, 7) / down]
    return inputs, outer


def doubled(tensors: Any) -> list[Tensor]:
    return [tensor.double() for tensor in tensors]


def check(shape: tuple[int, int, int, int, int], dtype: torch.dtype) -> None:
    from whet.model.lora.lora_kernels import lora_swiglu_triton, lora_swiglu_triton_backward

    inputs, outer = inputs_of(shape, dtype)
    before = [tensor.clone() for tensor in inputs]
    forward = lora_swiglu_triton(inputs, outer[2])
    exact = SwigluInputs(*doubled(inputs))
    true = lora_swiglu_backward(*doubled(outer), exact)
    found = lora_swiglu_triton_backward(*outer, inputs)
    for number, (one, other) in enumerate(
        zip([*forward, *found], [*lora_swiglu(exact, outer[2].double()), *true], strict=True)
    ):
        assert one.dtype == (torch.float32 if number == 6 else dtype)  # a sum over all tokens is not rounded
        assert one.shape == other.shape
        assert one.is_contiguous() or number in (4, 5)
        # sums are as exact as what they sum
        bound = 1e-5 if number in (0, 2, 3) else ROUNDING[dtype] * float(other.abs().max()) if one.numel() else 0.0
        torch.testing.assert_close(one.double(), other, rtol=ROUNDING[dtype], atol=bound)
    assert all(torch.equal(tensor, same) for tensor, same in zip(inputs, before, strict=True))
    assert found[1] is outer[0]  # in the same memory


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ROUNDING, ids=str)
@pytest.mark.parametrize("shape", [*SHAPES, (4099, 14336, 16, 16, 16)], ids=str)
def test_the_kernel_computes_the_definition(shape: Any, dtype: torch.dtype) -> None:
    check(shape, dtype)


def test_the_kernel_computes_the_definition_in_tritons_interpreter(in_tritons_interpreter: Any) -> None:
    """In fp16, because the interpreter (of Triton 3.6) multiplies the bits of bf16 numbers."""
    assert in_tritons_interpreter(__file__, "check_all()").split() == [str(len(SHAPES))]


def check_all() -> None:
    """Says how many cases were right."""
    cases = [check(shape, torch.float16) for shape in SHAPES]
    sys.stdout.write(f"{len(cases)}\n")


def test_the_definition_has_the_gradients_of_autograd() -> None:
    inputs, (d_h0, d_xa, a_down) = inputs_of((5, 6, 2, 3, 4), torch.float64)
    leaves = [inputs.gate0.clone().requires_grad_(), inputs.up0.clone().requires_grad_()]
    gate, up = leaves[0] + inputs.xa_gate @ inputs.b_gate.T, leaves[1] + inputs.xa_up @ inputs.b_up.T
    h = torch.nn.functional.silu(gate) * up
    true = torch.autograd.grad(h, leaves, d_h0 + d_xa @ a_down)
    d_gate, d_up, d_xa_both, xa_down, d_a_down = lora_swiglu_backward(d_h0, d_xa, a_down, inputs)
    there, also = lora_swiglu(inputs, a_down)
    wanted = torch.cat([true[0] @ inputs.b_gate, true[1] @ inputs.b_up], dim=1)
    pairs = [(d_gate, true[0]), (d_up, true[1]), (there, h), (d_xa_both, wanted), (d_a_down, d_xa.T @ h)]
    for found, expected in [*pairs, (xa_down, h @ a_down.T), (also, h @ a_down.T)]:
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
