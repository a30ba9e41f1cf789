"""Scoring a model on tasks: letters from logits for multiple choice, generated text otherwise; ranks share the examples."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from string import ascii_uppercase
from typing import Any

import torch
from torch import nn

from whet.core.console import progress
from whet.core.distributed import Ranks
from whet.core.errors import BadRecordError, WhetError
from whet.core.heartbeat import PHASE
from whet.core.resources import available_cores
from whet.data.render.renderer import Renderer
from whet.inference.calculator_tool import Tool, has_calculator_tokens, make_calculator, tool_schemas
from whet.inference.generate import generate
from whet.inference.sampling import Sampling
from whet.inference.tasks.task import AnsweredExample, Example, Task, TaskResult
from whet.model.attention import native_attention
from whet.model.loss.output_head import read_output_head

# What a model answers: letters from its logits where there are choices, generated text where there are none.

_MAX_BATCH_TOKENS = 16_384  # of one forward pass over questions with choices


@dataclass(frozen=True, slots=True)
class TaskModel:
    """A model that can be asked, with what it takes to write questions for it and to read its answers."""

    model: nn.Module
    renderer: Renderer
    stops: Sequence[int]

    def prompts(self, task: Task, examples: Sequence[Example]) -> list[list[int]]:
        """The tokens of each question; a WhetError for one that leaves no room for an answer."""
        prompts = []
        room = max_context_length(self.model)
        longest = 1 if examples and examples[0].choices else task.max_new_tokens
        offer = tool_schemas(self._calculator(task))
        for example in examples:
            try:
                prompts.append(self.renderer.prompt_ids(example.messages, offer))
            except BadRecordError as error:
                raise WhetError(f"{example.place}: {error}") from None
            if room is not None and len(prompts[-1]) + longest > room:
                raise WhetError(
                    f"{example.place}: the question has {len(prompts[-1]):,} tokens and its answer may have "
                    f"{longest:,}, more than the {room:,} that the model can see. Shorten the question, leave it out, "
                    f"or set max_new_tokens of the task {task.name}"
                )
        return prompts

    def answers(
        self, task: Task, examples: Sequence[Example], prompts: Sequence[Sequence[int]], done: Callable[[int], None]
    ) -> list[str]:
        """The answer to each question."""
        if not examples:
            return []
        if examples[0].choices:
            return self._letters(examples, prompts, done)
        pad = self.renderer.tokenizer.pad_token_id
        sampling = Sampling(max_new_tokens=task.max_new_tokens)
        tools = self._calculator(task)
        ids = generate(self.model, prompts, self.stops, pad if pad is not None else 0, sampling, done=done, tools=tools)
        if tools is not None:
            ids = [list(tools.said(each)) for each in ids]
        texts = [str(self.renderer.tokenizer.decode(each, skip_special_tokens=True)) for each in ids]
        return texts if task.scorer.verbatim else [text.strip() for text in texts]

    def _calculator(self, task: Task) -> Tool | None:
        wanted = has_calculator_tokens(self.renderer) if task.calculator is None else task.calculator
        return make_calculator(self.renderer) if wanted else None

    @torch.inference_mode()
    def _letters(
        self, examples: Sequence[Example], prompts: Sequence[Sequence[int]], done: Callable[[int], None]
    ) -> list[str]:
        """Of the letters, the one with the highest logit where the answer begins: one pass, and only one position of
        each question needs the head. Padding stands behind the question, where it cannot be seen."""
        self.model.eval()
        lead, tokens = choice_letter_tokens(self.renderer, max(example.choices for example in examples))
        prompts = [[*prompt, *lead] for prompt in prompts]
        device = next(self.model.parameters()).device
        letters = torch.tensor(tokens, device=device)
        found = [""] * len(examples)
        with native_attention(self.model):
            for numbers in length_sorted_batches([len(prompt) for prompt in prompts], _MAX_BATCH_TOKENS):
                PHASE.enter("answering prompts")
                width = max(len(prompts[i]) for i in numbers)
                rows = torch.tensor([[*prompts[i], *[0] * (width - len(prompts[i]))] for i in numbers], device=device)
                ends = torch.tensor([len(prompts[i]) - 1 for i in numbers], device=device)
                body: Any = self.model.base_model
                hidden = body(input_ids=rows, use_cache=False).last_hidden_state[torch.arange(len(numbers)), ends]
                logits = read_output_head(self.model).logits(hidden)[:, letters].float().cpu()
                for i, row in zip(numbers, logits, strict=True):
                    found[i] = ascii_uppercase[int(row[: examples[i].choices].argmax())]
                done(len(numbers))
        return found


def choice_letter_tokens(renderer: Renderer, count: int) -> tuple[list[int], list[int]]:
    """With what an answer A, B, … begins in this template: what comes before all letters, such as a space, and then the
    token of each, which some join with that space."""
    question = {"role": "user", "content": "?"}
    prompt = renderer.prompt_ids([question])
    tails = []
    for letter in ascii_uppercase[:count]:
        text = renderer.apply_chat_template([question, {"role": "assistant", "content": letter}])
        whole = renderer.tokenizer(text, add_special_tokens=False).input_ids
        alone = renderer.tokenizer(letter, add_special_tokens=False).input_ids
        tails.append(whole[len(prompt) :] if whole[: len(prompt)] == prompt else alone)
    same = next((i for i, tokens in enumerate(zip(*tails, strict=False)) if len(set(tokens)) > 1), None)
    if same is None or len({tail[same] for tail in tails}) < count:
        raise WhetError(
            "the tokenizer does not tell the letters of choices apart, so multiple choice cannot be scored by them. "
            "Give the task as questions with answers instead"
        )
    return list(tails[0][:same]), [int(tail[same]) for tail in tails]


def length_sorted_batches(lengths: Sequence[int], most: int) -> list[list[int]]:
    """Numbers of like length together, so that little is padded, and no more than `most` tokens at once with it."""
    made: list[list[int]] = []
    for number in sorted(range(len(lengths)), key=lambda i: lengths[i]):  # the last of a batch is its longest
        if made and (len(made[-1]) + 1) * lengths[number] <= most:
            made[-1].append(number)
        else:
            made.append([number])
    return made


def max_context_length(model: nn.Module) -> int | None:
    """The most tokens that the model can see; None if it does not say."""
    config: Any = model.config
    return getattr(config.get_text_config(), "max_position_embeddings", None)


# Asking a model the questions of a task, over all ranks, and judging its answers.

_EXAMPLES_PER_ROUND = 32  # examples of each rank between two looks at the clock


def score_tasks(
    tasks: Sequence[tuple[Task, int]], answerer: TaskModel, ranks: Ranks, together: bool = False,
    minutes: float | None = None, context: AbstractContextManager[object] | None = None,
) -> list[TaskResult]:  # fmt: skip
    """Each task in turn, with an even share of the time that is left; each is asked at least one round."""
    until = None if minutes is None else time.monotonic() + 60 * minutes
    found = []
    for number, (task, count) in enumerate(tasks):
        share = None
        if until is not None:
            now = time.monotonic()
            share = now + max(0.0, until - now) / (len(tasks) - number)
        with context or nullcontext():
            found.append(score_task(task, count, answerer, ranks, together, share))
    return found


def score_task(
    task: Task, count: int, answerer: TaskModel, ranks: Ranks, together: bool = False, until: float | None = None
) -> TaskResult:
    """The first `count` examples of a task, or as many as there is time for until that moment.

    Ranks share the examples. `together`: they share the model instead, so each token is computed by all of them, and
    all do the same examples. What can go wrong with an example is looked for on every rank, so that none
    waits for another.
    """
    examples = task.examples(count)
    prompts = answerer.prompts(task, examples)
    base = baseline_score(task, examples)
    rank, world = (0, 1) if together else (ranks.rank, ranks.world_size)
    size = len(examples) if until is None else _EXAMPLES_PER_ROUND * world
    samples: list[AnsweredExample] = []
    with progress(f"scoring {task.name}", len(examples)) as bar:
        for start in range(0, len(examples), size):
            mine = range(start + rank, min(start + size, len(examples)), world)
            answers = answerer.answers(
                task, [examples[i] for i in mine], [prompts[i] for i in mine], lambda n: bar.advance(n * world)
            )
            samples += _score_answers(task, [(i, examples[i], answer) for i, answer in zip(mine, answers, strict=True)])
            if until is not None and _deadline_passed(until, ranks):
                break
    everyone = samples if together else sorted(ranks.all_gather(samples), key=lambda sample: sample.number)
    asked = [examples[sample.number] for sample in everyone]
    if len(asked) < len(examples):
        base = baseline_score(task, asked)
    whole = task.scorer.whole
    return TaskResult(
        task.name, task.scorer.name, everyone, len(examples), base, task.scorer.graded,
        whole([sample.answer for sample in everyone], asked) if whole else None,
    )  # fmt: skip


def baseline_score(task: Task, examples: Sequence[Example]) -> float:
    """Chance where there are choices; else what empty answers score."""
    if examples[0].choices:
        return sum(1 / example.choices for example in examples) / len(examples)
    if task.scorer.empty is not None:
        return task.scorer.empty
    return sum(task.scorer.score("", example) for example in examples) / len(examples)


def _score_answers(task: Task, answered: list[tuple[int, Example, str]]) -> list[AnsweredExample]:
    with ThreadPoolExecutor(available_cores() if task.scorer.waits else 1) as pool:
        return list(pool.map(lambda each: _score_answer(task, *each), answered))


def _score_answer(task: Task, number: int, example: Example, answer: str) -> AnsweredExample:
    points = task.scorer.score(answer, example)
    right = None if task.scorer.graded else points == 1
    return AnsweredExample(task.name, example.prompt, example.expected, answer, right, points, number)


def _deadline_passed(until: float, ranks: Ranks) -> bool:
    """If one rank's clock says so, it is for all of them."""
    late = torch.tensor([int(time.monotonic() >= until)])
    return bool(ranks.all_reduce_(late).item())
