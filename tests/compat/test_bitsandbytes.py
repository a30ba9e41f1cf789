"""What whet expects of bitsandbytes' packed weights and operators."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest
import torch

MODULE = "bitsandbytes_private"

pytest.importorskip("bitsandbytes")


@pytest.fixture
def layer() -> Any:
    from bitsandbytes.nn import Linear4bit, Params4bit

    packed = Linear4bit(64, 8, bias=False, compute_dtype=torch.float32, quant_type="nf4")
    values = torch.randn(8, 64, generator=torch.Generator().manual_seed(0))
    packed.weight = Params4bit(values, requires_grad=False, compress_statistics=True, quant_type="nf4", module=packed)
    return packed.to("cpu")


def test_nf4_weights_are_recognised(private: ModuleType, layer: Any) -> None:
    assert private.is_double_quantized_nf4(private.quant_state(layer.weight))
    assert private.quant_state(torch.ones(1)) is None
    assert layer.weight.quant_state.shape == (8, 64)


def test_parts_are_dequantized_as_bitsandbytes_does(private: ModuleType, layer: Any) -> None:
    from bitsandbytes.functional import dequantize_4bit

    found = private.dequantize_nf4(private.nf4_parts(layer.weight), (8, 64), torch.float32)
    torch.testing.assert_close(found, dequantize_4bit(layer.weight.data, layer.weight.quant_state), rtol=0, atol=0)


def test_the_layer_asks_whether_to_repack_on_cpu(private: ModuleType, layer: Any) -> None:
    assert hasattr(layer, "support_avx512bf16_for_cpu")
    private.disable_cpu_repacking(layer)
    assert layer.support_avx512bf16_for_cpu is False


def test_the_product_with_a_packed_weight_is_an_operator(private: ModuleType) -> None:
    assert torch.ops.bitsandbytes.gemm_4bit.default.name() == private.GEMM_4BIT_OP
