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

from whet.core.ranks import Ranks
from whet.data.batch import PackedBatch, Shape, pack_batch
from whet.model import attention
from whet.model.config import AdapterConfig, ModelConfig
from whet.model.fused_lora import fuse_lora_
from whet.model.load import load_model
from whet.model.lora import add_adapter, language_model
from whet.model.loss import LossModel
from whet.parallel.apply import apply
from whet.parallel.config import ParallelConfig
from whet.parallel.narrow import narrow
from whet.parallel.replicate import sum_gradients
from whet.train.config import OptimizerConfig
from whet.train.optim import early_move, make_optimizer
from whet.train.passes import Passes
from whet.train.step import _squares, find_gradients

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
def test_forward_backward_and_norm_ask_the_device_nothing(
    backend: str, adapter: bool, change: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch._dynamo.reset()
    model = load_model(ModelConfig(path="builtin:tiny"), torch.float32 if adapter else torch.bfloat16)
    if adapter:
        model = add_adapter(model, AdapterConfig(rank=4), 0)
        assert fuse_lora_(model)
    root = LossModel(language_model(model)).train()
    attention.install(root.language_model, "eager")
    assert narrow(root)
    attention.install(root.language_model, backend)
    recompute: Any = "full" if change == "recompute" else "none"
    apply(root.language_model, ParallelConfig(recompute=recompute), change == "compile", "aot_eager")
    root.to(NOWHERE)
    monkeypatch.setattr(torch, "autocast", lambda *_, **__: contextlib.nullcontext())  # torch knows none there
    batch = pack_batch(Documents(), np.arange(4), 20, Shape(64, 6, 32)).to(NOWHERE)
    result = root(batch, 0.1)
    result.objective.backward()
    result.hits.sum()
    sum_gradients(root.trained, Ranks(0, 1, NOWHERE))
    assert _squares(root.trained, Ranks(0, 1, NOWHERE)).is_meta


def test_whoever_asked_would_fail() -> None:
    with pytest.raises((RuntimeError, NotImplementedError)):
        torch.ones(3, device=NOWHERE).sum().item()


class OneStep:
    """A loader of one step with two micro-batches."""

    def totals(self, step: int) -> SimpleNamespace:
        return SimpleNamespace(supervised=sum(len(batch.supervised_at) for _, batch in self.micro_batches(step)))

    def count(self, step: int) -> int:
        return 2

    def micro_batches(self, step: int) -> Iterator[tuple[int, PackedBatch]]:
        for row in range(self.count(step)):
            batch = pack_batch(Documents(), np.arange(4), 20, Shape(64, 6, 32))
            yield row, batch.pinned(torch.device("cuda", 0))


@pytest.mark.gpu
@pytest.mark.parametrize("adapter", [False, True], ids=["whole", "lora"])
def test_a_step_on_the_device_waits_for_its_loss_and_norm_alone(adapter: bool) -> None:
    device = torch.device("cuda", 0)
    model = load_model(ModelConfig(path="builtin:tiny"), torch.bfloat16, device)
    if adapter:
        model = add_adapter(model, AdapterConfig(rank=4), 0).to(device)
        assert fuse_lora_(model)
    root = LossModel(language_model(model)).train()
    attention.install(root.language_model, "short")
    with torch.autocast("cuda", torch.bfloat16):
        assert narrow(root)
    apply(root.language_model, ParallelConfig(), True)
    optimizer = make_optimizer(root, OptimizerConfig(), 0)
    loader: Any = OneStep()
    autocast = torch.autocast("cuda", torch.bfloat16)
    for _ in range(3):
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            early = early_move(optimizer)
            assert early is not None
            try:
                given = {"device": device, "seed": 0, "arithmetic": autocast, "loss_scale": 1.0}
                passes, following = Passes(root, loader, 0, **given), Passes(root, loader, 0, **given)
                result = find_gradients(
                    passes, ranks=Ranks(0, 1, device), clip_norm=1.0, stop=False, move=early, meanwhile=following.begin
                )
            finally:
                torch.cuda.set_sync_debug_mode("default")
    assert early.was_asked
    assert result.finite
    assert not [str(one.message) for one in said if "synchroniz" in str(one.message)]  # but for an event, at the end
