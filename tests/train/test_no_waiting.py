"""A step does not wait for the device before its end: on tensors without numbers, whoever asks for one fails."""

from __future__ import annotations

import contextlib
from typing import Any

import numpy as np
import pytest
import torch

from whet.core.ranks import Ranks
from whet.data.batch import Shape, pack_batch
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
from whet.train.step import _norm

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
    assert _norm(root.trained).is_meta


def test_whoever_asked_would_fail() -> None:
    with pytest.raises((RuntimeError, NotImplementedError)):
        torch.ones(3, device=NOWHERE).sum().item()
