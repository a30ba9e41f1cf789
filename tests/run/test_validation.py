"""Validation metrics against their definitions; every supervised token counts once."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from whet.core.distributed import Ranks
from whet.data.batch import PackedBatch
from whet.data.config import DataConfig, Source
from whet.data.loader import Loader
from whet.data.plan.planner import plan_single_step
from whet.data.prepare.build import prepare_store
from whet.data.render.chat_tokenizer import ChatTokenizer
from whet.model import attention
from whet.model.config import ModelConfig
from whet.model.load.pretrained import load_model
from whet.model.load.tokenizer import load_tokenizer
from whet.model.loss.loss_model import LossModel, LossSum
from whet.run.validation import ValidationMetadata, ValidationSums, source_names, validation_loss
from whet.tokenizer.token_bytes import bytes_per_token

TINY = ModelConfig(path="builtin:tiny")
CHAT_TOKENIZER = ChatTokenizer({"tokenizer": TINY.path, "today": None}, lambda: load_tokenizer(TINY), list, "assistant")
ALONE = Ranks(0, 1, torch.device("cpu"))


@pytest.mark.parametrize(("packing", "micro_rows"), [("none", 1), ("best-fit", 3)])
def test_validation_counts_every_supervised_token_once(packing: str, micro_rows: int) -> None:
    config = DataConfig(sources=[Source(path="builtin:orders", split="held-out", max_samples=9)])
    store = prepare_store(config, config.sources, "validation", CHAT_TOKENIZER).store
    model: Any = load_model(TINY, torch.float64)
    total, right, count = 0.0, 0, 0
    for document in range(len(store)):
        ids, mask = torch.from_numpy(store.ids(document)), torch.from_numpy(store.loss(document))[1:]
        with torch.no_grad():
            log_p = model(input_ids=ids[None]).logits[0, :-1].log_softmax(dim=-1)[mask]
        targets = ids[1:][mask]
        total -= log_p.gather(1, targets[:, None]).sum().item()
        right += int((log_p.argmax(dim=-1) == targets).sum())
        count += len(targets)
    attention.install_backend(model, "sdpa")
    plan = plan_single_step(store.lengths, np.arange(len(store)), 400, packing, 16)
    loader = Loader(store, plan, micro_rows, 0, 1)
    found = validation_loss(
        LossModel(model).train(), loader, ALONE, torch.autocast("cpu", enabled=False), ValidationMetadata()
    ).metrics
    assert found["val_loss"] == pytest.approx(total / count, rel=1e-9)
    assert found["val_accuracy"] == pytest.approx(right / count)


@pytest.mark.parametrize(("packing", "micro_rows", "world"), [("none", 1, 1), ("best-fit", 3, 1), ("best-fit", 1, 3)])
def test_bits_per_byte_and_losses_by_source_do_not_depend_on_the_layout(
    packing: str, micro_rows: int, world: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Against the definition: bits of supervised tokens of text ÷ their UTF-8 bytes."""
    config = DataConfig(sources=[Source(path="builtin:orders", split="held-out", max_samples=n) for n in (7, 4)])
    store = prepare_store(config, config.sources, "validation", CHAT_TOKENIZER).store
    tokenizer = load_tokenizer(TINY)
    model: Any = load_model(TINY, torch.float64)
    nats, bytes_, by_source = 0.0, 0, {0: [0.0, 0], 1: [0.0, 0]}
    for document in range(len(store)):
        ids, mask = torch.from_numpy(store.ids(document)), torch.from_numpy(store.loss(document))[1:]
        with torch.no_grad():
            log_p = model(input_ids=ids[None]).logits[0, :-1].log_softmax(dim=-1)[mask]
        targets = ids[1:][mask]
        for number, loss in zip(targets.tolist(), -log_p.gather(1, targets[:, None])[:, 0], strict=True):
            by_source[int(store.sources[document])][0] += loss.item()
            by_source[int(store.sources[document])][1] += 1
            if number not in tokenizer.all_special_ids:
                nats += loss.item()
                bytes_ += len(tokenizer.decode([number]).encode())  # the orders are plain ASCII
    attention.install_backend(model, "sdpa")
    plan = plan_single_step(store.lengths, np.arange(len(store)), 400, packing, 16)
    metadata = ValidationMetadata(bytes_per_token(tokenizer, 0), store.sources, ("a", "b"))
    measured: list[Any] = []
    monkeypatch.setattr(Ranks, "all_reduce_", lambda self, tensor: measured.append(tensor) or tensor)
    for rank in range(world):
        loader = Loader(store, plan, micro_rows, rank, world)
        ranks = Ranks(rank, world, torch.device("cpu"))
        found = validation_loss(LossModel(model), loader, ranks, torch.autocast("cpu", enabled=False), metadata).metrics
    if world > 1:  # the result of an all-reduce
        monkeypatch.setattr(Ranks, "all_reduce_", lambda self, tensor: tensor.copy_(torch.stack(measured).sum(dim=0)))
        loader = Loader(store, plan, micro_rows, 0, world)
        found = validation_loss(LossModel(model), loader, ALONE, torch.autocast("cpu", enabled=False), metadata).metrics
    assert found["val_bpb"] == pytest.approx(nats / (np.log(2) * bytes_), rel=1e-9)
    for number, name in enumerate("ab"):
        total, count = by_source[number]
        assert found[f"val_loss/{name}"] == pytest.approx(total / count, rel=1e-9)
        assert found[f"val_tokens/{name}"] == count


def test_eval_rows_selects_rows_evenly() -> None:
    lengths = np.arange(1, 101)
    whole = plan_single_step(lengths, np.arange(100), 100, "best-fit", 16)
    part = plan_single_step(lengths, np.arange(100), 100, "best-fit", 16, rows=10)
    assert len(part.rows) - 1 == 10
    assert set(map(tuple, part.rows_of(0))) <= set(map(tuple, whole.rows_of(0)))
    assert lengths[part.documents].min() < 25  # the first rows would be the longest documents
    assert plan_single_step(lengths, np.arange(100), 100, "best-fit", 16, rows=1000).documents.tolist() == (
        whole.documents.tolist()
    )


@pytest.mark.parametrize(
    ("paths", "names"),
    [
        (["data/a.jsonl", "b.jsonl.gz"], ("a", "b")),
        (["builtin:orders", "hub:OWNER/chat"], ("orders", "chat")),
        (["x/a.jsonl", "y/a.jsonl", "folder/"], ("a-1", "a-2", "folder")),
    ],
)
def test_source_names_are_short_and_unique(paths: list[str], names: tuple[str, ...]) -> None:
    assert source_names(paths) == names


def batch(documents: list[int], edges: tuple[int, ...], labels: list[int]) -> PackedBatch:
    targets, empty = torch.tensor(labels), torch.zeros(len(labels), dtype=torch.int64)
    return PackedBatch(
        tokens=empty, labels=targets, positions=empty, cu_seqlens=empty, max_seqlen=9,
        supervised_at=torch.nonzero(targets >= 0)[:, 0], cu_seqlens_host=edges,
        documents=np.array(documents, dtype=np.int64), place_at=empty,
    )  # fmt: skip


def losses(*nll: float) -> LossSum:
    values = torch.tensor(nll)
    return LossSum(values.sum(), values, values < 1)


def test_every_position_counts_for_its_document() -> None:
    """Documents 12, 5 and 9 in two rows, the first padded; token 3 is special, token 4 has four bytes."""
    metadata = ValidationMetadata(np.array([1, 1, 1, 0, 4]), np.array([0] * 6 + [1] * 7), ("a", "b"))
    sums = ValidationSums(np.array([12, 5, 9]), metadata)
    sums.add(batch([12, 5], (0, 2, 4, 6, 6), [4, -100, 3, -100, -100, -100]), losses(0.5, 8.0))
    sums.add(batch([9], (0, 3), [1, 4, -100]), losses(2.0, 0.25))
    sums.add(batch([], (0, 1), [-100]), losses())  # a rank without rows runs padding
    found = sums.results(ALONE)
    assert found == {
        "val_loss": 10.75 / 4,
        "val_accuracy": 2 / 4,
        "val_bpb": pytest.approx(2.75 / np.log(2) / 9),
        "val_loss/a": 8.0,
        "val_tokens/a": 1,
        "val_loss/b": 2.75 / 3,
        "val_tokens/b": 3,
    }


def test_without_bytes_there_is_no_bpb_and_with_one_source_no_names() -> None:
    sums = ValidationSums(np.array([0]), ValidationMetadata())
    sums.add(batch([0], (0, 2), [1, -100]), losses(2.0))
    assert sums.results(ALONE) == {"val_loss": 2.0, "val_accuracy": 0.0}
