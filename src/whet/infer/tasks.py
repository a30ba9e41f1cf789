"""Tasks that a model is scored on by the answers it generates."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from torch import nn

from whet.core.console import progress
from whet.core.errors import WhetError
from whet.core.ranks import Ranks
from whet.data.orders import orders
from whet.data.render import Renderer
from whet.infer.generate import Sampling, generate


@dataclass(frozen=True, slots=True)
class Task:
    """Held-out prompts with their right answers; an answer counts if it is exactly that, spaces around it aside."""

    name: str
    examples: Callable[[int], list[tuple[str, str]]]
    max_new_tokens: int


@dataclass(frozen=True, slots=True)
class Sample:
    """One answered example."""

    task: str
    prompt: str
    expected: str
    answer: str
    right: bool

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


TASKS = {
    "orders": Task("orders", lambda count: list(itertools.islice(orders("held-out"), count)), max_new_tokens=64),
}


def find_task(name: str) -> Task:
    if name not in TASKS:
        raise WhetError(f"eval.tasks: there is no task '{name}'; known are: {', '.join(TASKS)}")
    return TASKS[name]


def score(
    task: Task, count: int, model: nn.Module, renderer: Renderer, stop_ids: Sequence[int], ranks: Ranks,
    together: bool = False,
) -> tuple[float, list[Sample]]:  # fmt: skip
    """The part of `count` examples that the model answers exactly right, and all answers; ranks share the work.

    `together`: they share the model instead, so each token is computed by all of them, and all do the same examples.
    """
    mine = task.examples(count) if together else task.examples(count)[ranks.rank :: ranks.world]
    prompts = [renderer.prompt_ids([{"role": "user", "content": prompt}]) for prompt, _ in mine]
    pad = renderer.tokenizer.pad_token_id
    sampling = Sampling(max_new_tokens=task.max_new_tokens)
    with progress(f"scoring {task.name}", len(prompts)) as bar:
        answers = generate(model, prompts, stop_ids, pad if pad is not None else 0, sampling, done=bar.advance)
    samples = []
    for (prompt, expected), ids in zip(mine, answers, strict=True):
        answer = renderer.tokenizer.decode(ids, skip_special_tokens=True).strip()
        samples.append(Sample(task.name, prompt, expected, answer, answer == expected))
    everyone = samples if together else ranks.gather(samples)
    return sum(sample.right for sample in everyone) / len(everyone), everyone
