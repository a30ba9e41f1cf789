"""Scoring a model on tasks: letters from logits for multiple choice, generated text otherwise. Ranks share examples."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from string import ascii_uppercase

import torch

from whet.core.console import progress
from whet.core.distributed import Ranks
from whet.core.errors import BadRecordError, WhetError
from whet.core.heartbeat import PHASE
from whet.core.resources import available_cores
from whet.data.conversation import Message
from whet.data.render.renderer import Renderer
from whet.inference.calculator_tool import calls_inline, make_calculator, with_tool_schema
from whet.inference.generate import context_length, default_batch_size, generate
from whet.inference.inference_model import InferenceModel
from whet.inference.sampling import Sampling
from whet.inference.tasks.task import AnsweredExample, Example, Task, TaskResult
from whet.model.attention import native_attention
from whet.model.loss.output_head import read_output_head
from whet.model.modules import model_body

_MAX_BATCH_TOKENS = 16_384  # of one forward pass over multiple-choice questions


def score_tasks(
    tasks: Sequence[tuple[Task, int]], model: InferenceModel, ranks: Ranks, shares_model: bool = False,
    minutes: float | None = None,
) -> list[TaskResult]:  # fmt: skip
    """Score each (task, number of examples). `minutes` bounds the total time: each task gets an even share of what is
    left, and at least one round of examples."""
    deadline = None if minutes is None else time.monotonic() + 60 * minutes
    results = []
    for i, (task, count) in enumerate(tasks):
        task_deadline = None
        if deadline is not None:
            now = time.monotonic()
            task_deadline = now + max(0.0, deadline - now) / (len(tasks) - i)
        results.append(score_task(task, count, model, ranks, shares_model, task_deadline))
    return results


def score_task(
    task: Task, count: int, model: InferenceModel, ranks: Ranks, shares_model: bool = False,
    deadline: float | None = None,
) -> TaskResult:  # fmt: skip
    """Score the first `count` examples of a task, or as many as fit before the deadline.

    Ranks share the examples. With `shares_model`, the model is sharded over them: all ranks run every example together.
    Every rank renders all prompts, so that an invalid example raises on all of them and none waits for another.
    """
    examples = task.examples(count)
    model = with_task_settings(model, task)
    prompts = example_prompts(model, task, examples)
    baseline = baseline_score(task, examples)
    rank, world = (0, 1) if shares_model else (ranks.rank, ranks.world_size)
    round_size = len(examples)
    if deadline is not None:  # it is checked after each round
        round_size = default_batch_size(model.model) * world
    samples: list[AnsweredExample] = []
    with progress(f"scoring {task.name}", len(examples)) as bar:
        for start in range(0, len(examples), round_size):
            own = range(start + rank, min(start + round_size, len(examples)), world)
            answers = answer_examples(
                model, task, [examples[i] for i in own], [prompts[i] for i in own], lambda n: bar.advance(n * world)
            )
            samples += _score_answers(task, [(i, examples[i], answer) for i, answer in zip(own, answers, strict=True)])
            if deadline is not None and _deadline_passed(deadline, ranks):
                break
    samples = samples if shares_model else sorted(ranks.all_gather(samples), key=lambda sample: sample.number)
    answered = [examples[sample.number] for sample in samples]
    if len(answered) < len(examples):
        baseline = baseline_score(task, answered)
    corpus_score = task.scorer.corpus_score
    return TaskResult(
        task.name, task.scorer.name, samples, len(examples), baseline, task.scorer.graded,
        corpus_score([sample.answer for sample in samples], answered) if corpus_score else None,
    )  # fmt: skip


def with_task_settings(model: InferenceModel, task: Task) -> InferenceModel:
    """The model with greedy sampling, the task's token limit and, where the task wants it, the calculator."""
    wanted = calls_inline(model.renderer) if task.calculator is None else task.calculator
    tool = make_calculator(model.renderer) if wanted else None
    return replace(model, sampling=Sampling(max_new_tokens=task.max_new_tokens), tool=tool)


def example_prompts(model: InferenceModel, task: Task, examples: Sequence[Example]) -> list[list[int]]:
    """The prompt tokens of each example; a WhetError for one that leaves no room for an answer."""
    prompts = []
    context = context_length(model.model)
    answer_tokens = 1 if examples and examples[0].choices else task.max_new_tokens
    for example in examples:
        try:
            prompts.append(model.renderer.prompt_ids(example.messages, with_tool_schema(example.tools, model.tool)))
        except BadRecordError as error:
            raise WhetError(f"{example.origin}: {error}") from None
        if context is not None and len(prompts[-1]) + answer_tokens > context:
            raise WhetError(
                f"{example.origin}: the question has {len(prompts[-1]):,} tokens and its answer may have "
                f"{answer_tokens:,}, more than the model's context of {context:,}. Shorten or remove the question, "
                f"or lower max_new_tokens of task {task.name}"
            )
    return prompts


def answer_examples(
    model: InferenceModel, task: Task, examples: Sequence[Example], prompts: Sequence[Sequence[int]],
    on_finished: Callable[[int], None],
) -> list[str]:  # fmt: skip
    """The model's answer to each example."""
    if not examples:
        return []
    with model.context():
        if examples[0].choices:
            return _choice_letters(model, examples, prompts, on_finished)
        completions = generate(
            model.model, prompts, model.sampling, model.stop_ids, pad_id=model.pad_id, tool=model.tool,
            on_finished=on_finished,
        )  # fmt: skip
    tool = model.tool
    ids = [each.ids if tool is None else tool.visible_answer(each.ids) for each in completions]
    texts = [model.renderer.decode_answer(each) for each in ids]
    return texts if task.scorer.verbatim else [text.strip() for text in texts]


@torch.inference_mode()
def _choice_letters(
    model: InferenceModel, examples: Sequence[Example], prompts: Sequence[Sequence[int]],
    on_finished: Callable[[int], None],
) -> list[str]:  # fmt: skip
    """For each question the choice letter with the highest logit at the start of the answer.

    One forward pass; the head runs on one position per question. Padding follows the question, so causal attention
    does not see it.
    """
    network = model.model.eval()
    prefix, tokens = choice_letter_tokens(model.renderer, max(example.choices for example in examples))
    prompts = [[*prompt, *prefix] for prompt in prompts]
    device = next(network.parameters()).device
    letters = torch.tensor(tokens, device=device)
    answers = [""] * len(examples)
    with native_attention(network):
        for batch in length_sorted_batches([len(prompt) for prompt in prompts], _MAX_BATCH_TOKENS):
            PHASE.enter("generating")
            width = max(len(prompts[i]) for i in batch)
            rows = torch.tensor([[*prompts[i], *[0] * (width - len(prompts[i]))] for i in batch], device=device)
            ends = torch.tensor([len(prompts[i]) - 1 for i in batch], device=device)
            states = model_body(network)(input_ids=rows, use_cache=False).last_hidden_state
            hidden = states[torch.arange(len(batch)), ends]
            logits = read_output_head(network).logits(hidden)[:, letters].float().cpu()
            for i, row in zip(batch, logits, strict=True):
                answers[i] = ascii_uppercase[int(row[: examples[i].choices].argmax())]
            on_finished(len(batch))
    return answers


def choice_letter_tokens(renderer: Renderer, count: int) -> tuple[list[int], list[int]]:
    """(prefix, letters): the tokens before the letter of an answer in this chat template, such as a space, and the
    token of each letter A, B, …, which may include that space."""
    question = Message("user", "?")
    prompt = renderer.prompt_ids([question])
    tails = []
    for letter in ascii_uppercase[:count]:
        text = renderer.text.apply([question, Message("assistant", letter)])
        whole = renderer.tokenizer(text, add_special_tokens=False).input_ids
        alone = renderer.tokenizer(letter, add_special_tokens=False).input_ids
        tails.append(whole[len(prompt) :] if whole[: len(prompt)] == prompt else alone)
    split = next((i for i, tokens in enumerate(zip(*tails, strict=False)) if len(set(tokens)) > 1), None)
    if split is None or len({tail[split] for tail in tails}) < count:
        raise WhetError(
            "multiple choice cannot be scored by letters: the tokenizer does not encode each letter as a token of its "
            "own. Write the task as questions with answers instead"
        )
    return list(tails[0][:split]), [int(tail[split]) for tail in tails]


def length_sorted_batches(lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Indices in batches of similar length, to pad little; a padded batch has at most `max_tokens` tokens."""
    batches: list[list[int]] = []
    for i in sorted(range(len(lengths)), key=lambda i: lengths[i]):  # the last of a batch is its longest
        if batches and (len(batches[-1]) + 1) * lengths[i] <= max_tokens:
            batches[-1].append(i)
        else:
            batches.append([i])
    return batches


def baseline_score(task: Task, examples: Sequence[Example]) -> float:
    """Chance for multiple choice; else the score of empty answers."""
    if examples[0].choices:
        return sum(1 / example.choices for example in examples) / len(examples)
    if task.scorer.empty_score is not None:
        return task.scorer.empty_score
    return sum(task.scorer.score("", example) for example in examples) / len(examples)


def _score_answers(task: Task, answered: list[tuple[int, Example, str]]) -> list[AnsweredExample]:
    def score(number: int, example: Example, answer: str) -> AnsweredExample:
        points = task.scorer.score(answer, example)
        right = None if task.scorer.graded else points == 1
        return AnsweredExample(task.name, example.prompt, example.expected, answer, right, points, number)

    if not task.scorer.is_io_bound:
        return [score(*each) for each in answered]  # in the main thread, where limits of time hold
    with ThreadPoolExecutor(available_cores()) as pool:
        return list(pool.map(lambda each: score(*each), answered))


def _deadline_passed(deadline: float, ranks: Ranks) -> bool:
    """Whether the deadline has passed on any rank, so that all stop together."""
    late = torch.tensor([int(time.monotonic() >= deadline)])
    return bool(ranks.all_reduce_(late).item())
