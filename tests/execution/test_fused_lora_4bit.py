"""Fused adapters over 4-bit layers: the gradients of the same model with dequantized weights."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend

from whet.execution.transform import transform_layers
from whet.model import attention
from whet.model.config import AdapterConfig
from whet.model.frozen_weight import materialize_weight, weight_parts
from whet.model.lora.fuse import fuse_lora_
from whet.model.lora.peft_adapters import add_adapter, unwrap_peft
from whet.model.loss.loss_model import LossModel
from whet.parallel.config import ParallelConfig

pytestmark = pytest.mark.usefixtures("fresh_compiler")

pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")


def packed(linear: nn.Linear) -> Any:
    from bitsandbytes.nn import Linear4bit, Params4bit

    layer = Linear4bit(
        linear.in_features, linear.out_features, linear.bias is not None, torch.float32, quant_type="nf4", device="meta"
    )
    layer.weight = Params4bit(linear.weight.data, requires_grad=False, quant_type="nf4", module=layer).to("cpu")
    layer.bias = linear.bias
    return layer


def dequantized(layer: Any) -> nn.Linear:
    from bitsandbytes.functional import dequantize_4bit

    linear = nn.Linear(layer.in_features, layer.out_features, layer.bias is not None)
    linear.weight.data = dequantize_4bit(layer.weight.data, layer.weight.quant_state)
    linear.bias = layer.bias
    return linear


def roots(layers: int = 2) -> tuple[LossModel, LossModel]:
    """The same model with dequantized and with 4-bit weights, both fused."""
    import transformers

    config = transformers.Qwen2Config(
        vocab_size=64, hidden_size=64, intermediate_size=128, num_hidden_layers=layers, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64,
    )  # fmt: skip
    torch.manual_seed(0)
    small = transformers.AutoModelForCausalLM.from_config(config).requires_grad_(False)
    attention.install_backend(small, "eager")
    names = [name for name, module in small.named_modules() if isinstance(module, nn.Linear) and name != "lm_head"]
    for name in names:
        small.set_submodule(name, packed(small.get_submodule(name)))
    large = copy.deepcopy(small)
    for name in names:
        large.set_submodule(name, dequantized(large.get_submodule(name)))
    made = []
    for model in (large, small):
        adapted = add_adapter(model, AdapterConfig(rank=4), seed=0)
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(parameter, std=0.1, generator=torch.Generator().manual_seed(len(parameter)))
        made.append(LossModel(unwrap_peft(adapted)).train())
        assert fuse_lora_(made[-1]) == 3 * layers
    return made[0], made[1]


def gradients(root: LossModel, batch: Any) -> list[Tensor]:
    root(batch).objective.backward()
    return [weight.grad for weight in root.parameters() if weight.requires_grad]


@pytest.mark.parametrize("compile", [False, True])
def test_gradients_are_those_of_the_dequantized_model(make_batch: Callable[..., Any], compile: bool) -> None:
    found = []
    for root in roots():
        transform_layers(root.language_model, ParallelConfig(), compile, "aot_eager")
        found.append(gradients(root, make_batch([48])))
    for one, other in zip(*found, strict=True):
        assert one.norm() > 0
        assert torch.equal(one, other)


def test_layers_share_one_compilation_except_the_first(make_batch: Callable[..., Any]) -> None:
    _, fused = roots(4)
    counter = CompileCounterWithBackend("eager")
    transform_layers(fused.language_model, ParallelConfig(), True, counter)
    for lengths in ([48], [9, 20, 8]):
        fused(make_batch(lengths)).objective.backward()
    assert counter.frame_count == 2


def test_no_dequantized_weight_is_saved_for_the_backward_pass(make_batch: Callable[..., Any]) -> None:
    for root, saves in zip(roots(), (True, False), strict=True):
        shapes: set[tuple[int, ...]] = set()
        with torch.autograd.graph.saved_tensors_hooks(lambda t, to=shapes: to.add(tuple(t.shape)) or t, lambda t: t):
            root(make_batch([48])).objective.backward()
        assert bool(shapes & {(32, 64), (128, 64), (64, 128)}) is saves  # k and v, gate and up, down


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_weight_is_dequantized_as_by_bitsandbytes(dtype: torch.dtype) -> None:
    layer = packed(nn.Linear(128, 192, bias=False).to(dtype))
    found = materialize_weight(weight_parts(layer), 192, 128, dtype)
    assert found.dtype == dtype
    assert torch.equal(found, dequantized(layer).weight)
