"""Answers: the same one by one and together, and no further than their end."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from whet.core.errors import WhetError
from whet.core.ranks import Ranks
from whet.data.config import DataConfig, Source
from whet.data.loader import Loader
from whet.data.plan import plan_whole
from whet.data.prepare import prepare
from whet.data.render import Renderer
from whet.infer.chat import ChatSession
from whet.infer.evaluate import validation_loss
from whet.infer.generate import Sampling, generate
from whet.infer.tasks import Task, find_task, score
from whet.model import attention
from whet.model.config import ModelConfig
from whet.model.load import load_model, load_tokenizer
from whet.model.loss import LossModel

TINY = ModelConfig(path="builtin:tiny")
ALONE = Ranks(0, 1, torch.device("cpu"))
PROMPTS = [[10, 20, 30], [40], [50, 60, 70, 80, 90, 11, 12], [13, 14], [15]]


@pytest.fixture(scope="module")
def model() -> Any:
    """Tiny with louder weights, so that the likeliest token is clear and answers differ."""
    made = load_model(TINY, torch.float32)
    for parameter in made.parameters():
        if parameter.ndim == 2:
            parameter.data.mul_(8)
    return made


@pytest.fixture(scope="module")
def renderer() -> Renderer:
    return Renderer(load_tokenizer(TINY), "assistant")


def greedy(model: Any, prompt: list[int], length: int) -> list[int]:
    """The definition: the likeliest token after everything so far, again and again."""
    ids = list(prompt)
    for _ in range(length):
        with torch.no_grad():
            ids.append(int(model(input_ids=torch.tensor([ids])).logits[0, -1].argmax()))
    return ids[len(prompt) :]


@pytest.mark.parametrize("batch", [1, 2, 32])
def test_answers_in_a_batch_are_those_of_each_prompt_alone(model: Any, batch: int) -> None:
    answers = generate(model, PROMPTS, [], 0, Sampling(max_new_tokens=12), batch=batch)
    assert answers == [greedy(model, prompt, 12) for prompt in PROMPTS]
    assert len({tuple(answer) for answer in answers}) > 1


def test_an_answer_ends_before_its_first_stop(model: Any) -> None:
    whole = [greedy(model, prompt, 12) for prompt in PROMPTS]
    stops = [whole[0][5], whole[2][3]]
    expected = [answer[: next((i for i, token in enumerate(answer) if token in stops), 12)] for answer in whole]
    assert generate(model, PROMPTS, stops, 0, Sampling(max_new_tokens=12)) == expected
    assert any(len(answer) < 12 for answer in expected)


def test_sampling_is_repeated_by_its_seed(model: Any) -> None:
    def sample(seed: int) -> list[list[int]]:
        return generate(model, PROMPTS, [], 0, Sampling(temperature=5.0, seed=seed, max_new_tokens=12))

    assert sample(1) == sample(1)
    assert sample(1) != sample(2)


def test_every_answer_is_reported_as_done(model: Any) -> None:
    done: list[int] = []
    generate(model, PROMPTS, [], 0, Sampling(max_new_tokens=1), batch=2, done=done.append)
    assert done == [2, 2, 1]


def test_generating_leaves_the_document_attention_in_place() -> None:
    model: Any = load_model(TINY, torch.float32)
    attention.install(model, "sdpa")
    generate(model, PROMPTS[:1], [], 0, Sampling(max_new_tokens=2))
    assert model.config._attn_implementation == attention.NAME


@pytest.mark.parametrize("world", [1, 2])
def test_a_score_is_the_part_of_exactly_right_answers(
    model: Any, renderer: Renderer, world: int, monkeypatch: pytest.MonkeyPatch
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
    parts = [score(task, 5, model, renderer, [], each)[1] for each in ranks]
    samples = [sample for part in parts for sample in part]
    assert sorted((sample.prompt, sample.answer, sample.right) for sample in samples) == [
        ("question 0", "0", True), ("question 1", "1", True), ("question 2", "2", True),
        ("question 3", "33", False), ("question 4", "no", False),
    ]  # fmt: skip
    if world == 1:
        assert score(task, 5, model, renderer, [], ranks[0])[0] == 0.6
        assert score(task, 2, model, renderer, [], ranks[0])[0] == 1


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
    store = prepare(config, config.sources, "validation", load_tokenizer(TINY)).store
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
    loader = Loader(store, plan_whole(store.lengths, 400, packing), micro_rows, 0, 1)
    found = validation_loss(LossModel(model).train(), loader, ALONE, torch.autocast("cpu", enabled=False))
    assert found["val_loss"] == pytest.approx(total / count, rel=1e-9)
    assert found["val_accuracy"] == pytest.approx(right / count)


def test_a_conversation_remembers_what_was_said_until_told_to_forget(model: Any, renderer: Renderer) -> None:
    session = ChatSession(model, renderer, [], Sampling(max_new_tokens=3), system="Be brief.")
    first = session.say("Hello")
    session.say("And now?")
    assert [message["role"] for message in session.messages] == ["system", "user", "assistant", "user", "assistant"]
    assert session.messages[2]["content"] == first
    session.forget()
    assert session.messages == [{"role": "system", "content": "Be brief."}]
    assert session.say("Hello") == first
