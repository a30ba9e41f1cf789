"""The memory estimate beside real tensors on a CPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from whet.config import Config
from whet.execution.transform import transform_layers
from whet.fit.estimate import LargestBatch, Sharding, estimate_memory, loss_bytes, training_size
from whet.fit.fake_model import FakeModel, build_fake_model
from whet.fit.model_trace import saved_in_eager, trace_model
from whet.model import attention
from whet.model.load.pretrained import load_model
from whet.model.lora.peft_adapters import add_adapter, unwrap_peft
from whet.model.loss.loss_model import LossModel
from whet.model.quantize import quantize_, weight_bytes
from whet.training.optimizers.factory import build_optimizer, gradient_bytes
from whet.training.precision import precision_policy, resolve_precision

CPU = torch.device("cpu")


def recipe(path: str, **sections: Any) -> Config:
    parts = {"run": {"name": "x", "dir": "unused"}, "data": {"sources": [{"path": "builtin:orders"}]}, **sections}
    return Config.model_validate({**parts, "model": {"path": path, **sections.get("model", {})}})


def real_model(config: Config) -> LossModel:
    """What a run on a CPU would train."""
    precision = resolve_precision(config, CPU)
    model = load_model(config.model, precision.weights, CPU)
    if config.quantize is not None:
        quantize_(model.requires_grad_(False), CPU)
    if config.adapter is not None:
        model = unwrap_peft(add_adapter(model, config.adapter, 0))
    attention.install_backend(model, "sdpa")
    return LossModel(model.train())


def fake_model(config: Config, **kwargs: Any) -> FakeModel:
    precision = precision_policy(config, "fp32" if config.train.precision == "auto" else config.train.precision)
    return build_fake_model(config, precision, **{"gpu": None, "compiles": False, **kwargs})


LORA = {"adapter": {"rank": 4, "alpha": 8}}


@pytest.mark.parametrize(
    "sections",
    [
        {},
        {"train": {"optimizer": {"name": "adamw8bit"}}},
        {"train": {"optimizer": {"name": "muon"}}},
        {"train": {"precision": "bf16", "optimizer": {"name": "adamw16bit"}}, "model": {"dtype": "bf16"}},
        LORA,
        {**LORA, "train": {"precision": "bf16"}},
    ],
    ids=["adamw", "adamw8bit", "muon", "bf16-adamw16bit", "lora", "lora-bf16"],
)
def test_weights_gradients_and_optimizer_state_equal_those_of_a_real_run(sections: dict[str, Any]) -> None:
    config = recipe("builtin:tiny", **sections)
    real = real_model(config)
    optimizer = build_optimizer(real, config.train.optimizer, 0)
    for parameter in real.trainable_parameters:
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    states = [value for state in optimizer.state.values() for value in state.values() if isinstance(value, Tensor)]

    found = training_size(config, fake_model(config))

    assert found.weights == sum(tensor.nbytes for tensor in (*real.parameters(), *real.buffers()))
    assert found.gradients == gradient_bytes(optimizer)
    assert found.optimizer == sum(state.nbytes for state in states)


def test_gradients_of_16_bit_weights_are_summed_in_fp32_over_micro_batches() -> None:
    config = recipe("builtin:tiny", model={"dtype": "bf16"}, train={"precision": "bf16"})
    once, summed = (training_size(config, fake_model(config), count).gradients for count in (1, 2))
    assert summed == 2 * once


def test_four_bit_weights_equal_those_of_bitsandbytes() -> None:
    pytest.importorskip("bitsandbytes")
    config = recipe("builtin:tiny", **LORA, quantize="nf4")
    real = real_model(config)
    assert fake_model(config).weights == weight_bytes(real) + sum(buffer.nbytes for buffer in real.buffers())


class _Saved:
    def __init__(self, root: nn.Module) -> None:
        self.bytes = 0
        self._seen = {tensor.untyped_storage().data_ptr() for tensor in (*root.parameters(), *root.buffers())}
        self._kept: list[Tensor] = []

    def pack(self, tensor: Tensor) -> Tensor:
        if tensor.untyped_storage().data_ptr() not in self._seen:
            self._seen.add(tensor.untyped_storage().data_ptr())
            self._kept.append(tensor)
            self.bytes += tensor.untyped_storage().nbytes()
        return tensor


@contextmanager
def counted(root: nn.Module) -> Iterator[_Saved]:
    saved = _Saved(root)
    with saved_tensors_hooks(saved.pack, lambda tensor: tensor):
        yield saved


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize("sections", [{}, LORA, {"train": {"precision": "bf16"}}], ids=["fp32", "lora", "bf16"])
def test_saved_activations_equal_those_of_a_real_forward_pass(sections: dict[str, Any], recompute: str) -> None:
    config = recipe("builtin:tiny", **sections, parallel={"recompute": recompute})
    real, tokens = real_model(config), 96
    transform_layers(real.language_model, config.parallel, compile=False)
    ids, bounds = torch.zeros(tokens, dtype=torch.int64), torch.tensor([0, tokens], dtype=torch.int32)
    with resolve_precision(config, CPU).autocast(CPU), counted(real) as saved:
        hidden = real.hidden(ids, torch.arange(tokens), bounds, tokens, (0, tokens))

    assert hidden.requires_grad
    assert saved_in_eager(fake_model(config), tokens, config.parallel) == saved.bytes


def test_saved_activations_grow_with_the_tokens_and_recompute_saves_the_layers_input_alone() -> None:
    config = recipe("builtin:tiny", train={"precision": "bf16"})
    fake = fake_model(config, gpu="nvidia", compiles=True)
    before = [module.forward for module in fake.root.modules()]
    one, two = trace_model(fake, 128, "none"), trace_model(fake, 256, "none")
    assert two.saved == 2 * one.saved
    assert one.extrapolated(two, 256) == two
    full, layer = trace_model(fake, 128, "full").layers[0], one.layers[0]
    assert full.saved == full.hidden < layer.saved
    assert sum(each.flops for each in full.backward.operations) > sum(each.flops for each in layer.backward.operations)
    assert [module.forward for module in fake.root.modules()] == before, "a trace leaves the model as it was"


def test_products_in_the_graph_are_those_of_the_flop_count() -> None:
    """Forward, input gradient and weight gradient of every matrix; 2 FLOPs for each element and token."""
    config = recipe("builtin:tiny", train={"precision": "bf16"})
    [layer] = trace_model(fake_model(config, gpu="nvidia", compiles=True), 64, "none").layers
    matrices = sum(
        weight.numel()
        for weight in real_model(config).language_model.model.layers[0].parameters()
        if weight.ndim == 2  # type: ignore[union-attr, index]
    )
    products = [sum(each.flops for each in cost.operations) for cost in (layer.forward, layer.backward)]
    assert products == [2 * 64 * matrices, 4 * 64 * matrices]


def test_sharding_divides_what_can_be_divided() -> None:
    config = recipe("builtin:tiny", train={"precision": "bf16"})
    fake = fake_model(config, gpu="nvidia", compiles=True)
    trace, batch = trace_model(fake, 64, "none"), LargestBatch(64, 32)
    alone, shared = (estimate_memory(config, fake, trace, batch, Sharding(n, world=n)) for n in (1, 4))
    assert shared.weights == -(-alone.weights // 4)
    assert shared.optimizer == -(-alone.optimizer // 4)
    several = estimate_memory(config, fake, trace, LargestBatch(64, 32, micro_batches=2), Sharding(4, world=4))
    assert several.gradients >= training_size(config, fake).trained * 4, "summed unsharded until the last micro-batch"


def test_the_loss_holds_one_chunk_of_logits() -> None:
    config = recipe("random:llama-8b", **LORA)
    fake = build_fake_model(config, precision_policy(config, "bf16"), gpu="nvidia", compiles=True)
    few, many = (loss_bytes(fake, LargestBatch(16384, supervised)) for supervised in (2048, 16384))
    assert many.peak - few.peak == 2 * (16384 - 2048) * 4096 * 2, "hidden states and their gradient alone"
