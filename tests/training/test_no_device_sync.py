"""A step does not wait for the device before its end: on tensors without numbers, whoever asks for one fails."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from whet.core.distributed import Ranks
from whet.data.batch import BatchShape, PackedBatch, pack_batch
from whet.execution.transform import transform_layers
from whet.model import attention
from whet.model.config import AdapterConfig, ModelConfig
from whet.model.load.pretrained import load_model
from whet.model.lora.fuse import fuse_lora_
from whet.model.lora.peft_adapters import add_adapter, unwrap_peft
from whet.model.loss.loss_model import LossModel
from whet.parallel.config import ParallelConfig
from whet.parallel.ddp import all_reduce_gradients
from whet.training.config import OptimizerConfig
from whet.training.optimizers.factory import build_optimizer, decides_on_device
from whet.training.overlap import EarlyForwardPasses
from whet.training.step import squared_gradient_norm, train_step

NOWHERE = torch.device("meta")


class Documents:
    """Four conversations, their second half learned."""

    lengths = np.array([9, 20, 8, 11])

    def gather(self, documents: Any, ids: Any, loss: Any) -> None:
        ids[:] = np.arange(len(ids)) % 50
        loss[:] = np.concatenate([np.arange(size) >= size // 2 for size in self.lengths[documents]])


@pytest.mark.parametrize("backend", ["varlen", "short"])
@pytest.mark.parametrize("adapter", [False, True], ids=["whole", "lora"])
@pytest.mark.parametrize("change", ["plain", "recompute", "compile"])
def test_forward_backward_and_norm_do_not_wait_for_the_device(
    backend: str, adapter: bool, change: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch._dynamo.reset()
    model = load_model(ModelConfig(path="builtin:tiny"), torch.float32 if adapter else torch.bfloat16)
    if adapter:
        model = add_adapter(model, AdapterConfig(rank=4), 0)
        assert fuse_lora_(model)
    root = LossModel(unwrap_peft(model)).train()
    attention.install_backend(root.language_model, backend)
    recompute: Any = "full" if change == "recompute" else "none"
    transform_layers(root.language_model, ParallelConfig(recompute=recompute), change == "compile", "aot_eager")
    root.to(NOWHERE)
    monkeypatch.setattr(torch, "autocast", lambda *_, **__: contextlib.nullcontext())  # torch knows none there
    batch = pack_batch(Documents(), np.arange(4), 20, BatchShape(64, 6)).to(NOWHERE)
    result = root(batch, 0.1)
    result.objective.backward()
    result.hits.sum()
    all_reduce_gradients(root.trainable_parameters, Ranks(0, 1, NOWHERE))
    assert squared_gradient_norm(root.trainable_parameters, Ranks(0, 1, NOWHERE)).is_meta


def test_waiting_for_the_device_would_fail() -> None:
    with pytest.raises((RuntimeError, NotImplementedError)):
        torch.ones(3, device=NOWHERE).sum().item()


class OneStep:
    """A loader of one step with two micro-batches."""

    def totals(self, step: int) -> SimpleNamespace:
        supervised = sum(len(batch.supervised_at) for _, batch in self.micro_batches(step))
        return SimpleNamespace(supervised=supervised, conversations=4)

    def micro_batch_count(self, step: int) -> int:
        return 2

    def micro_batches(self, step: int) -> Iterator[tuple[int, PackedBatch]]:
        for row in range(self.micro_batch_count(step)):
            batch = pack_batch(Documents(), np.arange(4), 20, BatchShape(64, 6))
            yield row, batch.pin_memory(torch.device("cuda", 0))


@pytest.mark.gpu
@pytest.mark.parametrize("adapter", [False, True], ids=["whole", "lora"])
def test_a_step_on_the_device_waits_for_its_loss_and_norm_alone(adapter: bool) -> None:
    device = torch.device("cuda", 0)
    model = load_model(ModelConfig(path="builtin:tiny"), torch.bfloat16, device)
    if adapter:
        model = add_adapter(model, AdapterConfig(rank=4), 0).to(device)
        assert fuse_lora_(model)
    root = LossModel(unwrap_peft(model)).train()
    attention.install_backend(root.language_model, "short")
    transform_layers(root.language_model, ParallelConfig(), True)
    optimizer = build_optimizer(root, OptimizerConfig(), 0)
    loader: Any = OneStep()
    autocast = torch.autocast("cuda", torch.bfloat16)
    for _ in range(3):
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            try:
                given = {"device": device, "seed": 0, "autocast": autocast, "loss_scale": 1.0}
                forward, following = (EarlyForwardPasses(root, loader, 0, **given) for _ in range(2))
                pending = train_step(forward, optimizer, ranks=Ranks(0, 1, device), clip_norm=1.0)
                following.launch_first()
                result = pending.wait()
            finally:
                torch.cuda.set_sync_debug_mode("default")
    assert decides_on_device(optimizer)
    assert result.updated
    assert result.finite
    assert not [str(one.message) for one in said if "synchroniz" in str(one.message)]  # but for an event, at the end
