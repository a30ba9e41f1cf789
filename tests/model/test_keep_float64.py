"""KeepFloat64: fp64 models compute in fp64 throughout."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from tiny_architectures import tiny_config, tiny_model
from whet.model.config import ModelConfig
from whet.model.load.pretrained import load_model
from whet.model.modules import KeepFloat64


class NarrowedOperations(TorchDispatchMode):
    """Records the operations of ATen, forward and backward, that make a narrower tensor of an fp64 one."""

    def __init__(self) -> None:
        super().__init__()
        self.found: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        inside, outside = ([t for t in tree_leaves(each) if isinstance(t, Tensor)] for each in ((args, kwargs), out))
        if any(t.dtype == torch.float64 for t in inside) and any(
            t.is_floating_point() and t.dtype.itemsize < 8 for t in outside
        ):
            self.found.add(str(func))
        return out


@pytest.mark.parametrize("kind", ["glm4_moe", "rwkv", "hunyuan_v1_moe", "ernie4_5_moe", "nemotron_h", "gpt_oss"])
def test_no_operation_of_an_fp64_model_is_narrower(kind: str) -> None:
    """`.type(torch.float32)` in routers, states made with dtype=torch.float32, weights that stay in fp32."""
    model = tiny_model(kind)
    with KeepFloat64(), NarrowedOperations() as narrowed:
        model(input_ids=torch.arange(5, 12)[None], use_cache=False).logits.logsumexp(-1).sum().backward()
    assert narrowed.found == set()


@pytest.mark.parametrize("kind", ["hunyuan_v1_moe", "ernie4_5_moe"])
def test_every_weight_of_a_model_loaded_in_fp64_is_fp64(kind: str, tmp_path: Any) -> None:
    tiny_config(kind).save_pretrained(tmp_path)
    model = load_model(ModelConfig(path=f"random:{tmp_path}"), torch.float64)
    assert {weight.dtype for weight in model.parameters()} == {torch.float64}


def test_a_norm_that_goes_through_fp32_stays_in_fp64_inside_the_context():
    norm = LlamaRMSNorm(64).double()
    values = torch.randn(5, 64, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    exact = values / (values.pow(2).mean(-1, keepdim=True) + norm.variance_epsilon).sqrt()
    with KeepFloat64():
        honest = norm(values)
    torch.testing.assert_close(honest, exact, rtol=1e-14, atol=1e-14)
    assert (norm(values) - exact).abs().max() > 1e-9  # outside of it the model rounds


_VALUES = torch.randn(3, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
_NARROW = torch.ones(4, 4)


@pytest.mark.parametrize(
    "convert",
    [
        lambda x: x.float(), lambda x: x.to(torch.float32), lambda x: x.to("cpu", torch.float32),
        lambda x: x.to(dtype=torch.float32), lambda x: x.to(_NARROW), lambda x: x.to(tensor=_NARROW),
        lambda x: x.type(torch.float32), lambda x: x.type(torch.FloatTensor), lambda x: x.type("torch.FloatTensor"),
        lambda x: x.type_as(_NARROW), lambda x: x.clone().to(torch.float32, copy=True),
    ],
    ids=range(11),
)  # fmt: skip
def test_conversions_to_fp32_keep_the_value(convert: Callable[[Tensor], Tensor]) -> None:
    assert not torch.equal(convert(_VALUES).double(), _VALUES)
    with KeepFloat64():
        assert torch.equal(convert(_VALUES), _VALUES)


@pytest.mark.parametrize(
    "compute",
    [
        lambda x, dtype: nn.functional.softmax(x, dim=-1, dtype=dtype), lambda x, dtype: x.softmax(-1, dtype),
        lambda x, dtype: torch.log_softmax(x, -1, dtype=dtype), lambda x, dtype: x.sum(-1, dtype=dtype),
        lambda x, dtype: x.mean(dtype=dtype), lambda x, dtype: torch.cumsum(x, 0, dtype=dtype),
        lambda x, dtype: torch.zeros_like(x, dtype=dtype) + 0.1, lambda x, dtype: x.new_full((2,), 0.1, dtype=dtype),
        lambda x, dtype: torch.linalg.vector_norm(x, dtype=dtype),
    ],
    ids=range(9),
)  # fmt: skip
def test_functions_asked_for_fp32_compute_in_fp64(compute: Callable[[Tensor, torch.dtype], Tensor]) -> None:
    with KeepFloat64():
        assert torch.equal(compute(_VALUES, torch.float32), compute(_VALUES, torch.float64))


@pytest.mark.parametrize(
    "multiply",
    [
        lambda x, w: x @ w, lambda x, w: w @ x.T, torch.nn.functional.linear,
        lambda x, w: torch.einsum("tk,ku->tu", x, w),
        lambda x, w: nn.functional.linear(x, weight=w), lambda x, w: torch.bmm(x[None], w[None]),
    ],
    ids=range(6),
)  # fmt: skip
def test_products_of_fp64_and_fp32_are_fp64(multiply: Callable[[Tensor, Tensor], Tensor]) -> None:
    with pytest.raises(RuntimeError):
        multiply(_VALUES, _NARROW)
    with KeepFloat64():
        assert torch.equal(multiply(_VALUES, _NARROW), multiply(_VALUES, _NARROW.double()))


def test_other_conversions_are_unchanged():
    values = torch.ones(2)
    with KeepFloat64():
        assert values.double().dtype == torch.float64
        assert values.to(torch.bfloat16).float().dtype == torch.float32
        assert values.double().to("cpu", torch.bfloat16).dtype == torch.bfloat16
        assert torch.arange(3).float().dtype == torch.float32
        assert values.double().to(torch.bfloat16).softmax(-1, dtype=torch.float32).dtype == torch.float32
        assert values.double()[None, 0:1].type() == "torch.DoubleTensor"
