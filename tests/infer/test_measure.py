"""Scores and losses on what was held out: every example and every supervised token counted once."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from whet.core.errors import WhetError
from whet.core.ranks import Ranks
from whet.data.config import DataConfig, Source
from whet.data.language import ChatLanguage
from whet.data.loader import Loader
from whet.data.planner import plan_whole
from whet.data.prepare import prepare
from whet.data.render import Renderer
from whet.infer.evaluate import validation_loss
from whet.infer.tasks import Task, find_task, score
from whet.model import attention
from whet.model.config import ModelConfig
from whet.model.load import load_model
from whet.model.loss import LossModel
from whet.model.tokenizer import load_tokenizer

TINY = ModelConfig(path="builtin:tiny")
LANGUAGE = ChatLanguage({"tokenizer": TINY.path, "today": None}, lambda: load_tokenizer(TINY), list, "assistant")
ALONE = Ranks(0, 1, torch.device("cpu"))


@pytest.fixture(scope="module")
def renderer() -> Renderer:
    return Renderer(load_tokenizer(TINY), "assistant")


@pytest.mark.parametrize("world", [1, 2])
def test_a_score_is_the_part_of_exactly_right_answers(
    renderer: Renderer, world: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    examples = [(f"question {i}", f"{i}") for i in range(5)]
    said = {"question 0": " 0\n", "question 1": "1", "question 2": "2 ", "question 3": "33", "question 4": "no"}
    asked = {tuple(renderer.prompt_ids([{"role": "user", "content": text}])): text for text, _ in examples}

    def answer(model: Any, prompts: Any, *rest: Any, **options: Any) -> list[list[int]]:
        return [renderer.tokenizer(said[asked[tuple(prompt)]]).input_ids for prompt in prompts]

    monkeypatch.setattr("whet.infer.tasks.generate", answer)
    task = Task("numbers", lambda count: examples[:count], max_new_tokens=3)
    ranks = [Ranks(rank, world, torch.device("cpu")) for rank in range(world)]
    monkeypatch.setattr(Ranks, "gather", lambda self, items: items)
    parts = [score(task, 5, None, renderer, [], each)[1] for each in ranks]
    samples = [sample for part in parts for sample in part]
    assert sorted((sample.prompt, sample.answer, sample.right) for sample in samples) == [
        ("question 0", "0", True), ("question 1", "1", True), ("question 2", "2", True),
        ("question 3", "33", False), ("question 4", "no", False),
    ]  # fmt: skip
    if world == 1:
        assert score(task, 5, None, renderer, [], ranks[0])[0] == 0.6
        assert score(task, 2, None, renderer, [], ranks[0])[0] == 1


def test_the_orders_task_asks_held_out_questions_and_an_unknown_task_is_named() -> None:
    from whet.data.orders import orders

    task = find_task("orders")
    held_out = task.examples(3)
    assert len(held_out) == 3
    stream = orders("held-out")
    assert held_out == [next(stream) for _ in range(3)]
    with pytest.raises(WhetError, match=r"eval\.tasks: there is no task 'order'; known are: orders"):
        find_task("order")


@pytest.mark.parametrize(("packing", "micro_rows"), [("none", 1), ("best-fit", 3)])
def test_validation_counts_every_supervised_token_once(packing: str, micro_rows: int) -> None:
    config = DataConfig(sources=[Source(path="builtin:orders", split="held-out", max_samples=9)])
    store = prepare(config, config.sources, "validation", LANGUAGE).store
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
    attention.install(model, "sdpa")
    plan = plan_whole(store.lengths, np.arange(len(store)), 400, packing, 16)
    loader = Loader(store, plan, micro_rows, 0, 1)
    found = validation_loss(LossModel(model).train(), loader, ALONE, torch.autocast("cpu", enabled=False))
    assert found["val_loss"] == pytest.approx(total / count, rel=1e-9)
    assert found["val_accuracy"] == pytest.approx(right / count)
