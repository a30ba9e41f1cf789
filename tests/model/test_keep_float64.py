"""KeepFloat64: fp64 models compute in fp64 throughout."""

from __future__ import annotations

import torch
from torch import nn
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from whet.model.modules import KeepFloat64


def test_a_norm_that_goes_through_fp32_stays_in_fp64_inside_the_context():
    norm = LlamaRMSNorm(64).double()
    values = torch.randn(5, 64, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    exact = values / (values.pow(2).mean(-1, keepdim=True) + norm.variance_epsilon).sqrt()
    with KeepFloat64():
        honest = norm(values)
    torch.testing.assert_close(honest, exact, rtol=1e-14, atol=1e-14)
    assert (norm(values) - exact).abs().max() > 1e-9  # outside of it the model rounds


def test_softmax_with_dtype_fp32_stays_in_fp64_inside_the_context():
    values = torch.randn(5, 64, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    with KeepFloat64():
        assert torch.equal(nn.functional.softmax(values, dim=-1, dtype=torch.float32), values.softmax(dim=-1))
        assert torch.equal(values.softmax(-1, dtype=torch.float32), values.softmax(dim=-1))
        assert values.float().double().to(torch.bfloat16).softmax(-1, dtype=torch.float32).dtype == torch.float32


def test_other_conversions_are_unchanged():
    values = torch.ones(2)
    with KeepFloat64():
        assert values.double().dtype == torch.float64
        assert values.to(torch.bfloat16).float().dtype == torch.float32
        assert values.double().to("cpu", torch.bfloat16).dtype == torch.bfloat16
        assert values.double().to(dtype=torch.float32).dtype == torch.float64
        assert values.double().float().dtype == torch.float64
        assert torch.arange(3).float().dtype == torch.float32
