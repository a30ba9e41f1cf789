"""Padding is not learned from: a padded step is the step."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest
import torch
from torch import Tensor

from whet.core.distributed import Ranks
from whet.data.config import DataConfig, Source
from whet.data.loader import Loader
from whet.data.plan.planner import plan_single_step
from whet.data.prepare.build import prepare_store
from whet.data.prepare.store import Store
from whet.data.render.chat_tokenizer import ChatTokenizer
from whet.model import attention
from whet.model.config import ModelConfig
from whet.model.load.pretrained import load_model
from whet.model.load.tokenizer import load_tokenizer
from whet.model.loss.loss_model import LossModel
from whet.model.modules import KeepFloat64
from whet.training.step import ForwardPasses, train_step

TINY = ModelConfig(path="builtin:tiny")
LANGUAGE = ChatTokenizer({"tokenizer": TINY.path, "today": None}, lambda: load_tokenizer(TINY), list, "assistant")


@pytest.fixture(scope="module")
def store() -> Store:
    config = DataConfig(sources=[Source(path="builtin:orders", max_samples=7)])
    return prepare_store(config, config.sources, "train", LANGUAGE).store


def gradients(store: Store, packing: str, pads: bool) -> tuple[list[Tensor], set[int]]:
    model = load_model(TINY, torch.float64)
    attention.install_backend(model, "sdpa")
    root = LossModel(model)
    plan = plan_single_step(store.lengths, np.arange(len(store)), 600, packing, 4)
    with contextlib.closing(Loader(store, plan, 2, 0, 1, pads)) as loader:
        ranks = Ranks(0, 1, torch.device("cpu"))
        forward = ForwardPasses(root, loader, 0, device=ranks.device, seed=0, autocast=KeepFloat64(), loss_scale=1.0)
        result = train_step(forward, None, ranks=ranks, clip_norm=1.0).wait()
        sizes = {len(batch.tokens) for _, batch in loader.micro_batches(0)}
    found = [parameter.grad for parameter in root.parameters() if parameter.grad is not None]
    return [torch.tensor([result.loss, result.grad_norm], dtype=torch.float64), *found], sizes


@pytest.mark.parametrize("packing", ["best-fit", "none"])
def test_a_padded_step_is_the_step(store: Store, packing: str) -> None:
    plain, before = gradients(store, packing, pads=False)
    padded, sizes = gradients(store, packing, pads=True)
    assert max(sizes) > max(before)
    for ours, theirs in zip(padded, plain, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-11, atol=1e-13)
