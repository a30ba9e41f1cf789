"""4-bit layers with recompute, offload and compile: the same gradients."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils._python_dispatch import TorchDispatchMode

from whet.execution import offload
from whet.execution.transform import transform_layers
from whet.model import attention
from whet.model.config import AdapterConfig
from whet.model.lora.peft_adapters import add_adapter, unwrap_peft
from whet.model.loss.loss_model import LossModel
from whet.model.quantize import quantize_
from whet.parallel.config import ParallelConfig

pytest.importorskip("bitsandbytes")
pytestmark = pytest.mark.usefixtures("fresh_compiler")

Make = Callable[..., Any]


def make(layers: int = 2, backend: str = "sdpa", dtype: torch.dtype = torch.float32) -> LossModel:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=64, hidden_size=64, intermediate_size=128, num_hidden_layers=layers, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64,
    )  # fmt: skip
    torch.manual_seed(0)
    model: nn.Module = LlamaForCausalLM(config).to(dtype).requires_grad_(False)
    quantize_(model, torch.device("cpu"))
    attention.install_backend(model, backend)
    model = add_adapter(model, AdapterConfig(rank=4, dropout=0.2 if backend == "sdpa" else 0.0), seed=0)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.1)
    return LossModel(unwrap_peft(model)).train()


def gradients(root: LossModel, batch: Any) -> list[Tensor]:
    torch.manual_seed(7)
    result = root(batch)
    result.objective.backward()
    found = [parameter.grad for parameter in root.parameters() if parameter.requires_grad]
    assert all(gradient is not None for gradient in found)
    return [result.loss, *found]  # type: ignore[list-item]


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize("kept", ["none", "activations"])
def test_recompute_and_offload_keep_gradients_of_4_bit_layers(
    make_batch: Make, recompute: Any, kept: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(offload, "_MIN_BYTES", 1)  # everything is offloaded
    plain, changed = make(), make()
    transform_layers(changed.language_model, ParallelConfig(recompute=recompute, offload=kept), compile=False)
    batch = make_batch([9, 20, 8])
    for one, other in zip(gradients(changed, batch), gradients(plain, batch), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-8)


class _Operations(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[str] = Counter()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen[function._schema.name] += 1
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize(("recompute", "times"), [("none", 1), ("selective", 1), ("full", 2)])
def test_selective_saves_products_with_4_bit_weights(make_batch: Make, recompute: Any, times: int) -> None:
    root = make(layers=2)
    transform_layers(root.language_model, ParallelConfig(recompute=recompute), compile=False)
    with _Operations() as counted:
        root(make_batch([9, 20, 8])).objective.backward()
    assert counted.seen["bitsandbytes::gemm_4bit"] == times * 2 * 7


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_4_bit_layers_share_one_compilation_and_compute_the_same(make_batch: Make, dtype: torch.dtype) -> None:
    """Two, because the first layer's input needs no gradient; not more with more layers."""
    counts = []
    for layers in (2, 3):
        torch._dynamo.reset()
        plain, changed = make(layers, "eager", dtype), make(layers, "eager", dtype)
        counter = CompileCounterWithBackend("aot_eager")
        transform_layers(changed.language_model, ParallelConfig(), True, counter)
        for lengths in ([9, 20, 8], [30, 10]):
            with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
                results = [root(make_batch(lengths)) for root in (plain, changed)]
            for result in results:
                result.objective.backward()
        counts.append(counter.frame_count)
        for one, other in zip(plain.parameters(), changed.parameters(), strict=True):
            if one.requires_grad:
                torch.testing.assert_close(other.grad, one.grad, rtol=1e-5, atol=1e-6)
    assert counts == [2, 2]
