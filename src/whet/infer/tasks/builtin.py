"""Tasks that need no file: the held-out parts of what whet can generate, which no training on the others shows."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial

from whet.core.errors import WhetError
from whet.data.generated import BUILTIN
from whet.infer.config import TaskConfig
from whet.infer.scorers import make_scorer
from whet.infer.tasks.task import Example, Task

_KNOWN = {
    "orders": ("exact", 64),
    "spelling": ("exact", 64),
    "spelling-bee": ("number", 256),
    "arithmetic": ("number", 128),
}
"""By name: the scorer, and tokens for an answer."""


def builtin_names() -> list[str]:
    return list(_KNOWN)


def builtin_task(config: TaskConfig) -> Task:
    """A task that is built in; a WhetError that lists them for another name."""
    name = config.builtin
    if name not in _KNOWN:
        raise WhetError(
            f"eval.tasks: there is no task '{name}'; known are: {', '.join(_KNOWN)}. Or give the path of a file, "
            "such as ./my.jsonl"
        )
    for key in ("fields", "split", "subset"):
        if getattr(config, key) is not None:
            raise WhetError(f"eval.tasks: {config.title}: {key} is for files and means nothing here; remove it")
    scorer, longest = _KNOWN[name]
    examples: Callable[[int], list[Example]] = partial(_examples, name, config.system)
    judge = make_scorer(config, config.scorer or scorer)
    return Task(config.title, examples, config.max_new_tokens or longest, judge, config.calculator)


def _examples(name: str, system: str | None, count: int) -> list[Example]:
    opening = ({"role": "system", "content": system},) if system else ()
    found = []
    for number, sample in enumerate(itertools.islice(BUILTIN[f"builtin:{name}"]("held-out", "remove"), count), 1):
        *asked, answer = sample.messages
        messages = (*opening, *(message.as_dict() for message in asked))
        found.append(Example(messages, (answer.content,), f"builtin:{name}, number {number}"))
    return found
