"""Asking a model the questions of a task, over all ranks, and judging its answers."""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext

import torch

from whet.core.console import progress
from whet.core.cores import usable_cores
from whet.core.ranks import Ranks
from whet.infer.tasks.answers import Answerer
from whet.infer.tasks.task import Example, Sample, Scored, Task

_ROUND = 32  # examples of each rank between two looks at the clock


def score_all(
    tasks: Sequence[tuple[Task, int]], answerer: Answerer, ranks: Ranks, together: bool = False,
    minutes: float | None = None, context: AbstractContextManager[object] | None = None,
) -> list[Scored]:  # fmt: skip
    """Each task in turn, with an even share of the time that is left; each is asked at least one round."""
    until = None if minutes is None else time.monotonic() + 60 * minutes
    found = []
    for number, (task, count) in enumerate(tasks):
        share = None
        if until is not None:
            now = time.monotonic()
            share = now + max(0.0, until - now) / (len(tasks) - number)
        with context or nullcontext():
            found.append(score(task, count, answerer, ranks, together, share))
    return found


def score(
    task: Task, count: int, answerer: Answerer, ranks: Ranks, together: bool = False, until: float | None = None
) -> Scored:
    """The first `count` examples of a task, or as many as there is time for until that moment.

    Ranks share the examples. `together`: they share the model instead, so each token is computed by all of them, and
    all do the same examples. What can go wrong with an example is looked for on every rank, so that none
    waits for another.
    """
    examples = task.examples(count)
    prompts = answerer.prompts(task, examples)
    base = baseline(task, examples)
    rank, world = (0, 1) if together else (ranks.rank, ranks.world)
    size = len(examples) if until is None else _ROUND * world
    samples: list[Sample] = []
    with progress(f"scoring {task.name}", len(examples)) as bar:
        for start in range(0, len(examples), size):
            mine = range(start + rank, min(start + size, len(examples)), world)
            answers = answerer.answers(
                task, [examples[i] for i in mine], [prompts[i] for i in mine], lambda n: bar.advance(n * world)
            )
            samples += _judge(task, [(i, examples[i], answer) for i, answer in zip(mine, answers, strict=True)])
            if until is not None and _time_is_up(until, ranks):
                break
    everyone = samples if together else sorted(ranks.gather(samples), key=lambda sample: sample.number)
    asked = [examples[sample.number] for sample in everyone]
    if len(asked) < len(examples):
        base = baseline(task, asked)
    whole = task.scorer.whole
    return Scored(
        task.name, task.scorer.name, everyone, len(examples), base, task.scorer.graded,
        whole([sample.answer for sample in everyone], asked) if whole else None,
    )  # fmt: skip


def baseline(task: Task, examples: Sequence[Example]) -> float:
    """Chance where there are choices; else what empty answers score."""
    if examples[0].choices:
        return sum(1 / example.choices for example in examples) / len(examples)
    if task.scorer.empty is not None:
        return task.scorer.empty
    return sum(task.scorer.score("", example) for example in examples) / len(examples)


def _judge(task: Task, answered: list[tuple[int, Example, str]]) -> list[Sample]:
    with ThreadPoolExecutor(usable_cores() if task.scorer.waits else 1) as pool:
        return list(pool.map(lambda each: _judged(task, *each), answered))


def _judged(task: Task, number: int, example: Example, answer: str) -> Sample:
    points = task.scorer.score(answer, example)
    right = None if task.scorer.graded else points == 1
    return Sample(task.name, example.prompt, example.expected, answer, right, points, number)


def _time_is_up(until: float, ranks: Ranks) -> bool:
    """If one rank's clock says so, it is for all of them."""
    late = torch.tensor([int(time.monotonic() >= until)])
    return bool(ranks.sum_(late).item())
