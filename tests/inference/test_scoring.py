"""Scoring on tasks: how ranks share examples, time limits, baselines, and choice letters."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from tool_template import TOOL_TEMPLATE

from whet.core.distributed import Ranks
from whet.core.errors import WhetError
from whet.data.builtin import generate_orders
from whet.data.conversation import CALCULATOR_SCHEMA, Message
from whet.data.render.renderer import Renderer
from whet.inference.config import EvalConfig, TaskConfig
from whet.inference.generate import generate
from whet.inference.inference_model import InferenceModel
from whet.inference.sampling import Sampling
from whet.inference.tasks import scoring
from whet.inference.tasks.load_tasks import load_tasks, loaded_tasks
from whet.inference.tasks.scorers import make_scorer
from whet.inference.tasks.scoring import (
    answer_examples,
    choice_letter_tokens,
    example_prompts,
    length_sorted_batches,
    score_task,
    score_tasks,
    with_task_settings,
)
from whet.inference.tasks.task import Example, Scorer, Task
from whet.model import attention
from whet.model.config import ModelConfig
from whet.model.load.tokenizer import load_tokenizer

TINY = ModelConfig(path="builtin:tiny")
ALONE = Ranks(0, 1, torch.device("cpu"))
ANSWERS = ["0", "1", "2", "33", "no"]


@pytest.fixture(scope="module")
def renderer() -> Renderer:
    return Renderer(load_tokenizer(TINY), "assistant")


@pytest.fixture
def answerer(model: Any, renderer: Renderer) -> InferenceModel:
    return InferenceModel(model, renderer, [])


@pytest.fixture
def fixed_answers(answerer: InferenceModel, monkeypatch: pytest.MonkeyPatch) -> InferenceModel:
    """A model that gives fixed answers."""
    monkeypatch.setattr(
        scoring, "answer_examples", lambda model, task, examples, *_: [fixed_answer(each) for each in examples]
    )
    return answerer


def fixed_answer(example: Example) -> str:
    return ANSWERS[int(example.prompt.split()[-1]) % 5]


def numbers(count: int) -> list[Example]:
    return [Example((Message("user", f"question {i}"),), (f"{i}",), f"x:{i}") for i in range(count)]


def task(examples: Callable[[int], list[Example]] = numbers, scorer: str = "exact") -> Task:
    return Task("numbers", examples, 3, make_scorer(TaskConfig(path="x"), scorer))


@pytest.mark.parametrize("world", [1, 2, 3, 7])
def test_ranks_share_the_examples_and_agree(
    fixed_answers: InferenceModel, world: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks = [Ranks(rank, world, torch.device("cpu")) for rank in range(world)]
    parts: list[list[Any]] = []
    monkeypatch.setattr(Ranks, "all_gather", lambda self, items: parts.append(items) or items)
    for rank in ranks[:5]:  # five examples, so later ranks have none
        score_task(task(), 5, fixed_answers, rank)
    everyone = [sample for part in parts for sample in part]
    monkeypatch.setattr(Ranks, "all_gather", lambda self, items: everyone)
    found = score_task(task(), 5, fixed_answers, ranks[0])
    assert [(sample.prompt, sample.answer, sample.right) for sample in found.samples] == [
        ("question 0", "0", True), ("question 1", "1", True), ("question 2", "2", True),
        ("question 3", "33", False), ("question 4", "no", False),
    ]  # fmt: skip
    assert (found.score, found.baseline, found.requested) == (0.6, 0, 5)


def test_ranks_that_share_a_model_answer_all_examples(fixed_answers: InferenceModel) -> None:
    found = score_task(task(), 5, fixed_answers, Ranks(1, 2, torch.device("cpu")), shares_model=True)
    assert len(found.samples) == 5


def test_the_time_limit_ends_a_task_and_is_shared_evenly(
    answerer: InferenceModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each round of 32 takes 0.1 s: of 0.5 s the first task gets 0.25, the second the rest."""

    def slow_answers(model: InferenceModel, task: Task, examples: Sequence[Example], *_: Any) -> list[str]:
        time.sleep(0.1)
        return [fixed_answer(example) for example in examples]

    monkeypatch.setattr(scoring, "answer_examples", slow_answers)
    first, second = score_tasks([(task(), 1000), (task(), 1000)], answerer, ALONE, minutes=0.5 / 60)
    assert 32 <= len(first.samples) <= 96
    assert 32 <= len(second.samples) <= 128
    assert first.requested == 1000
    assert [sample.number for sample in first.samples] == list(range(len(first.samples)))
    (late,) = score_tasks([(task(), 1000)], answerer, ALONE, minutes=1e-9)
    assert len(late.samples) == 32  # at least one round


def test_all_ranks_stop_when_one_is_late(fixed_answers: InferenceModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Ranks, "all_reduce_", lambda self, tensor: tensor + 1)  # another rank is late
    found = score_task(task(), 1000, fixed_answers, ALONE, deadline=time.monotonic() + 60)
    assert len(found.samples) == 32


def test_the_baseline_is_chance_or_the_score_of_empty_answers(fixed_answers: InferenceModel) -> None:
    def choices(count: int) -> list[Example]:
        question = (Message("user", "question 0"),)
        return [Example(question, ("A",), f"x:{i}", choices) for i, choices in enumerate([2, 4, 4, 5])]

    letters = Scorer("letters", lambda answer, example: 1.0)
    found = score_task(Task("c", choices, 1, letters), 4, fixed_answers, ALONE)
    assert found.baseline == pytest.approx((0.5 + 0.25 + 0.25 + 0.2) / 4)
    half = Scorer("half", lambda answer, example: 1.0 if answer else 0.5, graded=True)
    found = score_task(Task("c", numbers, 1, half), 4, fixed_answers, ALONE)
    assert (found.baseline, found.score) == (0.5, 1)
    assert {sample.right for sample in found.samples} == {None}


def test_letters_have_the_highest_logit_in_any_batch(renderer: Renderer, model: Any, answerer: InferenceModel) -> None:
    def make_examples(count: int) -> list[Example]:
        questions = [f"Which? {'very ' * (17 * i % 23)}long {i}" for i in range(count)]
        return [Example((Message("user", q),), ("A",), "x:1", 2 + i % 4) for i, q in enumerate(questions)]

    examples = make_examples(12)
    which = Task("c", make_examples, 1, Scorer("letters", lambda answer, example: 0.0))
    attention.install_backend(model, "sdpa")
    found = [sample.answer for sample in score_task(which, 12, answerer, ALONE).samples]
    attention.use_native_attention(model)
    letters = [renderer.tokenizer(letter, add_special_tokens=False).input_ids[0] for letter in "ABCDE"]
    alone = []
    for example in examples:
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([renderer.prompt_ids(example.messages)])).logits[0, -1]
        alone.append("ABCDE"[int(logits[letters[: example.choices]].argmax())])
    assert found == alone
    assert len(set(alone)) > 1


def test_letter_tokens_depend_on_the_chat_template(renderer: Renderer) -> None:
    letters = [renderer.tokenizer(letter).input_ids[0] for letter in "ABCD"]
    assert choice_letter_tokens(renderer, 4) == ([], letters)
    tokenizer = load_tokenizer(TINY)
    spaced = "{% for m in messages %}{{ m.role }}:{{ ' ' + m.content }}{{ eos_token }}{% endfor %}"
    tokenizer.chat_template = spaced + "{% if add_generation_prompt %}assistant:{% endif %}"
    assert choice_letter_tokens(Renderer(tokenizer, "assistant"), 4) == (tokenizer(" ").input_ids, letters)
    tokenizer.add_tokens([" A", " B"])
    joined = tokenizer.convert_tokens_to_ids([" A", " B"])
    assert choice_letter_tokens(Renderer(tokenizer, "assistant"), 2) == ([], joined)
    tokenizer.chat_template = "{% for m in messages %}{{ m.role }}{% endfor %}"
    with pytest.raises(WhetError, match="multiple choice cannot be scored by letters"):
        choice_letter_tokens(Renderer(tokenizer, "assistant"), 2)


def test_length_sorted_batches_pad_little_and_are_bounded() -> None:
    lengths = [10, 200, 11, 190, 12, 3000]
    batches = length_sorted_batches(lengths, 400)
    assert sorted(number for each in batches for number in each) == list(range(6))
    assert [5] in batches
    assert all(len(each) == 1 or len(each) * max(lengths[i] for i in each) <= 400 for each in batches)
    assert {frozenset(each) for each in batches} == {frozenset({0, 2, 4}), frozenset({1, 3}), frozenset({5})}


def test_answers_are_generated_from_the_question_alone(
    renderer: Renderer, model: Any, answerer: InferenceModel
) -> None:
    found = score_task(task(), 3, answerer, ALONE)
    prompts = [renderer.prompt_ids(example.messages) for example in numbers(3)]
    ids = [each.ids for each in generate(model, prompts, Sampling(max_new_tokens=3))]
    assert [sample.answer for sample in found.samples] == [
        renderer.tokenizer.decode(each, skip_special_tokens=True).strip() for each in ids
    ]


def test_programs_keep_the_indent_of_their_first_line(renderer: Renderer, model: Any, answerer: InferenceModel) -> None:
    seen: list[str] = []
    scorer = Scorer("tests", lambda answer, _: float(seen.append(answer) is None), empty_score=0.0, verbatim=True)
    score_task(Task("programs", numbers, 3, scorer), 3, answerer, ALONE)
    prompts = [renderer.prompt_ids(example.messages) for example in numbers(3)]
    ids = [each.ids for each in generate(model, prompts, Sampling(max_new_tokens=3))]
    assert seen == [renderer.tokenizer.decode(each, skip_special_tokens=True) for each in ids]


def test_a_question_longer_than_the_context_is_an_error(model: Any, answerer: InferenceModel) -> None:
    room = model.config.max_position_embeddings

    def long(count: int) -> list[Example]:
        return [*numbers(1), Example((Message("user", "long " * room),), ("1",), "my.jsonl:7")]

    with pytest.raises(WhetError, match=rf"my\.jsonl:7: the question has .* more than the model's context of {room:,}"):
        score_task(task(long), 2, answerer, ALONE)


def test_built_in_tasks_use_held_out_examples() -> None:
    tasks = load_tasks(EvalConfig(tasks=["orders", "builtin:spelling", "spelling-bee", "arithmetic"], examples=3))  # type: ignore[list-item]
    assert [each.name for each, _ in tasks] == ["orders", "spelling", "spelling-bee", "arithmetic"]
    samples = itertools.islice(generate_orders("held-out"), 3)
    expected = [tuple(message.content for message in sample.messages) for sample in samples]
    assert [(each.prompt, each.expected) for each in tasks[0][0].examples(3)] == expected
    for each, count in tasks:
        assert count == 3
        for example in each.examples(20):
            assert each.scorer.score(example.expected, example) == 1
            assert each.scorer.score("", example) == 0


def test_loaded_tasks_do_not_change_with_their_files(tmp_path: Any) -> None:
    file = tmp_path / "my.jsonl"
    file.write_text('{"prompt": "1?", "answer": "1"}\n')
    config = EvalConfig(tasks=[str(file)])  # type: ignore[list-item]
    load_tasks(config)
    file.unlink()
    ((found, _),) = loaded_tasks(config)
    assert found.examples(9)[0].prompt == "1?"
    with pytest.raises(WhetError, match="no such file"):
        load_tasks(config)


def test_a_task_offers_the_calculator_if_configured(model: Any) -> None:
    tokenizer = load_tokenizer(TINY)
    tokenizer.chat_template = TOOL_TEMPLATE
    answerer = InferenceModel(model, Renderer(tokenizer, "assistant"), [])
    sums = TaskConfig(path="builtin:orders", calculator=True)
    ((offered, _),) = load_tasks(EvalConfig(tasks=[sums]))
    ((bare, _),) = load_tasks(EvalConfig(tasks=[TaskConfig(path="builtin:orders")]))
    examples = bare.examples(1)
    messages = examples[0].messages
    with_tool, without_tool = with_task_settings(answerer, offered), with_task_settings(answerer, bare)
    prompts = example_prompts(with_tool, offered, examples)
    assert prompts == [answerer.renderer.prompt_ids(messages, [CALCULATOR_SCHEMA])]
    assert example_prompts(without_tool, bare, examples) == [answerer.renderer.prompt_ids(messages)] != prompts
    assert len(answer_examples(with_tool, offered, examples, prompts, lambda n: None)) == 1


def test_a_calculator_that_the_model_cannot_call_is_an_error(answerer: InferenceModel) -> None:
    ((sums, _),) = load_tasks(EvalConfig(tasks=[TaskConfig(path="builtin:orders", calculator=True)]))
    with pytest.raises(WhetError, match="calculator"):
        with_task_settings(answerer, sums)
